"""What goes over a data connection, to the byte. All integers are little-endian.

Client to server, after authentication: a request, ``REQUEST`` (magic, number of blocks, seconds
that the server may wait, CRC-32 of both and of what follows), then that many ``WANTED`` entries
(slot, generation).

Server to client: frames of ``FRAME_BYTES`` (the last four are the CRC-32 of the others), each
followed by the bytes of its parts if it is a slice. Blocks are named by their index in the
request. The CRCs are there because TCP's own checksum is weak, and a right block taken for another
one is as wrong as a broken one.

* ``SLICE``: ``parts`` parts of a block from part ``first``; ``checksum`` is xxh3-64 of them. A
  slice may be of a whole sealed block, then its checksum is the stored one.
* ``END``: nothing more comes for the block. ``status`` tells whether all of it was sent; if the
  block is sealed, ``checksum`` is the stored one of the whole block.
* ``DONE``: every block has ended; the connection is free for the next request.

A client that wants no more closes the connection.
"""

from __future__ import annotations

import enum
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

REQUEST = struct.Struct("<4sIdI")
REQUEST_MAGIC = b"PULL"
WANTED = np.dtype([("slot", "<u4"), ("generation", "<u8")])
_REQUEST_CHECKED = struct.Struct("<Id")
_FRAME = struct.Struct("<BBxxIIIQ")
_CRC = struct.Struct("<I")
FRAME_BYTES = _FRAME.size + _CRC.size
BLOCKS_LIMIT = 65_536
"""Most blocks in one request."""
SILENCE_LIMIT_S = 10
WAIT_LIMIT_S = 3600.0
"""Longest that a server waits for blocks to become ready."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    SLICE = 1
    END = 2
    DONE = 3


class EndStatus(enum.IntEnum):
    """How a block's transfer ended."""

    MISSED = 0
    """The slot is not (any more) what was asked for, or never became ready in time."""
    SENT = 1
    """All parts were sent; not sealed yet."""
    SEALED = 2
    """All parts were sent, and the frame carries the block's stored checksum."""


class Frame(NamedTuple):
    """A frame's fields; those that its kind has no use for are 0."""

    kind: int
    status: int = 0
    block: int = 0
    first: int = 0
    parts: int = 0
    checksum: int = 0

    def pack(self) -> bytes:
        """As it goes over the wire."""
        body = _FRAME.pack(*self)
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> Frame:
        """Read it again.

        Raises:
            ConnectionError: it was damaged on the way.
        """
        body = packed[: _FRAME.size]
        if _CRC.unpack_from(packed, _FRAME.size)[0] != zlib.crc32(body):
            raise ConnectionError("a frame was damaged on the way")
        return cls(*_FRAME.unpack(body))


def request_crc(count: int, wait_s: float, wanted: bytes) -> int:
    """The CRC-32 that a request carries."""
    return zlib.crc32(wanted, zlib.crc32(_REQUEST_CHECKED.pack(count, wait_s)))


def tune(connection: socket.socket) -> None:
    """Settings of a data connection at either end.

    Small messages leave at once; and a host that vanished without a word is noticed within about
    ``SILENCE_LIMIT_S``, whether we wait for it or send to it.
    """
    probes = 3
    tcp = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: SILENCE_LIMIT_S // 2,
        socket.TCP_KEEPINTVL: max(1, SILENCE_LIMIT_S // (2 * probes)),
        socket.TCP_KEEPCNT: probes,
        socket.TCP_USER_TIMEOUT: SILENCE_LIMIT_S * 1000,
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in tcp.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class ConnectionEnded(ConnectionError):
    """The other end closed the connection before the message was whole."""


def receive_exactly(
    connection: socket.socket, length_bytes: int, *, deadline_s: float | None = None
) -> bytes:
    """So many bytes, for short messages (large ones go into registered memory).

    Args:
        deadline_s: on the monotonic clock, for the whole message, so that a sender of single
            bytes wins no time; None: only the socket's own timeout counts.

    Raises:
        ConnectionEnded: the connection ended before.
        TimeoutError: it took too long.
    """
    message = bytearray(length_bytes)
    rest = memoryview(message)
    while rest:
        if deadline_s is not None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the peer did not send its message in time")
            connection.settimeout(left_s)
        received = connection.recv_into(rest)
        if received == 0:
            raise ConnectionEnded("the peer closed the connection")
        rest = rest[received:]
    return bytes(message)


def send_buffers(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send several buffers in order, gathered by the kernel, none of them copied here."""
    pending = list(buffers)
    while pending:
        sent = connection.sendmsg(pending)
        done = 0
        while done < len(pending) and sent >= len(pending[done]):
            sent -= len(pending[done])
            done += 1
        del pending[:done]
        if sent:
            pending[0] = pending[0][sent:]
