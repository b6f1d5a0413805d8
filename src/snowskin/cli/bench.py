"""``snowskin bench …``: what this machine gives, beside its own limits in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from snowskin.cli.bench_serve import engine_command, serve_command
from snowskin.cli.bench_simulate import conductor_command, simulate_command
from snowskin.cli.sizes import parse_bytes

app = typer.Typer(no_args_is_help=True, help="Measure this machine, beside its limits.")

app.command("serve")(serve_command)
app.command("engine")(engine_command)
app.command("simulate")(simulate_command)
app.command("conductor")(conductor_command)

Json = Annotated[Path | None, typer.Option(help="Write the rows to this file.")]


@app.command("store")
def store_command(
    size: Annotated[
        list[str] | None, typer.Option(help="Objects' sizes; may be repeated. Default: 5 sizes.")
    ] = None,
    clients: Annotated[list[int] | None, typer.Option(help="Default: 1 and 8.")] = None,
    transport: Annotated[
        list[str] | None, typer.Option(help="tcp, shm, nixl, ssd. Default: all that there are.")
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="get_into, get, get_many, put_from (objects), pull, pull_many, pull_busy, "
            "pull_inside (blocks of KV), read, write (--ssd). Default: all."
        ),
    ] = None,
    cycle: Annotated[str, typer.Option(help="Gets go round objects of so many bytes.")] = "256MiB",
    rounds: Annotated[int, typer.Option(help="Rounds in which all are run in turn.")] = 4,
    round_s: Annotated[float, typer.Option("--round", help="Seconds of each.")] = 0.3,
    peer_python: Annotated[
        str | None, typer.Option(help="Python with mooncake installed: run it beside.")
    ] = None,
    ssd: Annotated[
        Path | None, typer.Option(help="Measure the SSD tier, too, in this directory.")
    ] = None,
    json: Json = None,
) -> None:
    """Gets, puts and pulls over TCP, shared memory and NIXL, beside a bare socket or copy."""
    from snowskin.store.bench.data import bench_store
    from snowskin.store.bench.rows import DEFAULT_SIZES, OPS, StoreBenchConfig

    sizes = tuple(parse_bytes(text, option="--size") for text in size or ())
    config = StoreBenchConfig(
        sizes=sizes or DEFAULT_SIZES,
        clients=tuple(clients or (1, 8)),
        transports=tuple(transport or _transports(ssd)),
        ops=tuple(op or OPS),
        cycle_bytes=parse_bytes(cycle, option="--cycle"),
        rounds=rounds,
        round_s=round_s,
        peer_python=peer_python,
        ssd=None if ssd is None else str(ssd),
    )
    typer.echo(
        "path op            size KiB  clients      MB/s    p50 µs    p99 µs   limit MB/s  ratio"
        + ("" if peer_python is None else "  peer ×")
    )
    rows = bench_store(
        config,
        lambda row: typer.echo(
            f"{row.transport:4} {row.op:11} {row.size_bytes / 1024:10,.0f} {row.clients:8} "
            f"{row.bytes_per_s / 1e6:9,.0f} {row.p50_s * 1e6:9,.1f} {row.p99_s * 1e6:9,.1f} "
            f"{row.limit_bytes_per_s / 1e6:12,.0f} {row.ratio:6.2f}"
            + ("" if row.peer_ratio is None else f" {row.peer_ratio:7.2f}")
        ),
    )
    _write(rows, json)


@app.command("directory")
def directory_command(
    objects: Annotated[int, typer.Option(help="Objects that the master knows.")] = 20_000,
    rounds: Annotated[int, typer.Option(help="Rounds in which all are run in turn.")] = 5,
    round_s: Annotated[float, typer.Option("--round", help="Seconds of each.")] = 0.4,
    json: Json = None,
) -> None:
    """Look-ups of one client at the master, beside a bare echo."""
    from snowskin.store.bench.directory import DirectoryBenchConfig, bench_directory

    config = DirectoryBenchConfig(objects=objects, rounds=rounds, round_s=round_s)
    typer.echo("op             batch        keys/s       limit/s   ratio")
    rows = bench_directory(
        config,
        lambda row: typer.echo(
            f"{row.op:12} {row.batch:7,} {row.per_s:13,.0f} {row.limit_per_s:13,.0f} "
            f"{row.ratio:7.3f}"
        ),
    )
    _write(rows, json)


def _transports(ssd: Path | None) -> Sequence[str]:
    """All that there are here, and a note on what is left out for want of a package."""
    from snowskin.terms.errors import InvalidInput
    from snowskin.transfer.transports.nixl import import_nixl

    transports = ["tcp", "shm"]
    try:
        import_nixl()
        transports.append("nixl")
    except InvalidInput:
        note = "no rows of nixl, which is not installed; for them install snowskin[nixl]"
        typer.echo(note, err=True)
    return transports if ssd is None else [*transports, "ssd"]


def _write(rows: Sequence[Any], file: Path | None) -> None:
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
