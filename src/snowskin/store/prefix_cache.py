"""A cache of block keys alone, without bytes or slots: what hit-ratio curves are drawn with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from snowskin.store.eviction import EvictionPolicy

K = TypeVar("K", bound=Hashable)


class PrefixCache(Generic[K]):
    """Holds at most ``capacity_blocks`` keys (None: no bound), evicted by ``policy``."""

    def __init__(self, capacity_blocks: int | None, policy: EvictionPolicy[K]) -> None:
        self._capacity_blocks = capacity_blocks
        self._policy = policy
        self._held: set[K] = set()

    def __len__(self) -> int:
        return len(self._held)

    def match(self, keys: Sequence[K]) -> int:
        """How many leading keys are held."""
        for index, key in enumerate(keys):
            if key not in self._held:
                return index
        return len(keys)

    def access(self, keys: Sequence[K]) -> int:
        """One request: its hits (the leading keys that are held), then all its keys are used.

        Keys are used from the deepest to the first, each of them inserted if it is not held, by
        evicting another first where the cache is full. Summed over a trace and divided by the
        trace's blocks, the hits give the block-weighted contiguous-prefix hit ratio.
        """
        hits = self.match(keys)
        held = self._held
        for depth in range(len(keys) - 1, -1, -1):
            key = keys[depth]
            if key in held:
                self._policy.touch(key)
                continue
            if self._capacity_blocks is not None and len(held) >= self._capacity_blocks:
                victim = self._policy.victim()
                if victim is None:
                    continue  # A capacity of no block at all.
                self._policy.remove(victim)
                held.remove(victim)
            self._policy.insert(key, depth=depth)
            held.add(key)
        return hits
