"""Asking a server that is not there, or that is something else."""

import http.server
import socket
import threading
from pathlib import Path

import pytest

from snowskin.cli.asking import ask
from snowskin.terms.errors import SnowskinError
from tests.cli.serving import snowskin


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


@pytest.mark.parametrize("address", ["", "nonsense", "http://", "http://[::1", "http://a b:80/"])
def test_what_is_no_address_is_told_with_how_one_looks(address: str) -> None:
    with pytest.raises(SnowskinError, match=r"no answer from .* --url http://HOST:PORT"):
        ask(address, None)


@pytest.mark.parametrize("body", [b"<html>", b'{"requests": 1}', b""])
def test_a_web_server_that_is_none_of_ours_is_told_from_one(body: bytes, tmp_path: Path) -> None:
    class Foreign(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        ran = snowskin("trace", "record", str(tmp_path / "t"), "--url", url)
        server.shutdown()
    assert ran.returncode == 2
    assert f"what answers at {url} is no snowskin server" in ran.stderr
    assert not list(tmp_path.iterdir())
