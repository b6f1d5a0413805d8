"""Brings a cluster and its API up, and down together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn
import uvloop

from snowskin.api.app import create_app
from snowskin.api.config import ApiConfig
from snowskin.api.tokenizer import TextTokenizer
from snowskin.cli.recording import Recording
from snowskin.cluster.config import ServeConfig
from snowskin.cluster.front import Cluster
from snowskin.cluster.prepare import machine_profile, prepare_model, serving_info
from snowskin.measure.records import Slo
from snowskin.terms.errors import InvalidInput
from snowskin.trace.record import TraceRecorder

log = logging.getLogger("snowskin.serve")

SHUTDOWN_GRACE_S = 3
"""Open connections get so long to take their last bytes."""
BACKLOG_CONNECTIONS = 2048


def run_server(config: ServeConfig, *, record: Path | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        record: a new file that takes each served request as a trace.

    Raises:
        SnowskinError: the model, the machine or a node cannot do what is asked; nothing is left.
    """
    # Until the loop takes it over: an exception stops what prepares, and clears up after it.
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.closing(_listen(config)) as listener, _recorder(config, record) as recorder:
        model = prepare_model(config)
        info = serving_info(config, model)
        profile = machine_profile(config, model)
        tokenizer = TextTokenizer.load(model.model_dir)
        cluster = Cluster(config, info, profile)
        app = create_app(
            cluster,
            tokenizer,
            ApiConfig(
                api_key=config.api_key,
                slo=Slo(ttft_s=config.ttft_slo_s, tbt_s=config.tbt_slo_s),
            ),
        )
        server = _Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            )
        )
        recording = None if recorder is None else Recording(recorder, cluster.served)
        uvloop.run(_run(cluster, server, listener, recording))
    # Everything is closed; taking the interpreter apart would keep the user's prompt waiting.
    logging.shutdown()
    os._exit(0)


def _recorder(
    config: ServeConfig, record: Path | None
) -> contextlib.AbstractContextManager[TraceRecorder | None]:
    """Begin the recording before anything else, so that a wrong file is told at once."""
    if record is None:
        return contextlib.nullcontext()
    name = Path(config.model).resolve().name
    return TraceRecorder(record, block_tokens=config.block_tokens, name=f"{name} live")


def _leave(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


class _Server(uvicorn.Server):
    """Leaves signals to ``_run``: the nodes are to end before the API does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(config: ServeConfig) -> socket.socket:
    """Take the port before anything else, so that a port in use is told at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server(
            (config.host, config.port), family=family, backlog=BACKLOG_CONNECTIONS
        )
    except OSError as error:
        raise InvalidInput(
            f"cannot listen on {config.host}:{config.port}: {_words(error)}; "
            "choose another --port or --host",
            parameter="--port",
        ) from error


def _words(error: OSError) -> str:
    """The system's words alone: ``create_server`` adds the address to them, once more."""
    return (error.strerror or str(error)).partition(" (while attempting")[0]


async def _run(
    cluster: Cluster, server: _Server, listener: socket.socket, recording: Recording | None
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    cluster.launch()
    log.info("starting %s", ", ".join(node.node for node in cluster.status().nodes))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(_announce(cluster, listener.getsockname()[1]))
    stopping = asyncio.create_task(stop.wait())
    keeping = None if recording is None else asyncio.create_task(recording.keep())
    try:
        await asyncio.wait({serving, starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        log.info("stopping")
        for task in (starting, stopping):
            task.cancel()
        # Streams end with an error of their own before their connections are waited for.
        await cluster.stop()
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        server.should_exit = True
        await serving


async def _announce(cluster: Cluster, port: int) -> None:
    await cluster.wait_ready()
    log.info("ready: %s on http://127.0.0.1:%d/v1, documented at /docs", cluster.info.model, port)
