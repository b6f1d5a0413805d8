"""``snowskin bench store``: gets and puts of many sizes, each beside the limit of its kind."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from snowskin.store.bench.lanes import Act, Lane, Measured, measure
from snowskin.store.bench.peer import Peer
from snowskin.store.bench.raw import RawServer, raw_get, raw_put
from snowskin.store.bench.servers import running_store
from snowskin.store.objects.client import StoreClient
from snowskin.store.objects.errors import KeyMissing
from snowskin.terms.errors import InvalidInput

KEYS_LIMIT = 4096
PUT_LIMIT_BYTES = 1 << 30
"""Memory for what is put in a round; beyond it the node evicts."""
BATCH = 16
BATCH_BYTES = 64 << 20
"""Objects of one get_many: so many, as long as they have no more bytes."""
DEFAULT_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


TRANSPORTS = ("tcp", "shm")
OPS = ("get_into", "get", "get_many", "put_from")


class StoreBenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Args:
        cycle_bytes: gets go round objects of so many bytes together (at most ``KEYS_LIMIT``).
        peer_python: an interpreter in whose environment ``mooncake`` can be imported.

    Raises:
        InvalidInput: no such transport or operation.
    """

    sizes: tuple[int, ...] = DEFAULT_SIZES
    transports: tuple[str, ...] = TRANSPORTS
    ops: tuple[str, ...] = OPS
    clients: tuple[int, ...] = (1, 8)
    cycle_bytes: int = 256 << 20
    rounds: int = 4
    round_s: float = 0.3
    peer_python: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("transports", TRANSPORTS), ("ops", OPS)):
            for value in getattr(self, name):
                if value not in known:
                    raise InvalidInput(f"{value!r} is not among {name}: {', '.join(known)}")


class StoreRow(msgspec.Struct, frozen=True):
    """One line. ``ratio`` is ours over the limit, in bytes a second.

    Attributes:
        transport: "tcp" (as if the node were remote) or "shm" (same host).
        op: get_into (caller's memory), get (a view, or fresh memory), get_many (up to ``BATCH``
            objects at a call), put_from.
        p50_s, p99_s: time of a call.
        limit_bytes_per_s: tcp: a bare Python socket; shm: a copy and one unix round trip.
    """

    transport: str
    op: str
    size_bytes: int
    clients: int
    bytes_per_s: float
    p50_s: float
    p99_s: float
    limit_bytes_per_s: float
    limit_p50_s: float
    ratio: float
    peer_bytes_per_s: float | None = None
    peer_p50_s: float | None = None
    peer_ratio: float | None = None
    """Ours over the peer's bytes a second."""


class _Bench:
    """The objects of one size, and the lanes over them."""

    def __init__(
        self,
        size_bytes: int,
        count: int,
        raw: RawServer,
        local: StoreClient,
        remote: StoreClient,
        peer: Peer | None,
    ) -> None:
        self._size = size_bytes
        self._count = count
        self._raw = raw
        self._clients = {"tcp": remote, "shm": local}
        self._peer = peer
        self._region = np.ones(max(count * size_bytes, 1), dtype=np.uint8)
        self._value = memoryview(bytearray(os.urandom(size_bytes)))
        self._put_keys: list[str] = []
        self._numbers = itertools.count()

    def key(self, index: int) -> str:
        """Of the objects that are read."""
        return f"{self._size}/{index % self._count}"

    def fill(self) -> None:
        """Store what will be read."""
        for index in range(self._count):
            self._value[: min(8, self._size)] = index.to_bytes(8, "little")[: self._size]
            self._clients["shm"].put(self.key(index), self._value, pin="hard")
        if self._peer is not None:
            self._peer.fill(self._size, self._count)

    def empty(self) -> None:
        """Remove it again."""
        for index in range(self._count):
            self._clients["shm"].remove(self.key(index))
        if self._peer is not None:
            self._peer.empty(self._size, self._count)

    def cases(self) -> Iterator[tuple[str, str, list[Lane]]]:
        """Transport, operation, and the lanes: limit, ours, and the peer's where it has one."""
        for transport in TRANSPORTS:
            get_limit = Lane("limit", self._limit(transport, put=False))
            for op in OPS[:-1]:
                lanes = [get_limit, Lane("ours", self._get(transport, op))]
                if self._peer is not None and transport == "tcp" and op == "get_into":
                    round_of = partial(self._peer.get_round, self._size, self._count)
                    lanes.append(Lane("peer", elsewhere=round_of))
                yield transport, op, lanes
            put_limit = Lane("limit", self._limit(transport, put=True))
            yield (
                transport,
                "put_from",
                [
                    put_limit,
                    Lane("ours", self._put(transport), self._remove_put),
                ],
            )

    def _buffer(self) -> memoryview:
        return memoryview(bytearray(self._size))

    def _limit(self, transport: str, *, put: bool) -> Callable[[int], Act]:
        def open_lane(number: int) -> Act:
            connection = self._raw.connect(unix=transport == "shm")
            buffer, size, region = self._buffer(), self._size, self._region
            target = np.frombuffer(buffer, dtype=np.uint8)
            room = self._count * size

            def over_tcp(index: int) -> int:
                (raw_put if put else raw_get)(connection, (index + number) * size % room, buffer)
                return size

            def by_memory(index: int) -> int:
                raw_get(connection, 0, buffer[:1])
                at = (index + number) * size % room
                if put:
                    region[at : at + size] = target
                else:
                    target[:] = region[at : at + size]
                return size

            return over_tcp if transport == "tcp" else by_memory

        return open_lane

    def _get(self, transport: str, op: str) -> Callable[[int], Act]:
        client = self._clients[transport]

        def open_lane(number: int) -> Act:
            buffer, size = self._buffer(), self._size
            batch = max(1, min(BATCH, self._count, BATCH_BYTES // size))

            def get_into(index: int) -> int:
                return client.get_into(self.key(index + number), buffer)

            def get(index: int) -> int:
                return len(client.get(self.key(index + number)))

            def get_many(index: int) -> int:
                first = (index + number) * batch
                values = client.get_many([self.key(first + offset) for offset in range(batch)])
                assert None not in values.values()
                return size * len(values)

            return {"get_into": get_into, "get": get, "get_many": get_many}[op]

        return open_lane

    def _put(self, transport: str) -> Callable[[int], Act]:
        client = self._clients[transport]

        def open_lane(number: int) -> Act:
            del number

            def put(index: int) -> int:
                del index
                key = f"put/{next(self._numbers)}"
                client.put_from(key, self._value)
                self._put_keys.append(key)
                return self._size

            return put

        return open_lane

    def _remove_put(self) -> None:
        keys, self._put_keys = self._put_keys, []
        for key in keys:
            with contextlib.suppress(KeyMissing):  # The node may have evicted it.
                self._clients["shm"].remove(key)


def bench_store(config: StoreBenchConfig, show: Callable[[StoreRow], object]) -> Sequence[StoreRow]:
    """Measure everything; each row is shown as soon as it is there."""
    rows: list[StoreRow] = []
    largest = max(*config.sizes, 1)
    raw = RawServer(max(config.cycle_bytes, 4 * largest))
    peer = Peer(config.peer_python) if config.peer_python else None
    put_bytes = min(8 * largest * max(config.clients), PUT_LIMIT_BYTES)
    room = max(config.cycle_bytes, 4 * largest) + put_bytes + (64 << 20)
    try:
        with (
            running_store(room) as master,
            StoreClient(master) as local,
            StoreClient(master, transport="tcp") as remote,
        ):
            for size in config.sizes:
                count = max(4, min(config.cycle_bytes // size, KEYS_LIMIT))
                bench = _Bench(size, count, raw, local, remote, peer)
                bench.fill()
                for transport, op, lanes in bench.cases():
                    if transport not in config.transports or op not in config.ops:
                        continue
                    for clients in config.clients:
                        row = _row(config, transport, op, size, clients, lanes)
                        rows.append(row)
                        show(row)
                bench.empty()
    finally:
        raw.stop()
        if peer is not None:
            peer.stop()
    return rows


def _row(
    config: StoreBenchConfig,
    transport: str,
    op: str,
    size: int,
    clients: int,
    lanes: Sequence[Lane],
) -> StoreRow:
    lanes = [lane for lane in lanes if lane.name != "peer" or clients == 1]
    measured = measure(
        lanes, clients=clients, rounds=config.rounds, round_s=config.round_s, least_calls=4
    )
    ours, limit = measured["ours"], measured["limit"]
    peer: Measured | None = measured.get("peer")
    return StoreRow(
        transport=transport,
        op=op,
        size_bytes=size,
        clients=clients,
        bytes_per_s=ours.units_per_s,
        p50_s=ours.p50_s,
        p99_s=ours.p99_s,
        limit_bytes_per_s=limit.units_per_s,
        limit_p50_s=limit.p50_s,
        ratio=ours.units_per_s / limit.units_per_s,
        peer_bytes_per_s=None if peer is None else peer.units_per_s,
        peer_p50_s=None if peer is None else peer.p50_s,
        peer_ratio=None if peer is None else ours.units_per_s / peer.units_per_s,
    )
