"""The limit: a bare Python socket server that sends and takes bytes, and does nothing else.

A request is an operation, an offset and a length. ``GET`` is answered with these bytes of a large
buffer, ``PUT`` is followed by bytes for it and answered with one byte. Client and server use what
the store uses (blocking sockets, registered memory), without keys, checks or bookkeeping.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading

import msgspec
import numpy as np

from snowskin.transfer.child import Child, Parent

REQUEST = struct.Struct("<BxxxIQ")
GET, PUT = 1, 2


class RawConfig(msgspec.Struct, frozen=True):
    """How much memory is cycled through."""

    buffer_bytes: int


class RawReady(msgspec.Struct, frozen=True):
    """Where the server listens."""

    port: int
    unix: str


class RawServer:
    """A child process that serves over TCP and a unix socket."""

    def __init__(self, buffer_bytes: int) -> None:
        self._child = Child("snowskin.store.bench.raw", RawConfig(buffer_bytes))
        self._ready = self._child.hear(RawReady, timeout_s=60.0)
        self.buffer_bytes = buffer_bytes

    def connect(self, *, unix: bool) -> socket.socket:
        """A connection to it."""
        if unix:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(f"\0{self._ready.unix}")
        else:
            connection = socket.create_connection(("127.0.0.1", self._ready.port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def stop(self) -> None:
        """End it."""
        self._child.stop(grace_s=2.0)


def raw_get(connection: socket.socket, offset: int, target: memoryview) -> None:
    """Bytes of the server's buffer into ours."""
    connection.sendall(REQUEST.pack(GET, len(target), offset))
    while target:
        received = connection.recv_into(target)
        if not received:
            raise ConnectionError("the raw server ended")
        target = target[received:]


def raw_put(connection: socket.socket, offset: int, source: memoryview) -> None:
    """Our bytes into the server's buffer."""
    connection.sendmsg([REQUEST.pack(PUT, len(source), offset)])
    connection.sendall(source)
    if not connection.recv(1):
        raise ConnectionError("the raw server ended")


def _serve(connection: socket.socket, buffer: memoryview) -> None:
    head = bytearray(REQUEST.size)
    with connection, contextlib.suppress(OSError):
        while connection.recv_into(head, 0, socket.MSG_WAITALL) == REQUEST.size:
            operation, length, offset = REQUEST.unpack(head)
            part = buffer[offset : offset + length]
            if operation == GET:
                connection.sendall(part)
                continue
            while part:
                part = part[connection.recv_into(part) :]
            connection.sendall(b".")


def _accept(listening: socket.socket, buffer: memoryview, *, tcp: bool) -> None:
    while True:
        connection, _ = listening.accept()
        if tcp:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve, args=(connection, buffer), daemon=True).start()


def main() -> None:
    """The server's process."""
    parent = Parent()
    config = parent.hear(RawConfig)
    buffer = np.ones(config.buffer_bytes, dtype=np.uint8).data
    tcp = socket.create_server(("127.0.0.1", 0))
    name = f"snowskin-raw-{secrets.token_hex(8)}"
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind(f"\0{name}")
    unix.listen(64)
    for listening in (tcp, unix):
        threading.Thread(
            target=_accept, args=(listening, buffer), kwargs={"tcp": listening is tcp}, daemon=True
        ).start()
    parent.say(RawReady(tcp.getsockname()[1], name))
    parent.watch(lambda: os._exit(0), grace_s=1.0)
    threading.Event().wait()


if __name__ == "__main__":
    main()
