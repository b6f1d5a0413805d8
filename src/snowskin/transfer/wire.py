"""What goes over a data connection, to the byte. All integers are little-endian.

Client to server, after authentication: a request, ``REQUEST`` (magic, number of ranges, seconds
that the server may wait, CRC-32 of both and of what follows), then that many ``WANTED`` entries:
slot, flags, generation, and the bytes ``start`` to ``stop`` of the block that are wanted.

Server to client: frames of ``FRAME_BYTES`` (the last four are the CRC-32 of the others), each
followed by its bytes if it is a slice. Ranges are named by their index in the request; several may
be of one block. The CRCs are there because TCP's own checksum is weak, and a right block taken for
another one is as wrong as a broken one.

* ``SLICE``: ``length`` bytes of a range from byte ``start`` of the block, the next after those
  already sent; ``checksum`` is xxh3-64 of them, computed now.
* ``WHOLE``: all bytes of a sealed block; ``checksum`` is the stored one. It ends its range.
* ``END``: nothing more comes for the range; ``status`` tells why. If the block is sealed,
  ``checksum`` is the stored one of the whole block.
* ``IDLE``: nothing is ready to be sent; so silence means that something is wrong.

When every range has ended, the connection is free for the next request. A client that wants no
more closes it.
"""

from __future__ import annotations

import enum
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from snowskin.transfer.slicing import RANGES_LIMIT

REQUEST = struct.Struct("<4sIdI")
REQUEST_MAGIC = b"PUL2"
WANTED = struct.Struct("<IIQQQ")
COMPUTE = 1
"""Flag of a wanted range: send freshly computed checksums, as the stored one did not fit."""
_REQUEST_CHECKED = struct.Struct("<Id")
_FRAME = struct.Struct("<BBxxIQQQ")
_CRC = struct.Struct("<I")
FRAME_BYTES = _FRAME.size + _CRC.size
BLOCKS_LIMIT = RANGES_LIMIT
"""Most ranges in one request."""
HEARTBEAT_S = 0.25
"""A server that waits sends an ``IDLE`` frame so often."""
SILENCE_LIMIT_S = 10
WAIT_LIMIT_S = 3600.0
"""Longest that a server waits for blocks to become ready."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    SLICE = 1
    END = 2
    WHOLE = 3
    IDLE = 4


class EndStatus(enum.IntEnum):
    """How a range's transfer ended."""

    MISSED = 0
    """The slot is not (any more) what was asked for."""
    SENT = 1
    """All of it was sent; the block is not sealed yet."""
    SEALED = 2
    """All of it was sent, and the frame carries the block's stored checksum."""
    LATER = 3
    """Not all of it was ready within the time that the server was told to wait."""


class Frame(NamedTuple):
    """A frame's fields; those that its kind has no use for are 0."""

    kind: int
    status: int = 0
    range: int = 0
    start: int = 0
    length: int = 0
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


def limit_blocking(connection: socket.socket, *, receive_s: float, send_s: float) -> None:
    """Let the kernel itself time out (as BlockingIOError): one system call for each operation."""
    connection.settimeout(None)
    for option, limit_s in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        microseconds = max(1, round(limit_s * 1e6))
        packed = struct.pack("@ll", *divmod(microseconds, 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, option, packed)


def is_silence(error: Exception | None) -> bool:
    """Whether the other end said nothing in time, by whichever clock."""
    return isinstance(error, BlockingIOError | TimeoutError)


class Lookout:
    """Looks a little while for an answer before one sleeps until it comes.

    A thread that sleeps is woken some tens of microseconds late, which is longer than a node needs
    for a small answer: on an idle machine a round trip took 20 µs with, and 53 without. Whoever
    else wants the core gets it in between; and who has looked in vain has lost as little.
    """

    LOOKS = 40
    """About 50 µs in all."""

    __slots__ = ("_poll",)

    def __init__(self, connection: socket.socket) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        self._poll = poll.poll

    def look(self) -> None:
        """Return when bytes, or the end, have come, or after so many looks."""
        poll = self._poll
        for _ in range(self.LOOKS):
            if poll(0):
                return
            os.sched_yield()


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


def send_buffers(connection: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Send several buffers in order, gathered by the kernel, none of them copied here.

    Raises:
        TimeoutError: the other end took no byte for as long as the socket allows.
    """
    pending = list(buffers)
    while pending:
        try:
            sent = connection.sendmsg(pending)
        except BlockingIOError as error:
            raise TimeoutError("the other end takes no more bytes") from error
        done = 0
        while done < len(pending) and sent >= len(pending[done]):
            sent -= len(pending[done])
            done += 1
        del pending[:done]
        if sent:
            pending[0] = pending[0][sent:]
