"""Time to first token, time between tokens, percentiles. Pure; all times in seconds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise

TAIL_RATIO_PERCENT = 10
"""The share of intervals that a request's TBT is the mean of (FAST '25 §5)."""


def ttft_s(arrived_s: float, first_token_s: float) -> float:
    """Time to first token: from the request's arrival to its first token, queueing included."""
    if first_token_s < arrived_s:
        raise ValueError(f"first token at {first_token_s} s lies before the arrival at {arrived_s}")
    return first_token_s - arrived_s


def intervals_s(token_times_s: Sequence[float]) -> tuple[float, ...]:
    """Times between consecutive tokens. The first token has none: its wait is the TTFT."""
    return tuple(later - earlier for earlier, later in pairwise(token_times_s))


def tail_count(interval_count: int) -> int:
    """How many intervals make the longest 10 %: rounded up, so at least one of any.

    Source: FAST '25 §5 names the 10 %; rounding up is our choice, because it keeps short answers
    measurable and never looks away from the worst interval.
    """
    return -(-interval_count * TAIL_RATIO_PERCENT // 100)


def tbt_s(intervals: Iterable[float]) -> float | None:
    """Time between tokens of one request: the mean of the longest 10 % of its intervals.

    None for a request of fewer than two tokens, which has no interval and breaks no TBT SLO.
    """
    known = list(intervals)
    if not known:
        return None
    count = tail_count(len(known))
    return sum(heapq.nlargest(count, known)) / count


def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None of nothing."""
    return sum(values) / len(values) if values else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which ``percent`` of the values lie; None of nothing.

    Linear between the two closest ranks: rank = percent / 100 · (count - 1), as numpy's default.

    Args:
        values: in any order.
        percent: 0 to 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; it goes from 0 to 100")
    if not values:
        return None
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    below = int(rank)
    if below + 1 == len(ordered):
        return ordered[below]
    low, high = ordered[below], ordered[below + 1]
    return min(high, low + (rank - below) * (high - low))
