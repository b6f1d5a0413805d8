"""Which block goes when room is needed: LRU, LFU and LengthAware, pure and deterministic.

One class per policy behind one protocol. The live pool and the simulator run this same code. Each
operation takes O(1), or O(log of the number of distinct ranks) for LFU and LengthAware.

**Order of touch.** A block is of use only if all blocks before it in its chain are held as well.
So whoever touches or inserts the blocks of one request does it from the deepest to the first:
then among blocks last used by the same request the deeper one is the older one, and a chain loses
its tail before its head. ``store.prefix_cache`` and ``store.pool`` do so.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from snowskin.terms.errors import InvalidInput

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Remembers the use of held keys and names the next to evict.

    A key is *exposed* (may be evicted) or *protected* (may not, but keeps its history).
    """

    def insert(self, key: K, *, depth: int = 0) -> None:
        """A new key is held, exposed, and used once; ``depth`` is its index in its chain."""

    def touch(self, key: K) -> None:
        """A held key is used once more."""

    def protect(self, key: K) -> None:
        """An exposed key may not be evicted for now."""

    def expose(self, key: K) -> None:
        """A protected key may be evicted again; it counts as just used, but not once more."""

    def remove(self, key: K) -> None:
        """The key is held no more; its history is forgotten."""

    def victim(self) -> K | None:
        """The exposed key to evict next (it stays held until ``remove``); None if there is none."""

    def exposed_count(self) -> int:
        """How many keys may be evicted."""


class LRU(Generic[K]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._exposed: OrderedDict[K, None] = OrderedDict()
        self._protected: set[K] = set()

    def insert(self, key: K, *, depth: int = 0) -> None:
        """Held from now on, as the most recently used."""
        assert key not in self._exposed, f"{key!r} is held already"
        assert key not in self._protected, f"{key!r} is held already"
        self._exposed[key] = None

    def touch(self, key: K) -> None:
        """Make it the most recently used."""
        if key not in self._protected:
            self._exposed.move_to_end(key)

    def protect(self, key: K) -> None:
        """Take it out of the running."""
        del self._exposed[key]
        self._protected.add(key)

    def expose(self, key: K) -> None:
        """Put it back as the most recently used."""
        self._protected.remove(key)
        self._exposed[key] = None

    def remove(self, key: K) -> None:
        """Forget it."""
        if key in self._protected:
            self._protected.remove(key)
        else:
            del self._exposed[key]

    def victim(self) -> K | None:
        """The least recently used."""
        return next(iter(self._exposed), None)

    def exposed_count(self) -> int:
        """How many keys may be evicted."""
        return len(self._exposed)


class _Use:
    """What a ranked policy remembers of a key."""

    __slots__ = ("count", "depth", "protected")

    def __init__(self, depth: int) -> None:
        self.count = 1
        self.depth = depth
        self.protected = False


class _Ranked(ABC, Generic[K]):
    """Evicts the lowest rank first; within a rank the least recently used.

    Keys of one rank share a bucket in order of use. The lowest bucket is found by a heap of
    ranks, in which each rank is at most once; ranks without keys are swept out when they prevail.
    """

    def __init__(self) -> None:
        self._uses: dict[K, _Use] = {}
        self._buckets: dict[tuple[int, int], OrderedDict[K, None]] = {}
        self._ranks: list[tuple[int, int]] = []
        self._queued: set[tuple[int, int]] = set()
        self._exposed_count = 0

    @abstractmethod
    def _rank(self, use: _Use) -> tuple[int, int]:
        """The lower, the sooner it goes."""

    def insert(self, key: K, *, depth: int = 0) -> None:
        """Held from now on, used once."""
        assert key not in self._uses, f"{key!r} is held already"
        use = self._uses[key] = _Use(depth)
        self._enter(key, use)

    def touch(self, key: K) -> None:
        """Count one more use."""
        use = self._uses[key]
        if use.protected:
            use.count += 1
            return
        self._leave(key, use)
        use.count += 1
        self._enter(key, use)

    def protect(self, key: K) -> None:
        """Take it out of the running; uses go on being counted."""
        use = self._uses[key]
        self._leave(key, use)
        use.protected = True

    def expose(self, key: K) -> None:
        """Put it back at its rank, as the most recently used there."""
        use = self._uses[key]
        use.protected = False
        self._enter(key, use)

    def remove(self, key: K) -> None:
        """Forget it and the count of its uses."""
        use = self._uses.pop(key)
        if not use.protected:
            self._leave(key, use)

    def victim(self) -> K | None:
        """The least recently used key of the lowest rank."""
        while self._ranks:
            bucket = self._buckets.get(self._ranks[0])
            if bucket is not None:
                return next(iter(bucket))
            self._queued.remove(heapq.heappop(self._ranks))
        return None

    def exposed_count(self) -> int:
        """How many keys may be evicted."""
        return self._exposed_count

    def _enter(self, key: K, use: _Use) -> None:
        rank = self._rank(use)
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = OrderedDict()
            if rank not in self._queued:
                self._queue(rank)
        bucket[key] = None
        self._exposed_count += 1

    def _queue(self, rank: tuple[int, int]) -> None:
        if len(self._ranks) > 2 * len(self._buckets) + 64:
            self._ranks = list(self._buckets)  # This rank has its bucket already.
            heapq.heapify(self._ranks)
            self._queued = set(self._ranks)
            return
        self._queued.add(rank)
        heapq.heappush(self._ranks, rank)

    def _leave(self, key: K, use: _Use) -> None:
        rank = self._rank(use)
        bucket = self._buckets[rank]
        del bucket[key]
        if not bucket:
            del self._buckets[rank]
        self._exposed_count -= 1


class LFU(_Ranked[K]):
    """Least frequently used first; the least recently used among equals.

    The frequency is forgotten at eviction: a block that returns starts at one.
    """

    def _rank(self, use: _Use) -> tuple[int, int]:
        return (use.count, 0)


class LengthAware(_Ranked[K]):
    """As LFU, but among equally frequent blocks those later in their requests go first.

    Source: arXiv 2407.00079 Table 1, LengthAwareCache.
    """

    def _rank(self, use: _Use) -> tuple[int, int]:
        return (use.count, -use.depth)


POLICIES: dict[str, Callable[[], EvictionPolicy[Any]]] = {
    "lru": LRU,
    "lfu": LFU,
    "length-aware": LengthAware,
}
"""Every eviction policy, by the name that options use."""


def make_policy(name: str) -> EvictionPolicy[Any]:
    """A fresh policy by name.

    Raises:
        InvalidInput: there is no such policy.
    """
    if name not in POLICIES:
        raise InvalidInput(f"no eviction policy {name!r}; choose from {', '.join(POLICIES)}")
    return POLICIES[name]()
