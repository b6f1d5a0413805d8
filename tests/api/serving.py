"""Serves an app on a real loopback socket, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from snowskin.api.app import create_app
from snowskin.api.backend import Backend
from snowskin.api.config import ApiConfig
from snowskin.api.tokenizer import TextTokenizer


@contextmanager
def served(
    backend: Backend, tokenizer: TextTokenizer, config: ApiConfig | None = None
) -> Iterator[str]:
    """The base URL."""
    app = create_app(backend, tokenizer, config or ApiConfig())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def until(reached: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait for a state, with a bound that only a hanging server meets."""
    deadline_s = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline_s, "the state was never reached"
        time.sleep(0.005)
