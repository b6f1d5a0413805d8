"""Runs of blocks that share one fate, and the order in which a pool evicts them. Pure.

Requests bring and use blocks by the dozen, neighbours in one chain. What was committed together and
was always used together is one *run*: it is pinned, released, ranked and evicted at the cost of one
block. Where fates part, a run is split.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import Any

from snowskin.store.eviction import POLICIES
from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import BlockKey, SlotIndex

Entry = tuple[int, int, int, int, int, "Run"]
"""Uses, depth from the deepest, time of exposure, place in its first run: the least goes first.
Then the turn, by which an entry is known to be its run's newest."""


def place_of(own: tuple[Any, ...], wanted: Any) -> int:
    """Index of an entry; most often it is the first."""
    return 0 if own[0] == wanted else own.index(wanted)


def shared_count(
    own: tuple[Any, ...], start: int, others: tuple[Any, ...], other_start: int
) -> int:
    """How many entries two sequences share from these places on; they do share the first."""
    own_count = len(own) - start
    if own_count == 1:
        return 1
    # Most often all that is left of one's own: one comparison of two slices tells.
    if others[other_start : other_start + own_count] == (own[start:] if start else own):
        return own_count
    count = 0
    for mine, other in zip(own[start:], others[other_start:], strict=False):
        if mine != other:
            break
        count += 1
    return count


class Run:
    """Committed blocks that follow each other in a chain, the first block first."""

    __slots__ = (
        "depth",
        "exposed_at",
        "followers",
        "is_loose",
        "keys",
        "leases",
        "newer",
        "offset",
        "older",
        "pins",
        "siblings",
        "slots",
        "turn",
        "uses",
    )

    older: Run
    newer: Run
    """Its neighbours, where runs stand in line (``ByRecency``)."""

    def __init__(
        self, keys: tuple[BlockKey, ...], slots: tuple[SlotIndex, ...], depth: int
    ) -> None:
        self.keys = keys
        self.slots = slots
        self.depth = depth
        """Index in its chain of the first block."""
        self.pins = 0
        self.leases = 0
        self.uses = 1
        self.offset = 0
        """Where it began in the run that it was split from: of those the later part goes first."""
        self.exposed_at = 0
        self.turn = 0
        """Counts entries into the order of eviction; 0 while it is pinned or leased."""
        self.is_loose = False
        """Whether a block before it may not be held: see ``BlockPool``."""
        self.followers: dict[Run, None] | None = None
        """The runs that go on from its end, loose ones aside."""
        self.siblings: dict[Run, None] | None = None
        """The followers that it is one of; None if it is the first of its chain, or loose."""

    def follow(self, before: Run) -> None:
        """It goes on from the end of that run."""
        if before.followers is None:
            before.followers = {}
        before.followers[self] = None
        self.siblings = before.followers

    def cut(self, at: int) -> Run:
        """Keep the first ``at`` blocks; the others, with the same history, as a run of their own.

        The rest is not in the order of eviction.
        """
        rest = Run(self.keys[at:], self.slots[at:], self.depth + at)
        rest.pins, rest.leases, rest.uses = self.pins, self.leases, self.uses
        rest.offset, rest.exposed_at = self.offset + at, self.exposed_at
        rest.is_loose = self.is_loose
        self.keys, self.slots = self.keys[:at], self.slots[:at]
        return rest


class EvictionOrder(ABC):
    """Which blocks of exposed runs go first: block for block as ``store.eviction`` has it.

    Where those remember single keys, this remembers runs: the blocks of a run have one rank, and
    the deepest goes first.
    """

    def __init__(self) -> None:
        self._clock = 0
        self.block_count = 0
        """How many blocks may be evicted."""

    @abstractmethod
    def expose(self, run: Run) -> None:
        """A run may be evicted from now on; it counts as just used, but not once more."""

    @abstractmethod
    def protect(self, run: Run) -> None:
        """An exposed run may not be evicted for now."""

    @abstractmethod
    def split(self, run: Run, at: int) -> Run:
        """Part a run, exposed or not, after ``at`` blocks; the later part."""

    @abstractmethod
    def next_run(self) -> tuple[Run, int]:
        """The exposed run to evict from, and how many of its last blocks go before any other."""

    def take_last(self, run: Run, count: int) -> Run:
        """Part the last ``count`` blocks of an exposed run from it: they are out of the order."""
        taken = self.split(run, len(run.keys) - count) if count < len(run.keys) else run
        self.protect(taken)
        return taken


class ByRecency(EvictionOrder):
    """LRU: runs stand in line in the order of their exposure. Every operation takes O(1)."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = Run((), (), 0)
        """Newer than the newest, and older than the oldest."""
        self._ends.older = self._ends.newer = self._ends

    def expose(self, run: Run) -> None:
        """It is the newest."""
        self._clock += 1
        run.turn = self._clock
        self._put_before(self._ends, run)
        self.block_count += len(run.keys)

    def protect(self, run: Run) -> None:
        """It leaves the line."""
        run.older.newer, run.newer.older = run.newer, run.older
        # Nothing that is gone may be kept alive by an old neighbour.
        run.older = run.newer = self._ends
        run.turn = 0
        self.block_count -= len(run.keys)

    def split(self, run: Run, at: int) -> Run:
        """The later part goes just before the other."""
        rest = run.cut(at)
        if run.turn:
            rest.turn = run.turn
            self._put_before(run, rest)
        return rest

    def next_run(self) -> tuple[Run, int]:
        """The oldest."""
        run = self._ends.newer
        assert run is not self._ends, "no run may be evicted"
        return run, len(run.keys)

    def _put_before(self, newer: Run, run: Run) -> None:
        run.older, run.newer = newer.older, newer
        run.older.newer = newer.older = run


class ByRank(EvictionOrder):
    """LFU, and length-aware: by a heap. Each operation takes O(log of the number of runs)."""

    def __init__(self, *, by_depth: bool) -> None:
        super().__init__()
        self._by_depth = by_depth
        self._heap: list[Entry] = []
        """Entries that are no run's any more are dropped when they come first."""
        self._runs = 0
        self._turns = 0

    def expose(self, run: Run) -> None:
        """It goes behind its equals."""
        self._clock += 1
        run.exposed_at = self._clock
        self._enter(run)

    def protect(self, run: Run) -> None:
        """Its entry is void."""
        run.turn = 0
        self._runs -= 1
        self.block_count -= len(run.keys)

    def split(self, run: Run, at: int) -> Run:
        """Both parts get their places by what they remember of their use."""
        is_exposed = run.turn > 0
        if is_exposed:
            self.protect(run)
        rest = run.cut(at)
        if is_exposed:
            self._enter(run)
            self._enter(rest)
        return rest

    def next_run(self) -> tuple[Run, int]:
        """The least used; by depth, only its last block goes before any other."""
        heap = self._heap
        while True:
            entry = heap[0]
            run = entry[5]
            if run.turn == entry[4]:
                return run, 1 if self._by_depth else len(run.keys)
            heapq.heappop(heap)

    def _enter(self, run: Run) -> None:
        keys = run.keys
        self._turns += 1
        run.turn = self._turns
        entry = (
            run.uses,
            1 - run.depth - len(keys) if self._by_depth else 0,
            run.exposed_at,
            -run.offset,
            run.turn,
            run,
        )
        self._runs += 1
        self.block_count += len(keys)
        heap = self._heap
        if len(heap) > 2 * self._runs + 64:
            heap = self._heap = [old for old in heap if old[5].turn == old[4]]
            heap.append(entry)
            heapq.heapify(heap)
        else:
            heapq.heappush(heap, entry)


def make_order(policy: str) -> EvictionOrder:
    """An empty order, by the policy's name.

    Raises:
        InvalidInput: there is no such policy.
    """
    if policy not in POLICIES:
        raise InvalidInput(f"no eviction policy {policy!r}; choose from {', '.join(POLICIES)}")
    return ByRecency() if policy == "lru" else ByRank(by_depth=policy == "length-aware")
