"""The event heap: what happens next, in one order that never depends on chance."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final


class Rank:
    """Of events at one time, the lower rank is first: room is made before it is asked for.

    Plain numbers, since every event compares them.
    """

    FAULT: Final = 0
    TRANSFER: Final = 1
    COMPUTE: Final = 2
    CONDUCTOR: Final = 3
    ARRIVAL: Final = 4


class Calendar:
    """Events in order of time, rank and the order in which they were entered."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._entered = 0

    def at(self, time_s: float, rank: int, action: Callable[[Any], None], about: Any) -> None:
        """Have ``action(about)`` called at a time, which must not have passed."""
        assert time_s >= self.now_s, f"time would go back from {self.now_s} to {time_s}"
        self._entered += 1
        heapq.heappush(self._heap, (time_s, rank, self._entered, action, about))

    def run(self, after_each: Callable[[], None] | None = None) -> int:
        """Call everything until nothing is left; gives the count of events."""
        heap = self._heap
        pop = heapq.heappop
        count = 0
        while heap:
            time_s, _, _, action, about = pop(heap)
            assert time_s >= self.now_s, "time went back"
            self.now_s = time_s
            action(about)
            count += 1
            if after_each is not None:
                after_each()
        return count
