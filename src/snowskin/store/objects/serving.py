"""What a node does for one client on one connection."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import xxhash

from snowskin.store.objects.pool import PoolObject
from snowskin.store.objects.shelf import ShelfMiss
from snowskin.store.objects.store import ObjectStore, digest_of
from snowskin.store.objects.tiers import Tiers
from snowskin.store.objects.wire import (
    ANNOUNCED_BYTES,
    NO_DIGEST,
    Operation,
    Request,
    RequestReader,
    Status,
    pack_reply,
    receive_hashed,
    send_all,
)
from snowskin.store.objects.words import Pin
from snowskin.transfer.wire import ConnectionEnded, limit_blocking

LEASE_S = 30.0
"""A lease that its client does not renew ends after so long."""
LEASES_LIMIT = 65_536
"""Most leases of one connection; beyond, objects are to be read, not viewed."""
_PINS = frozenset(map(int, Pin))
SILENCE_S = 30.0
"""A client that neither takes nor sends what it should for so long is given up."""


class Reporter(Protocol):
    """Tells the master."""

    def committed(self, key: str) -> Status:
        """Have the master know of an object, and wait until it does."""

    def changed(self, key: str) -> None:
        """Have the master know that an object is gone, without waiting."""


class Leases:
    """What one connection keeps from being evicted."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._held: dict[int, PoolObject] = {}
        self._until_s = 0.0
        self._lock = threading.Lock()

    def add(self, number: int, item: PoolObject) -> None:
        """Take over one use of an object.

        Raises:
            ConnectionError: a number in use.
        """
        with self._lock:
            if number in self._held:
                self._store.release(item)
                raise ConnectionError("the same lease twice")
            self._held[number] = item
            self._until_s = time.monotonic() + LEASE_S

    def renew(self, ended: tuple[int, ...]) -> None:
        """End these, keep the others."""
        with self._lock:
            for number in ended:
                item = self._held.pop(number, None)
                if item is not None:
                    self._store.release(item)
            self._until_s = time.monotonic() + LEASE_S

    def end_if_late(self) -> bool:
        """End all if they were not renewed in time; whether there was something to end."""
        with self._lock:
            late = bool(self._held) and time.monotonic() >= self._until_s
        if late:
            self.end()
        return late

    def end(self) -> None:
        """End all."""
        with self._lock:
            held, self._held = self._held, {}
        for item in held.values():
            self._store.release(item)

    def __len__(self) -> int:
        return len(self._held)


class ClientServing:
    """Serves one client until it leaves or errs."""

    def __init__(
        self, connection: socket.socket, tiers: Tiers, reporter: Reporter, leases: Leases
    ) -> None:
        self._connection = connection
        self._tiers = tiers
        self._store = tiers.dram
        self._reporter = reporter
        self._leases = leases
        self._reader = RequestReader(connection)
        self._operations: dict[int, Callable[[Request], None]] = {
            Operation.READ: self._read,
            Operation.WRITE: self._write,
            Operation.MAP: self._map,
            Operation.PLACE: self._place,
            Operation.LEASE: self._lease,
            Operation.RENEW: self._renew,
        }

    def run(self) -> None:
        """Serve until the client leaves.

        Raises:
            OSError: it erred, or the connection broke.
        """
        # A client may be silent between requests, but not in the middle of one.
        limit_blocking(self._connection, receive_s=SILENCE_S, send_s=SILENCE_S)
        while True:
            try:
                request = self._reader.next()
            except ConnectionEnded:
                return
            operation = self._operations.get(request.operation)
            if operation is None:
                raise ConnectionError(f"no operation {request.operation}")
            operation(request)

    def _read(self, request: Request) -> None:
        item = self._store.acquire(request.key)
        if item is None:
            self._read_from_disk(request)
            return
        count = 0
        try:
            size, first = item.size_bytes, request.first
            if request.digest not in (NO_DIGEST, item.digest):
                self._connection.sendall(pack_reply(Status.MISSING))
                return
            if first > size:
                self._connection.sendall(pack_reply(Status.RANGE, size))
                return
            count = min(request.length_bytes, size - first)
            if count < size:
                send_all(self._connection, self._part_reply(item, first, count))
            else:
                send_all(self._connection, item.reply or self._whole_reply(item))
        finally:
            self._store.release(item, read_bytes=count)

    def _whole_reply(self, item: PoolObject) -> tuple[memoryview, ...]:
        size = item.size_bytes
        head = pack_reply(Status.OK, size, size, item.digest)
        item.reply = (memoryview(head), *self._store.views(item))
        return item.reply

    def _part_reply(self, item: PoolObject, first: int, count: int) -> tuple[memoryview, ...]:
        views = self._store.views(item, first, count)
        head = pack_reply(Status.OK, item.size_bytes, count, digest_of(*views))
        return (memoryview(head), *views)

    def _read_from_disk(self, request: Request) -> None:
        """Send from the SSD tier. What turns out damaged after its head was sent ends in a broken
        connection, which the client takes for what it is: this replica cannot be read."""
        shelf = self._tiers.shelf
        fact = None if shelf is None else shelf.fact(request.key)
        if shelf is None or fact is None or request.digest not in (NO_DIGEST, fact.digest):
            self._connection.sendall(pack_reply(Status.MISSING))
            return
        first, size = request.first, fact.size_bytes
        if first > size:
            self._connection.sendall(pack_reply(Status.RANGE, size))
            return
        count = min(request.length_bytes, size - first)
        pieces = shelf.read(request.key, first, count)
        try:
            piece, promote = next(pieces, (memoryview(b""), False))
        except ShelfMiss:
            self._reporter.changed(request.key)
            self._connection.sendall(pack_reply(Status.MISSING))
            return
        views = [piece]
        if count < size:
            views += [more for more, _ in pieces]
        digest = fact.digest if count == size else digest_of(*views)
        head = memoryview(pack_reply(Status.OK, size, count, digest))
        send_all(self._connection, [head, *(view for view in views if view)])
        try:
            for more, _ in pieces:
                send_all(self._connection, [more])
        except ShelfMiss as error:
            self._reporter.changed(request.key)
            raise ConnectionError("a part of the object is damaged") from error
        self._store.count(read_bytes=count)
        if promote:
            self._tiers.want_promotion(request.key)

    def _write(self, request: Request) -> None:
        held = self._tiers.fact(request.key)
        if held is not None:
            status = Status.CONFLICT
            if held.digest == request.digest:
                status = self._reporter.committed(request.key)
            self._refuse(request, status)
            return
        pin = Pin(request.pin) if request.pin in _PINS else Pin.NONE
        item = self._store.reserve(request.key, request.length_bytes, pin)
        if item is None:
            busy = self._store.is_reserved(request.key)
            self._refuse(request, Status.BUSY if busy else Status.FULL)
            return
        try:
            if request.length_bytes > ANNOUNCED_BYTES:
                self._connection.sendall(pack_reply(Status.GO))
            hasher = xxhash.xxh3_128()
            self._receive(self._store.views(item), hasher)
        except BaseException:
            self._store.abort(item)
            raise
        if hasher.digest() != request.digest:
            self._store.abort(item)
            self._store.count(checksum_failures=1)
            self._connection.sendall(pack_reply(Status.CORRUPT))
            return
        status = Status.BUSY
        if self._store.commit(item, request.digest):
            try:
                status = self._reporter.committed(request.key)
            finally:
                self._store.release(item)
        self._connection.sendall(pack_reply(status, request.length_bytes))

    def _receive(self, views: list[memoryview], hasher: xxhash.xxh3_128) -> None:
        """Fill ``views``, first with what has come already."""
        rest = self._reader.rest()
        for view in views:
            taken = min(len(rest), len(view))
            view[:taken] = rest[:taken]
            hasher.update(rest[:taken])
            rest = rest[taken:]
            receive_hashed(self._connection, [view[taken:]], hasher)
        self._reader.put_back(rest)

    def _refuse(self, request: Request, status: Status) -> None:
        """Answer a write that is not taken; of a small object the bytes come all the same."""
        if request.length_bytes <= ANNOUNCED_BYTES:
            scrap = memoryview(bytearray(request.length_bytes))
            self._receive([scrap], xxhash.xxh3_128())
        self._connection.sendall(pack_reply(status, request.length_bytes))

    def _map(self, request: Request) -> None:
        if self._connection.family != socket.AF_UNIX:
            raise ConnectionError("descriptors go over unix sockets only")
        packed = msgspec.msgpack.encode(self._store.segment.layout)
        head = pack_reply(Status.OK, 0, len(packed), digest_of(packed))
        socket.send_fds(self._connection, [head + packed], [self._store.segment.fd])

    def _place(self, request: Request) -> None:
        with self._store.reading(request.key) as item:
            packed = b"" if item is None else msgspec.msgpack.encode(self._store.place(item))
        self._answer(request.key, packed)

    def _lease(self, request: Request) -> None:
        item = self._store.acquire(request.key) if len(self._leases) < LEASES_LIMIT else None
        packed = b""
        if item is not None:
            packed = msgspec.msgpack.encode(self._store.place(item))
            self._leases.add(request.first, item)
        self._answer(request.key, packed)

    def _renew(self, request: Request) -> None:
        if request.length_bytes > 8 * LEASES_LIMIT or request.length_bytes % 8:
            raise ConnectionError("too many leases to end, or half of one")
        packed = bytearray(request.length_bytes)
        self._receive([memoryview(packed)], xxhash.xxh3_128())
        self._leases.renew(struct.unpack(f"<{len(packed) // 8}Q", packed))
        self._connection.sendall(pack_reply(Status.OK))

    def _answer(self, key: str, packed: bytes) -> None:
        """Say where an object is in memory, or that it is not."""
        if packed:
            head = pack_reply(Status.OK, 0, len(packed), digest_of(packed))
        else:
            on_disk = self._tiers.fact(key) is not None
            head = pack_reply(Status.ON_DISK if on_disk else Status.MISSING)
        self._connection.sendall(head + packed)
