"""Connections to nodes, from the side of who asks: authenticated, with deadlines."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import xxhash

from snowskin.store.objects.wire import (
    ANNOUNCED_BYTES,
    CHUNK_BYTES,
    NO_DIGEST,
    REPLY_BYTES,
    WHOLE,
    Operation,
    Reply,
    Request,
    Status,
    pack_reply,
    pack_request,
    receive,
    receive_hashed,
    send_all,
    unpack_reply,
)
from snowskin.store.objects.words import Located, NodeAddress
from snowskin.transfer.authentication import authenticate_as_client
from snowskin.transfer.paths import Path
from snowskin.transfer.topology import pair_paths
from snowskin.transfer.wire import (
    ConnectionEnded,
    Lookout,
    limit_blocking,
    receive_exactly,
    tune,
)

if TYPE_CHECKING:
    from snowskin.store.objects.routes import Route

LOOKED_FOR_BYTES = 256 << 10
"""Of larger answers the wait for the first byte is the least part, and other clients want the core.
"""
SILENCE_S = 3.0
"""A node that sends and takes nothing for so long is given up."""


class ChecksumFailed(ConnectionError):
    """Bytes arrived that are not those that were stored."""


class Known:
    """An object whose place, size and content are known: what is asked, and what must come.

    Attributes:
        route: the way over which it was read, if it is on no node of this host.
    """

    __slots__ = ("digest", "head", "key", "located", "request", "route", "size_bytes")

    def __init__(self, key: str, located: Located) -> None:
        self.key = key
        self.located = located
        self.request = read_request(key)
        size = self.size_bytes = located.size_bytes
        self.digest = located.digest
        self.head = pack_reply(Status.OK, size, size, located.digest)
        self.route: Route | None = None


class NodeChannel:
    """One connection to a node, for one thread at a time. Any error means: close it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lookout = Lookout(connection)
        self._head = bytearray(REPLY_BYTES)
        self._head_view = memoryview(self._head)
        self._ahead = b""
        """Came behind an answer without bytes: the next answers."""

    @classmethod
    def open(
        cls,
        address: NodeAddress,
        cluster_key: bytes,
        *,
        unix: bool,
        paths: Sequence[Path] | None = None,
        failed: Callable[[Path], object] = lambda path: None,
    ) -> NodeChannel:
        """Connect, over the unix socket or TCP.

        Args:
            paths: over the first of these that can be had; None: over any to its addresses.
            failed: told of those before it.

        Raises:
            OSError, TransferFailed: it cannot be reached, or does not authenticate.
        """
        if unix:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            connection = _connect(
                paths or pair_paths(address.node, address.every_address, ()), failed
            )
        try:
            connection.settimeout(SILENCE_S)
            if unix:
                connection.connect(f"\0{address.unix}")
            else:
                tune(connection)
            authenticate_as_client(connection, cluster_key, timeout_s=SILENCE_S)
            limit_blocking(connection, receive_s=SILENCE_S, send_s=SILENCE_S)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def ask(self, request: bytes) -> Reply:
        """Send a request; the head of its reply."""
        self.connection.sendall(request)
        return self.reply()

    def reply(self) -> Reply:
        """The head of the next reply."""
        self._lookout.look()
        received = self.connection.recv_into(self._head_view)
        while received < REPLY_BYTES:
            more = self.connection.recv_into(self._head_view[received:])
            if more == 0 or received == 0:
                raise ConnectionEnded("the node closed the connection")
            received += more
        return unpack_reply(self._head)

    def body(self, reply: Reply) -> bytes:
        """A short payload.

        Raises:
            ChecksumFailed: see there.
        """
        payload = receive_exactly(self.connection, reply.length_bytes)
        if reply.length_bytes and xxhash.xxh3_128_digest(payload) != reply.digest:
            raise ChecksumFailed("a short answer arrived damaged")
        return payload

    def read_into(self, parts: Sequence[memoryview], reply: Reply, *, verify: bool = True) -> None:
        """Receive the payload of a READ into ``parts``, which together are as long as it.

        Raises:
            ChecksumFailed: see there; the connection is still usable.
        """
        if not verify:
            receive_hashed(self.connection, parts, None)
            return
        hasher = xxhash.xxh3_128()
        receive_hashed(self.connection, parts, hasher)
        if hasher.digest() != reply.digest:
            raise ChecksumFailed("the bytes that arrived are not those that were stored")

    def read_ahead(self, request: bytes, target: memoryview) -> tuple[Reply, bool]:
        """Ask for an object that should just fill ``target``: its head and bytes come together.

        Returns:
            The head, and whether the object is in ``target``, verified. If not, and the status is
            OK, the payload is still to be taken.
        """
        self.connection.sendall(request)
        if len(target) <= LOOKED_FOR_BYTES:
            self._lookout.look()
        received = self.connection.recvmsg_into((self._head_view, target))[0]
        return self._finish(received, target)

    def _finish(self, received: int, target: memoryview) -> tuple[Reply, bool]:
        """Go on after so many bytes of head and target have come."""
        head = self._head_view
        while received < REPLY_BYTES:
            more = self.connection.recvmsg_into((head[received:], target))[0]
            if received == 0 or more == 0:
                raise ConnectionEnded("the node closed the connection")
            received += more
        reply = unpack_reply(self._head)
        have = received - REPLY_BYTES
        if reply.status != Status.OK:
            self._ahead = bytes(target[:have]) + self._ahead
            return reply, False
        if reply.length_bytes != len(target) or have > len(target):
            raise ConnectionError("the object has another size than expected")
        if self._receive_rest(target, have) != reply.digest:
            raise ChecksumFailed("the bytes that arrived are not those that were stored")
        return reply, True

    def _receive_rest(self, target: memoryview, have: int) -> bytes:
        """Fill a target whose first bytes are there; the digest of all of it."""
        hasher = xxhash.xxh3_128(target[:have])
        receive_hashed(self.connection, (target[have:],), hasher)
        return bytes(hasher.digest())

    def read_many(self, objects: Sequence[Known], targets: Sequence[memoryview]) -> list[bool]:
        """Read several objects, each into a target of its size, with one wait for the first.

        Returns:
            For each, whether it was there.

        Raises:
            ChecksumFailed, OSError: one failed; of the others, too, nothing is known.
        """
        self.connection.sendall(b"".join(known.request for known in objects))
        return [
            self._take_ahead(target) if self._ahead else self._take_known(known, target)
            for known, target in zip(objects, targets, strict=True)
        ]

    def read_known(self, known: Known, target: memoryview) -> bool:
        """Read a whole object into a target of its size; False if it is not there any more.

        Raises:
            ChecksumFailed, OSError: it failed.
        """
        self.connection.sendall(known.request)
        return self._take_known(known, target)

    def _take_known(self, known: Known, target: memoryview) -> bool:
        """Receive an object. The head that must come is known to the byte, so nothing has to be
        taken apart."""
        if len(target) <= LOOKED_FOR_BYTES:
            self._lookout.look()
        received = self.connection.recvmsg_into((self._head_view, target))[0]
        if received < REPLY_BYTES or self._head != known.head:
            return self._finish(received, target)[1]
        have = received - REPLY_BYTES
        if have == len(target) or len(target) <= CHUNK_BYTES:
            if have < len(target):
                receive(self.connection, target[have:])
            digest = xxhash.xxh3_128_digest(target)
        else:
            digest = self._receive_rest(target, have)
        if digest != known.digest:
            raise ChecksumFailed("the bytes that arrived are not those that were stored")
        return True

    def _take_ahead(self, target: memoryview) -> bool:
        """Receive an object whose first bytes, or all, came with the answer before it."""
        head, rest = self._ahead[:REPLY_BYTES], self._ahead[REPLY_BYTES:]
        self._head_view[: len(head)] = head
        have = min(len(rest), len(target))
        target[:have] = rest[:have]
        self._ahead = rest[have:]
        return self._finish(len(head) + have, target)[1]

    def write(self, request: Request, value: memoryview) -> Status:
        """Send an object; how the node took it."""
        head = pack_request(request)
        if len(value) <= ANNOUNCED_BYTES:
            send_all(self.connection, (memoryview(head), value))
            return Status(self.reply().status)
        status = Status(self.ask(head).status)
        if status != Status.GO:
            return status
        self.connection.sendall(value)
        return Status(self.reply().status)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def _connect(paths: Sequence[Path], failed: Callable[[Path], object]) -> socket.socket:
    """A connection over the first path that can be had."""
    failure = OSError("no path")
    for path in paths:
        origin = (path.local_host, 0) if path.local_host is not None else None
        try:
            return socket.create_connection((path.host, path.port), SILENCE_S, origin)
        except OSError as error:
            failed(path)
            failure = error
    raise failure


def read_request(key: str, first: int = 0, count: int = WHOLE, digest: bytes = NO_DIGEST) -> bytes:
    """The request for bytes of an object, of this content if a digest is given."""
    return pack_request(Request(Operation.READ, key, first, count, digest))
