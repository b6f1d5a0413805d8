"""Runs of blocks that share one fate, and the order in which a pool evicts them. Pure.

Requests bring and use blocks by the dozen, neighbours in one chain. What was committed together and
was always used together is one *run*: it is pinned, released, ranked and evicted at the cost of one
block. Where fates part, a run is split.
"""

from __future__ import annotations

import heapq
from typing import Any

from snowskin.store.eviction import POLICIES
from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import BlockKey, SlotIndex

Entry = tuple[int, int, int, int, int, "Run"]
"""Uses, depth from the deepest, time of exposure, place in its first run: the least goes first.
Then the turn, by which an entry is known to be its run's newest."""


def shared_count(
    own: tuple[Any, ...], start: int, others: tuple[Any, ...], other_start: int
) -> int:
    """How many entries two sequences share from these places on."""
    own_count = len(own) - start
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
        "keys",
        "leases",
        "offset",
        "pins",
        "slots",
        "turn",
        "uses",
    )

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
        """Of its entry in the order of eviction; 0 while it is pinned or leased."""

    def cut(self, at: int) -> Run:
        """Keep the first ``at`` blocks; the others, with the same history, as a run of their own.

        Neither part is in the order of eviction: who cuts an exposed run enters them again.
        """
        rest = Run(self.keys[at:], self.slots[at:], self.depth + at)
        rest.pins, rest.leases, rest.uses = self.pins, self.leases, self.uses
        rest.offset, rest.exposed_at = self.offset + at, self.exposed_at
        self.keys, self.slots = self.keys[:at], self.slots[:at]
        return rest


class EvictionOrder:
    """Which blocks of exposed runs go first: block for block as ``store.eviction`` has it.

    Where those remember single keys, this remembers runs: the blocks of a run have one rank, and
    the deepest goes first. Each operation takes O(log of the number of runs).

    Raises:
        InvalidInput: there is no such policy.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise InvalidInput(f"no eviction policy {policy!r}; choose from {', '.join(POLICIES)}")
        self._by_uses = policy != "lru"
        self._by_depth = policy == "length-aware"
        self._heap: list[Entry] = []
        """Entries that are no run's any more are dropped when they come first."""
        self._runs = 0
        self._clock = 0
        self._turns = 0
        self.block_count = 0
        """How many blocks may be evicted."""

    def expose(self, run: Run) -> None:
        """A run may be evicted from now on; it counts as just used, but not once more."""
        self._clock += 1
        run.exposed_at = self._clock
        self.enter(run)

    def enter(self, run: Run) -> None:
        """Give a run its place by what it remembers of its use."""
        keys = run.keys
        self._turns += 1
        run.turn = self._turns
        entry = (
            run.uses if self._by_uses else 0,
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

    def protect(self, run: Run) -> None:
        """An exposed run may not be evicted for now."""
        run.turn = 0
        self._runs -= 1
        self.block_count -= len(run.keys)

    def next_run(self) -> tuple[Run, int]:
        """The exposed run to evict from, and how many of its last blocks go before any other."""
        heap = self._heap
        while True:
            entry = heap[0]
            run = entry[5]
            if run.turn == entry[4]:
                return run, 1 if self._by_depth else len(run.keys)
            heapq.heappop(heap)

    def take_last(self, run: Run, count: int) -> Run:
        """Part the last ``count`` blocks of an exposed run from it: they are out of the order."""
        rest_count = len(run.keys) - count
        if not rest_count:
            self.protect(run)
            return run
        if self._by_depth:
            self.protect(run)
            taken = run.cut(rest_count)
            self.enter(run)
        else:
            # The rest keeps its place.
            taken = run.cut(rest_count)
            self.block_count -= count
        return taken
