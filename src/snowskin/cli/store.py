"""``snowskin store …``: the store alone, its processes and a client."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from snowskin.cli.sizes import parse_bytes

if TYPE_CHECKING:
    from snowskin.store import StoreClient
    from snowskin.store.objects.client import PinName

app = typer.Typer(no_args_is_help=True, help="A shared store of large objects, without any model.")

_DEFAULT_MASTER = "127.0.0.1:7411"
JOIN_S = 5.0
"""How long a node's start waits for the master; later it joins when the master is there."""
ClusterKey = Annotated[
    str,
    typer.Option(
        envvar="SNOWSKIN_CLUSTER_KEY",
        help="The same for master, nodes and clients. Needed where others can reach them.",
        show_default=False,
    ),
]
MasterAddress = Annotated[
    str, typer.Option("--master", envvar="SNOWSKIN_MASTER", help="host:port of the master.")
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for master or nodes.")]


@app.command("master")
def master_command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any; it is shown.")] = 7411,
    cluster_key: ClusterKey = "",
    recovery: Annotated[
        float, typer.Option(help="Seconds after the start in which nodes may report back.")
    ] = 1.0,
    objects: Annotated[int, typer.Option(help="Most objects.")] = 20_000_000,
) -> None:
    """Run the master: it knows which node holds what. It keeps nothing on disk: nodes tell it."""
    from snowskin.store.objects.catalog import CatalogConfig
    from snowskin.store.objects.listening import check_exposure
    from snowskin.store.objects.master import Master, MasterConfig

    check_exposure(host, cluster_key.encode())
    master = Master(
        MasterConfig(
            host=host,
            port=port,
            cluster_key=cluster_key.encode(),
            recovery_s=recovery,
            catalog=CatalogConfig(object_limit=objects),
        )
    )
    _on_end(master.stop)
    typer.echo(f"snowskin store master at {host}:{master.address[1]}")
    sys.stdout.flush()
    master.run()


@app.command("node")
def node_command(
    master: MasterAddress = _DEFAULT_MASTER,
    name: Annotated[
        str | None, typer.Option(help="Unique; a restarted node keeps it. Default: host-pid.")
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on and to be reached at, or several, separated by commas."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any.")] = 0,
    dram: Annotated[str, typer.Option(help="Memory to lend, e.g. 8GiB.")] = "1GiB",
    eviction: Annotated[str, typer.Option(help="lru, lfu or length-aware.")] = "lru",
    high_watermark: Annotated[
        float, typer.Option(help="Fuller than this, objects are evicted in the background …")
    ] = 0.95,
    low_watermark: Annotated[float, typer.Option(help="… until it is no fuller than this.")] = 0.9,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    ssd: Annotated[
        Path | None, typer.Option(help="Directory for what memory has no room for.")
    ] = None,
    ssd_bytes: Annotated[str, typer.Option(help="Most that it takes there.")] = "8GiB",
    cluster_key: ClusterKey = "",
) -> None:
    """Run a node: it lends memory to the store and serves what lies there."""
    from snowskin.store.objects.client import parse_address
    from snowskin.store.objects.listening import check_exposure
    from snowskin.store.objects.node import NodeConfig, StoreNode

    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    check_exposure(host, cluster_key.encode())
    master_host, master_port = parse_address(master)
    node = StoreNode(
        NodeConfig(
            master_host=master_host,
            master_port=master_port,
            name=name or f"{socket.gethostname()}-{os.getpid()}",
            host=host,
            port=port,
            cluster_key=cluster_key.encode(),
            dram_bytes=parse_bytes(dram, option="--dram"),
            eviction=eviction,
            high_ratio=high_watermark,
            low_ratio=low_watermark,
            ssd_directory=None if ssd is None else str(ssd),
            ssd_bytes=0 if ssd is None else parse_bytes(ssd_bytes, option="--ssd-bytes"),
        )
    )
    ended = threading.Event()
    _on_end(ended.set)
    node.start()
    node.link.wait_joined(JOIN_S)
    typer.echo(f"snowskin store node {node.address.name} at {host}:{node.address.port}")
    sys.stdout.flush()
    ended.wait()
    node.stop()
    sys.stdout.flush()
    # Threads may be in the middle of serving a client; there is nothing to be tidied up.
    os._exit(0)


@app.command("put")
def put_command(
    key: Annotated[str, typer.Argument()],
    file: Annotated[Path, typer.Argument(help="What to store; - is standard input.")],
    replicas: Annotated[int, typer.Option(help="On how many nodes.")] = 1,
    pin: Annotated[str, typer.Option(help="none, soft or hard.")] = "none",
    master: MasterAddress = _DEFAULT_MASTER,
    cluster_key: ClusterKey = "",
    timeout: Timeout = 10.0,
) -> None:
    """Store a file under a key."""
    value = sys.stdin.buffer.read() if str(file) == "-" else _mapped(file)
    with _client(master, cluster_key, timeout) as client:
        result = client.put(key, value, replicas=replicas, pin=cast("PinName", pin))
    replicas_told = f"{result.replicas} of {result.wanted_replicas} replicas"
    typer.echo(f"{result.status}: {len(value)} bytes, {replicas_told}")


@app.command("get")
def get_command(
    key: Annotated[str, typer.Argument()],
    file: Annotated[Path, typer.Argument(help="Where to write it; - is standard output.")],
    master: MasterAddress = _DEFAULT_MASTER,
    cluster_key: ClusterKey = "",
    timeout: Timeout = 10.0,
) -> None:
    """Write an object to a file."""
    with _client(master, cluster_key, timeout) as client:
        value = client.get(key)
        if str(file) == "-":
            sys.stdout.buffer.write(value)
            sys.stdout.buffer.flush()
        else:
            file.write_bytes(value)
            typer.echo(f"{len(value)} bytes in {file}")


@app.command("ls")
def ls_command(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin with it.")] = "",
    master: MasterAddress = _DEFAULT_MASTER,
    cluster_key: ClusterKey = "",
    timeout: Timeout = 10.0,
) -> None:
    """List keys, in order."""
    with _client(master, cluster_key, timeout) as client:
        for key in client.list(prefix):
            typer.echo(key)


@app.command("stat")
def stat_command(
    key: Annotated[str | None, typer.Argument(help="An object; else the whole store.")] = None,
    master: MasterAddress = _DEFAULT_MASTER,
    cluster_key: ClusterKey = "",
    timeout: Timeout = 10.0,
) -> None:
    """Show an object, or the store with its nodes, as JSON."""
    import msgspec

    with _client(master, cluster_key, timeout) as client:
        found = client.stat() if key is None else client.info(key)
    shown = msgspec.structs.asdict(found)
    typer.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())


@app.command("rm")
def rm_command(
    keys: Annotated[list[str], typer.Argument()],
    master: MasterAddress = _DEFAULT_MASTER,
    cluster_key: ClusterKey = "",
    timeout: Timeout = 10.0,
) -> None:
    """Remove objects."""
    with _client(master, cluster_key, timeout) as client:
        for key in keys:
            client.remove(key)


@contextmanager
def _client(master: str, cluster_key: str, timeout_s: float) -> Iterator[StoreClient]:
    from snowskin.store import StoreClient

    with StoreClient(master, cluster_key=cluster_key, timeout_s=timeout_s) as client:
        yield client


def _mapped(file: Path) -> memoryview:
    """A file's bytes, without reading them into memory of ours."""
    import mmap

    from snowskin.terms.errors import InvalidInput

    try:
        with file.open("rb") as opened:
            if not file.stat().st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {file}: {error}", parameter="file") from error


def _on_end(stop: Callable[[], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop())
