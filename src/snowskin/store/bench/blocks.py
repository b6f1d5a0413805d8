"""Pulls of the Transfer Engine, from another process's segment into this one's."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial

from snowskin.store.bench.block_owner import BlockOwner, OwnerConfig
from snowskin.store.bench.lanes import Act, Lane
from snowskin.store.bench.limits import Limits
from snowskin.store.bench.rows import BATCH, BATCH_BYTES, BLOCK_OPS, Case, StoreBenchConfig
from snowskin.transfer.engine import BlockPull, TransferEngine
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.peer import Peer

PULL_TIMEOUT_S = 60.0


class BlockBench:
    """The blocks of one size, and the lanes over them. Every client pulls into slots of its own.

    Args:
        engines: one for each transport, over ``segment``.
    """

    def __init__(
        self,
        owner: BlockOwner,
        segment: Segment,
        engines: dict[str, TransferEngine],
        limits: Limits,
        *,
        batch: int,
    ) -> None:
        self._owner = owner
        self._segment = segment
        self._engines = engines
        self._limits = limits
        self._batch = batch

    def cases(self) -> Iterator[Case]:
        """Every transport and operation."""
        ready = self._owner.ready
        for transport in self._engines:
            limits = self._limits
            limit = limits.by_socket() if transport == "tcp" else limits.by_memory()
            for op, batch in (("pull", 1), ("pull_many", self._batch)):
                yield Case(transport, op, [limit, self._lane("ours", transport, ready.peer, batch)])
            for op, peer in (("pull_busy", ready.peer), ("pull_inside", ready.inside)):
                lanes = [
                    self._lane(name, transport, peer, 1, computing=name == "ours")
                    for name in ("limit", "ours")
                ]
                yield Case(transport, op, lanes)

    def _lane(
        self, name: str, transport: str, peer: Peer, batch: int, *, computing: bool = False
    ) -> Lane:
        return Lane(
            name,
            self._pull(self._engines[transport], peer, batch),
            prepare=partial(self._owner.compute, computing),
            settle=partial(self._owner.compute, False),
        )

    def _pull(self, engine: TransferEngine, peer: Peer, batch: int) -> Callable[[int], Act]:
        generations = self._owner.ready.generations
        count = len(generations)

        def open_lane(number: int) -> Act:
            own = range(number * self._batch, number * self._batch + batch)

            def act(index: int) -> int:
                first = (index + number) * batch
                theirs = [(first + offset) % count for offset in range(batch)]
                blocks = [
                    BlockPull(there, generations[there], here)
                    for there, here in zip(theirs, own, strict=True)
                ]
                result = engine.pull(peer, blocks, timeout_s=PULL_TIMEOUT_S)
                assert all(result.landed), "a block that stays was missed"
                return result.kv_bytes

            return act

        return open_lane


@contextlib.contextmanager
def running_blocks(
    config: StoreBenchConfig, size_bytes: int, limits: Limits
) -> Iterator[BlockBench]:
    """An owner of blocks of this size, and the engines that are asked for; all end afterwards.

    Raises:
        InvalidInput: NIXL is asked for and not installed.
    """
    transports = [name for name in config.transports if config.wants_over(name, BLOCK_OPS)]
    count, key = config.count(size_bytes), secrets.token_bytes(32)
    batch = max(1, min(BATCH, count, BATCH_BYTES // size_bytes))

    def layout(slot_count: int) -> SegmentLayout:
        return SegmentLayout(slot_count=slot_count, slot_bytes=size_bytes, part_count=1)

    with contextlib.ExitStack() as stack:
        owner = BlockOwner(OwnerConfig(layout(count), key, "nixl" in transports))
        stack.callback(owner.stop)
        segment = Segment.create(layout(max(config.clients) * batch))
        stack.callback(segment.close)
        for slot in range(segment.layout.slot_count):
            segment.begin(slot, None)
        engines = {}
        for name in transports:
            engines[name] = TransferEngine(segment, transport=name, cluster_key=key)
            stack.callback(engines[name].close)
        yield BlockBench(owner, segment, engines, limits, batch=batch)
