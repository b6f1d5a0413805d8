"""A node's blocks: the pool's bookkeeping and the segment's bytes, kept in step for all threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from snowskin.store.pool import BlockPool, PoolFull, PoolStat
from snowskin.terms.errors import InvalidInput
from snowskin.terms.events import BlocksCommitted, BlocksEvicted, PlacedBlock
from snowskin.terms.ids import BlockKey, NodeId, SlotIndex
from snowskin.transfer.memory import KEY_BYTES, Segment


class BlockStore:
    """The KV blocks that one node holds in its DRAM segment. Safe to use from any thread.

    One lock guards the bookkeeping; nothing under it blocks or copies a block. Sequences of keys,
    slots and blocks are in chain order; keys begin with the prompt's first block.

    Args:
        segment: the node's own; this store is the only one that hands out its slots.
        eviction: name of the eviction policy, see ``store.eviction.POLICIES``.
    """

    def __init__(self, segment: Segment, *, node: NodeId, eviction: str = "lru") -> None:
        if not segment.owner:
            raise InvalidInput("a BlockStore needs the segment's owner, not a reader's mapping")
        self.segment = segment
        self.node = node
        self._pool = BlockPool(segment.layout.slot_count, eviction)
        self._lock = threading.Lock()

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are committed here. Neither pins nor counts as a use."""
        with self._lock:
            return self._pool.match(keys)

    def pin(self, keys: Sequence[BlockKey]) -> tuple[PlacedBlock, ...]:
        """Pin the longest committed prefix of ``keys``; its blocks, to be released once each."""
        with self._lock:
            slots = self._pool.pin(keys)
            return tuple(map(PlacedBlock, keys, slots, self._pool.generations(slots)))

    def reserve(self, keys: Sequence[BlockKey | None]) -> tuple[PlacedBlock, ...] | PoolFull:
        """Take a slot for each key to write into, pinned once, evicting as needed; all or none.

        Args:
            keys: None for a private block (no one can find it until a commit gives it a key);
                its ``PlacedBlock.key`` is random.
        """
        names = [BlockKey(os.urandom(KEY_BYTES)) if key is None else key for key in keys]
        with self._lock:
            slots = self._pool.reserve(len(names))
            if isinstance(slots, PoolFull):
                return slots
            placed = tuple(map(PlacedBlock, names, slots, self._pool.generations(slots)))
            for block in placed:
                # Odd: evicted for this use. Readers miss it before any byte of it changes.
                if self.segment.generation[block.slot] % 2:
                    self.segment.retire(block.slot)
                generation = self.segment.begin(block.slot, block.key)
                assert generation == block.generation, "the pool and the table have parted"
            return placed

    def publish(self, slots: Sequence[SlotIndex] | npt.NDArray[np.intp], parts_ready: int) -> None:
        """Let peers read the first ``parts_ready`` parts of reserved slots; their bytes are in.

        Takes no lock: the slots are the caller's.
        """
        self.segment.publish(slots, parts_ready)

    def commit(
        self, slots: Sequence[SlotIndex], chain: Sequence[BlockKey], *, depth: int = 0
    ) -> tuple[bool, ...]:
        """Seal reserved slots, whose bytes are whole, and let their keys be found.

        The checksums are computed before the lock is taken. The pin from ``reserve`` stays until
        ``release``.

        Args:
            chain: the keys of these blocks, after those of all blocks before them (the prompt's).
            depth: index in the chain of the first of these blocks.

        Returns:
            For each slot, whether it holds its key. False: another slot of this pool held the key
            first and stays the copy; this one stays private until its release.
        """
        for slot, key in zip(slots, chain[depth:], strict=True):
            self.segment.seal(slot, key)
        with self._lock:
            committed = set(self._pool.commit(slots, chain, depth=depth))
        return tuple(slot in committed for slot in slots)

    def release(self, slots: Sequence[SlotIndex]) -> None:
        """Undo one pin of each: uncommitted slots become free, committed ones evictable."""
        with self._lock:
            for slot in self._pool.release(slots):
                self.segment.retire(slot)

    def grant_lease(self, owner: str, keys: Sequence[BlockKey], until_s: float) -> int:
        """Keep the longest held prefix of ``keys`` from eviction until ``until_s``; its length.

        Args:
            owner: who ends it; a second lease of the same owner replaces the first.
            until_s: on the clock that ``expire`` is told.
        """
        with self._lock:
            return self._pool.grant_lease(owner, keys, until_s)

    def end_lease(self, owner: str) -> bool:
        """End a lease early; False if the owner has none (any more)."""
        with self._lock:
            return self._pool.end_lease(owner)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """End the leases whose deadline has come; their owners."""
        with self._lock:
            return self._pool.expire(now_s)

    def drain_events(self) -> tuple[BlocksCommitted | BlocksEvicted, ...]:
        """What was committed and evicted since the last call, in true order and in batches.

        A directory that applies every batch in order knows exactly what is held. Bounded, see
        ``BlockPool.drain_changes``.
        """
        with self._lock:
            changes = self._pool.drain_changes()
        return tuple([change.event(self.node) for change in changes])

    def held(self) -> BlocksCommitted:
        """Everything that is committed now, for a directory that starts anew."""
        with self._lock:
            held = self._pool.held()
        return held.event(self.node)

    def stat(self) -> PoolStat:
        """Counts of slots and events, see ``PoolStat``."""
        with self._lock:
            return self._pool.stat()
