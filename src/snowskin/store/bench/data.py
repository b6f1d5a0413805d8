"""``snowskin bench store``: gets, puts, pulls and the SSD, each beside the limit of its kind."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from snowskin.store.bench.blocks import running_blocks
from snowskin.store.bench.lanes import Act, Lane
from snowskin.store.bench.limits import Limits
from snowskin.store.bench.peer import Peer
from snowskin.store.bench.raw import RawServer
from snowskin.store.bench.rows import (
    BATCH,
    BATCH_BYTES,
    BLOCK_OPS,
    MEMORY_OPS,
    OBJECT_OPS,
    SSD_OPS,
    Case,
    StoreBenchConfig,
    StoreRow,
    measure_case,
)
from snowskin.store.bench.servers import running_store
from snowskin.store.bench.ssd import running_ssd
from snowskin.store.objects.client import StoreClient
from snowskin.store.objects.errors import KeyMissing
from snowskin.transfer.transports.nixl import import_nixl

PUT_LIMIT_BYTES = 1 << 30
"""Memory for what is put in a round; beyond it the node evicts."""


class _ObjectBench:
    """The objects of one size, and the lanes over them."""

    def __init__(
        self,
        size_bytes: int,
        count: int,
        limits: Limits,
        local: StoreClient,
        remote: StoreClient,
        peer: Peer | None,
    ) -> None:
        self._size = size_bytes
        self._count = count
        self._limits = limits
        self._clients = {"tcp": remote, "shm": local}
        self._peer = peer
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

    def cases(self) -> Iterator[Case]:
        """Every transport and operation."""
        for transport in self._clients:
            limits = self._limits
            limit = limits.by_socket if transport == "tcp" else limits.by_memory
            for op in OBJECT_OPS[:-1]:
                lanes = [limit(), Lane("ours", self._get(transport, op))]
                if self._peer is not None and transport == "tcp" and op == "get_into":
                    round_of = partial(self._peer.get_round, self._size, self._count)
                    lanes.append(Lane("peer", elsewhere=round_of))
                yield Case(transport, op, lanes)
            ours = Lane("ours", self._put(transport), settle=self._remove_put)
            yield Case(transport, "put_from", [limit(put=True), ours])

    def _get(self, transport: str, op: str) -> Callable[[int], Act]:
        client = self._clients[transport]

        def open_lane(number: int) -> Act:
            buffer, size = memoryview(bytearray(self._size)), self._size
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
    """Measure everything; each row is shown as soon as it is there.

    Raises:
        InvalidInput: NIXL is asked for and not installed, or the peer cannot run.
    """
    rows: list[StoreRow] = []
    if "nixl" in config.transports:
        import_nixl()
    with contextlib.ExitStack() as stack:
        raw = objects = None
        if config.wants_any(MEMORY_OPS):
            raw = RawServer(max(config.cycle_bytes, 4 * max(*config.sizes, 1)))
            stack.callback(raw.stop)
        if config.wants_any(OBJECT_OPS):
            objects = stack.enter_context(_running_objects(config))
        for size in config.sizes:
            for case in _cases(config, size, raw, objects):
                if not config.wants(case.transport, case.op):
                    continue
                for clients in config.clients:
                    row = measure_case(config, case, size_bytes=size, clients=clients)
                    rows.append(row)
                    show(row)
    return rows


_Objects = Callable[[int, Limits], _ObjectBench]


@contextlib.contextmanager
def _running_objects(config: StoreBenchConfig) -> Iterator[_Objects]:
    """A store with its clients, and the peer if there is one; what measures it at a size."""
    largest = max(*config.sizes, 1)
    put_bytes = min(8 * largest * max(config.clients), PUT_LIMIT_BYTES)
    room = max(config.cycle_bytes, 4 * largest) + put_bytes + (64 << 20)
    with contextlib.ExitStack() as stack:
        peer = None
        if config.peer_python:
            peer = Peer(config.peer_python)
            stack.callback(peer.stop)
        master = stack.enter_context(running_store(room))
        local = stack.enter_context(StoreClient(master))
        remote = stack.enter_context(StoreClient(master, transport="tcp"))
        yield lambda size, limits: _ObjectBench(
            size, config.count(size), limits, local, remote, peer
        )


def _cases(
    config: StoreBenchConfig, size: int, raw: RawServer | None, objects: _Objects | None
) -> Iterator[Case]:
    """What can be measured at a size, each while it can be."""
    if raw is not None:
        limits = Limits(raw, size_bytes=size, count=config.count(size))
        if objects is not None:
            bench = objects(size, limits)
            bench.fill()
            yield from bench.cases()
            bench.empty()
        if config.wants_any(BLOCK_OPS):
            with running_blocks(config, size, limits) as blocks:
                yield from blocks.cases()
    if config.wants_any(SSD_OPS):
        with running_ssd(config, size) as values:
            yield from values.cases()
