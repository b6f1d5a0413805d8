"""Asking a server that is not there, or that is something else."""

import socket
import threading

import pytest

from snowskin.cli.asking import ask
from snowskin.terms.errors import SnowskinError


@pytest.mark.parametrize("answer", [None, b"", b"snow\r\n\r\n"])
def test_whoever_does_not_speak_http_has_not_answered(answer: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                if answer is not None:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/snowskin/requests"
        with pytest.raises(SnowskinError, match=f"no answer from {address} .*is the server up"):
            ask(address, None)
        thread.join()
