"""How objects' bytes go between clients and nodes. All integers are little-endian.

Client to node: ``REQUEST`` (magic, operation, pin, length of the key, first byte and number of
bytes wanted or sent, xxh3-128 of the whole object, CRC-32 of all that and of the key), then the
key, then for WRITE the object. A large object is announced first: its bytes follow only when the
node has answered ``GO``, so that none is sent in vain. READ gives the digest only if no other
content will do.

Node to client: ``REPLY`` (magic, status, size of the object, number of bytes that follow, xxh3-128
of these, CRC-32), then the bytes. The CRCs are there because a right object taken for another is
as wrong as a broken one, and TCP's own checksum is weak.
"""

from __future__ import annotations

import enum
import socket
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import xxhash

from snowskin.store.objects.words import KEY_LIMIT_BYTES
from snowskin.transfer.wire import ConnectionEnded

_REQUEST = struct.Struct("<4sBBHQQ16s")
_REPLY = struct.Struct("<4sBBHQQ16s")
_CRC = struct.Struct("<I")
REQUEST_BYTES = _REQUEST.size + 4
REPLY_BYTES = _REPLY.size + 4
_MAGIC = b"SNWQ"
_REPLY_MAGIC = b"SNWA"
CHUNK_BYTES = 256 << 10
"""So much is received before it is hashed, while it is still in the processor's cache."""
ANNOUNCED_BYTES = 256 << 10
"""Larger objects are announced before they are sent."""
WHOLE = (1 << 64) - 1
"""As a number of bytes: all."""
NO_DIGEST = bytes(16)
READS_REMEMBERED = 16_384
"""Requests to read that are known by their bytes, so that they need not be taken apart again."""


class Operation(enum.IntEnum):
    """What a client asks of a node."""

    READ = 1
    """Bytes of an object; with a digest, of this content or none."""
    WRITE = 2
    """Here is an object."""
    MAP = 3
    """The segment's layout, and its descriptor; over the unix socket only."""
    PLACE = 4
    """Where the object lies in the segment; nothing protects it."""
    LEASE = 5
    """The same, and it stays there until the lease ends, on this connection; ``first`` is the
    lease's number, chosen by the client."""
    RENEW = 6
    """Renew all leases of this connection, after ending those whose numbers are the payload."""


class Status(enum.IntEnum):
    """How it went."""

    OK = 0
    MISSING = 1
    """No such object here."""
    FULL = 2
    """No room for it here."""
    BUSY = 3
    """Someone else writes the same key here just now."""
    CORRUPT = 4
    """The bytes that arrived were not those announced; nothing was stored."""
    CONFLICT = 5
    """The key has other content."""
    AWAY = 6
    """Stored, but the master could not be told in time."""
    RANGE = 7
    """The object ends before ``first``."""
    ON_DISK = 8
    """It is here, but has no place in memory: read it."""
    GO = 9
    """Send it."""


class Request(NamedTuple):
    """What is asked."""

    operation: int
    key: str
    first: int = 0
    length_bytes: int = WHOLE
    digest: bytes = NO_DIGEST
    pin: int = 0
    """Of WRITE: how firmly the object is to stay."""


def pack_request(request: Request) -> bytes:
    """As it goes over the wire, key included."""
    name = request.key.encode()
    body = _REQUEST.pack(
        _MAGIC,
        request.operation,
        request.pin,
        len(name),
        request.first,
        request.length_bytes,
        request.digest,
    )
    return body + _CRC.pack(zlib.crc32(name, zlib.crc32(body))) + name


def pack_reply(
    status: int, size_bytes: int = 0, count: int = 0, digest: bytes = NO_DIGEST
) -> bytes:
    """As it goes over the wire, without the bytes."""
    body = _REPLY.pack(_REPLY_MAGIC, status, 0, 0, size_bytes, count, digest)
    return body + _CRC.pack(zlib.crc32(body))


class Reply(NamedTuple):
    """What came back, before the bytes."""

    status: int
    size_bytes: int
    length_bytes: int
    digest: bytes


def unpack_reply(packed: bytes | bytearray) -> Reply:
    """Read it again.

    Raises:
        ConnectionError: it was damaged on the way, or is something else.
    """
    body = packed[: _REPLY.size]
    magic, status, _, _, size_bytes, count, digest = _REPLY.unpack(body)
    if magic != _REPLY_MAGIC or _CRC.unpack_from(packed, _REPLY.size)[0] != zlib.crc32(body):
        raise ConnectionError("a reply was damaged on the way")
    return Reply(status, size_bytes, count, digest)


def unpack_request(packed: bytes) -> Request:
    """Read it again.

    Raises:
        ConnectionError: it was damaged on the way, or is something else.
    """
    magic, operation, pin, key_bytes, first, count, digest = _REQUEST.unpack_from(packed)
    (crc,) = _CRC.unpack_from(packed, _REQUEST.size)
    name = packed[REQUEST_BYTES:]
    if magic != _MAGIC or key_bytes != len(name):
        raise ConnectionError("no request")
    if crc != zlib.crc32(name, zlib.crc32(packed[: _REQUEST.size])):
        raise ConnectionError("a request was damaged on the way")
    try:
        key = name.decode()
    except UnicodeDecodeError as error:
        raise ConnectionError("a key that is no text") from error
    return Request(operation, key, first, count, digest, pin)


_READ = int(Operation.READ)
_unpack_read = lru_cache(READS_REMEMBERED)(unpack_request)
"""Reads of an object look the same each time."""


class RequestReader:
    """Takes requests from a connection; a short one is one system call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray(REQUEST_BYTES + KEY_LIMIT_BYTES)
        self._view = memoryview(self._buffer)
        self._have = 0

    def next(self) -> Request:
        """The next request; what of its payload came with it already, ``rest`` has.

        Raises:
            ConnectionEnded: the client is gone.
            ConnectionError: that was no request.
            BlockingIOError: it did not come to its end in time.
        """
        if self._have < REQUEST_BYTES:
            self._want_head()
        buffer = self._buffer
        end = REQUEST_BYTES + buffer[6] + 256 * buffer[7]
        if self._have < end:
            if end > len(buffer):
                raise ConnectionError("no request")
            self._want(end)
        packed = bytes(self._view[:end])
        self._have -= end
        if self._have:
            buffer[: self._have] = buffer[end : end + self._have]
        return _unpack_read(packed) if packed[4] == _READ else unpack_request(packed)

    def rest(self) -> bytes:
        """What was read beyond the last request. It is the caller's now."""
        rest = bytes(self._view[: self._have])
        self._have = 0
        return rest

    def put_back(self, rest: bytes) -> None:
        """What was not of the payload belongs to the next request."""
        self._buffer[: len(rest)] = rest
        self._have = len(rest)

    def _want_head(self) -> None:
        while True:
            try:
                self._want(REQUEST_BYTES)
            except BlockingIOError:
                if self._have:
                    raise  # It fell silent in the middle of a request.
            else:
                return

    def _want(self, count: int) -> None:
        while self._have < count:
            received = self._connection.recv_into(self._view[self._have :])
            if received == 0:
                raise ConnectionEnded("the client closed the connection")
            self._have += received


def send_all(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send several buffers in order; one system call if the kernel takes all at once.

    Raises:
        OSError: the connection broke, or takes nothing any more.
    """
    sent = connection.sendmsg(buffers)
    for buffer in buffers:
        if sent >= len(buffer):
            sent -= len(buffer)
        else:
            connection.sendall(buffer[sent:])
            sent = 0


def receive_hashed(
    connection: socket.socket, parts: Sequence[memoryview], hasher: xxhash.xxh3_128 | None
) -> None:
    """Fill all parts, hashing what has arrived while more arrives.

    Raises:
        ConnectionEnded, OSError: the connection ended or fell silent.
    """
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            chunk = part[start : start + CHUNK_BYTES]
            receive(connection, chunk)
            if hasher is not None:
                hasher.update(chunk)


def receive(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``.

    Raises:
        ConnectionEnded, OSError: the connection ended or fell silent.
    """
    received = connection.recv_into(target)
    while received < len(target):
        more = connection.recv_into(target[received:])
        if more == 0:
            raise ConnectionEnded("the connection ended before the object did")
        received += more
