"""How a pull is cut into slices and shared out among its workers. Pure.

A slice is the least piece that is assigned, retried and accounted for: ``slice_bytes`` of one
block, 64 KiB unless set otherwise, which is Mooncake's own default. Neighbouring slices that go
the same way travel together as one ``Range``: the number of messages depends on how often a pull
is split, not on how long it is.

A pull has one or several workers, each with one connection at a time. A lone worker takes all at
once, as a single request that also waits for blocks still being written. Of several, each takes a
batch, and comes back for the next, so that the faster path carries more without anybody having to
predict it. Batches of that kind do not wait; what turns out not to be ready is *deferred*, and
shared out evenly at the end, to be followed while it is being written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

SLICE_BYTES = 64 << 10
BATCH_LEAST_BYTES = 1 << 20
"""Less than so much is not worth a request of its own while there is more."""
BATCH_MOST_BYTES = 32 << 20
"""A worker comes back at least so often, to be told of a better way."""
RANGES_LIMIT = 65_536
"""Most ranges in one batch."""
ATTEMPTS_LIMIT = 3
"""A range is given up that has arrived damaged so often for each path that there is: then it is
not the fault of one of them."""


class Range(NamedTuple):
    """Neighbouring slices of one block: bytes ``start`` to ``stop`` of it."""

    block: int
    """Index among the pull's blocks."""
    start: int
    stop: int
    attempt: int = 0
    """How often it has arrived damaged."""


class Batch(NamedTuple):
    """What a worker is to fetch with one request."""

    ranges: tuple[Range, ...]
    follow: bool
    """Wait for blocks that are still being written."""
    size_bytes: int
    """Of all its ranges."""


def worker_count(total_bytes: int, ways: int, least_bytes: int) -> int:
    """How many workers a pull is worth: one for each way, but none for less than ``least_bytes``.

    Args:
        ways: connections that may be used at once.
    """
    return max(1, min(ways, total_bytes // least_bytes))


class SliceBoard:
    """Which bytes of a pull are queued, in flight, landed or dropped: each exactly once.

    Whoever took a batch must account for every byte of it, with ``land``, ``give_back``,
    ``defer`` and ``drop``.

    Args:
        block_bytes: the size of every block.
    """

    def __init__(self, block_count: int, block_bytes: int, *, slice_bytes: int = SLICE_BYTES):
        self._slice_bytes = slice_bytes
        self._block_bytes = block_bytes
        self._queued = deque(Range(block, 0, block_bytes) for block in range(block_count))
        self._deferred: list[Range] = []
        self._dropped_blocks: set[int] = set()
        self._landed: dict[int, int] = {}
        """Landed bytes of blocks that have landed in part."""
        self.total_bytes = block_count * block_bytes
        self.queued_bytes = self.total_bytes
        """Not taken by anybody, the deferred included."""
        self.in_flight_bytes = 0
        self.landed_bytes = 0
        self.dropped_bytes = 0
        self._deferred_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether anything may still be taken, now or after somebody has given it back."""
        return self.queued_bytes + self.in_flight_bytes > 0

    def take(self, workers: int) -> Batch | None:
        """The next batch; None where all is taken for the moment.

        Args:
            workers: how many are free to take batches, the one that asks included.
        """
        if not self.queued_bytes:
            return None
        follow = False
        if workers <= 1:
            taken = self._take_queued(self.total_bytes)
            taken += self._take_deferred(1, RANGES_LIMIT - len(taken))
            follow = True
        elif self.queued_bytes > self._deferred_bytes:
            ready_bytes = self.queued_bytes - self._deferred_bytes
            share_bytes = -(-ready_bytes // (2 * workers))
            budget_bytes = min(max(share_bytes, BATCH_LEAST_BYTES), BATCH_MOST_BYTES)
            taken = self._take_queued(budget_bytes)
            if not taken:  # All that was queued had been dropped.
                return self.take(workers)
        else:
            taken = self._take_deferred(workers)
            follow = True
        if not taken:
            return None
        size_bytes = sum(one.stop - one.start for one in taken)
        self.queued_bytes -= size_bytes
        self.in_flight_bytes += size_bytes
        return Batch(tuple(taken), follow, size_bytes)

    def land(self, block: int, length_bytes: int) -> bool:
        """Bytes in flight have arrived and are right; whether that was the last of their block."""
        self.in_flight_bytes -= length_bytes
        self.landed_bytes += length_bytes
        assert self.in_flight_bytes >= 0, "more bytes arrived than were in flight"
        landed_bytes = self._landed.get(block, 0) + length_bytes
        if landed_bytes < self._block_bytes:
            self._landed[block] = landed_bytes
            return False
        self._landed.pop(block, None)
        return True

    def give_back(self, ranges: Iterable[Range]) -> None:
        """These did not arrive: the next to come takes them."""
        for one in ranges:
            self._move_back(one)
            self._queued.appendleft(one)

    def defer(self, ranges: Iterable[Range]) -> None:
        """These are not written yet: somebody has to follow them."""
        for one in ranges:
            self._move_back(one)
            self._deferred_bytes += one.stop - one.start
            self._deferred.append(one)

    def drop(self, one: Range) -> None:
        """This cannot be had, so nothing more of its block is wanted."""
        length_bytes = one.stop - one.start
        self.in_flight_bytes -= length_bytes
        self.dropped_bytes += length_bytes
        self._dropped_blocks.add(one.block)

    def is_dropped(self, block: int) -> bool:
        """Whether nothing more of the block is wanted."""
        return block in self._dropped_blocks

    def _move_back(self, one: Range) -> None:
        length_bytes = one.stop - one.start
        self.in_flight_bytes -= length_bytes
        self.queued_bytes += length_bytes
        assert self.in_flight_bytes >= 0, "more bytes came back than were in flight"

    def _forget(self, one: Range) -> None:
        self.queued_bytes -= one.stop - one.start
        self.dropped_bytes += one.stop - one.start

    def _take_queued(self, budget_bytes: int) -> list[Range]:
        """From the queue's head, whole blocks as long as they fit; at least one slice."""
        taken: list[Range] = []
        while self._queued and budget_bytes > 0 and len(taken) < RANGES_LIMIT:
            one = self._queued[0]
            if one.block in self._dropped_blocks:
                self._forget(self._queued.popleft())
                continue
            length_bytes = one.stop - one.start
            if length_bytes <= budget_bytes:
                taken.append(self._queued.popleft())
                budget_bytes -= length_bytes
                continue
            if not taken:
                slices = max(1, budget_bytes // self._slice_bytes)
                cut = min(one.stop, one.start + slices * self._slice_bytes)
                taken.append(one._replace(stop=cut))
                if cut < one.stop:
                    self._queued[0] = one._replace(start=cut)
                else:
                    self._queued.popleft()
            break
        return taken

    def _take_deferred(self, workers: int, limit: int = RANGES_LIMIT) -> list[Range]:
        """An even share, spread over the blocks: neighbours are written at the same time."""
        if not self._deferred:
            return []
        live: list[Range] = []
        for one in self._deferred:
            if one.block in self._dropped_blocks:
                self._deferred_bytes -= one.stop - one.start
                self._forget(one)
            else:
                live.append(one)
        taken = live[::workers][:limit]
        end = workers * len(taken)
        self._deferred = [one for at, one in enumerate(live) if at % workers or at >= end]
        self._deferred_bytes -= sum(one.stop - one.start for one in taken)
        return taken


class Coverage:
    """Which bytes of one block have landed, in whatever order; its pieces never overlap."""

    __slots__ = ("_islands", "leading_bytes")

    def __init__(self) -> None:
        self.leading_bytes = 0
        """All bytes before this have landed."""
        self._islands: dict[int, int] = {}

    def add(self, start: int, stop: int) -> int:
        """Bytes ``start`` to ``stop`` have landed; the leading bytes now."""
        if start != self.leading_bytes:
            self._islands[start] = stop
            return self.leading_bytes
        while start != stop:
            start, stop = stop, self._islands.pop(stop, stop)
        self.leading_bytes = stop
        return stop
