"""A histogram of bounded size: counts in fixed buckets, however many values come."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

LATENCY_EDGES_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Upper edges for TTFT, TBT and durations: fine round the papers' SLOs (0.1 to 0.3 s, 30 s)."""


class Histogram:
    """Counts of values by bucket, their sum and their extremes.

    Bucket i counts the values above edge i-1 and up to edge i inclusive; the last bucket counts
    what lies above every edge.
    """

    def __init__(self, edges: Sequence[float] = LATENCY_EDGES_S) -> None:
        if not edges or any(low >= high for low, high in pairwise(edges)):
            raise ValueError(f"edges must be at least one and rise: {edges!r}")
        self._edges = tuple(edges)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0
        self._smallest = math.inf
        self._largest = -math.inf

    @property
    def edges(self) -> tuple[float, ...]:
        """Upper edges of all buckets but the last."""
        return self._edges

    @property
    def counts(self) -> tuple[int, ...]:
        """Values in each bucket, one more than there are edges."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        """How many values came."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """Their sum."""
        return self._sum

    def observe(self, value: float) -> None:
        """Count one value. It must be finite."""
        if not math.isfinite(value):
            raise ValueError(f"cannot count {value}")
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value
        self._smallest = min(self._smallest, value)
        self._largest = max(self._largest, value)

    def merge(self, other: Histogram) -> None:
        """Add all that ``other`` counted; both must have the same edges."""
        if other._edges != self._edges:
            raise ValueError("histograms with different edges cannot be merged")
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum
        self._smallest = min(self._smallest, other._smallest)
        self._largest = max(self._largest, other._largest)

    def mean(self) -> float | None:
        """The mean; None of nothing."""
        return self._sum / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """An estimate, at most one bucket wide of the true one; None of nothing.

        Linear within the bucket in which the rank ``percent / 100 · count`` falls, and never
        outside the smallest and largest value seen.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent is {percent}; it goes from 0 to 100")
        count = self.count
        if not count:
            return None
        rank = percent / 100 * count
        before = 0
        for index, inside in enumerate(self._counts):
            if inside and before + inside >= rank:
                low = self._smallest if index == 0 else self._edges[index - 1]
                high = self._largest if index == len(self._edges) else self._edges[index]
                estimate = low + (high - low) * (rank - before) / inside
                return min(self._largest, max(self._smallest, estimate))
            before += inside
        return self._largest
