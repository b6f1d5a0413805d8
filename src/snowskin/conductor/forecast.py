"""The decode pool's load at a later time (arXiv §7.4, system-level prediction).

Every request is taken to decode for the same time t_d: nobody knows its true length. A request
loads the pool at time t if it starts decoding by then and started less than t_d before. Of one that
has outlived t_d the paper says nothing; it is given another t_d from now, since to drop it makes
the forecast miss a quarter of the load on the released conversation trace: the short ones leave
early, and the long ones would be forgotten. So the forecast for now is the load of now.

The starts are kept sorted, so a forecast is three bisections and sums over slices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

import msgspec


class PoolLoad(msgspec.Struct, frozen=True, gc=False):
    """Sequences and their context tokens, over all decode nodes together."""

    sequences: int
    context_tokens: int
    reserved_tokens: int
    """Context and the longest possible answers: what the devices set aside."""


class Forecast:
    """When each request in flight starts, or started, to decode.

    Entries are named by a number that is unique among requests.
    """

    __slots__ = ("_limits", "_numbers", "_starts", "_tokens")

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._numbers: list[int] = []
        self._tokens: list[int] = []
        self._limits: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(
        self, number: int, start_s: float, context_tokens: int, output_limit_tokens: int
    ) -> None:
        """A request will start at ``start_s``."""
        index = bisect_right(self._starts, start_s)
        self._starts.insert(index, start_s)
        self._numbers.insert(index, number)
        self._tokens.insert(index, context_tokens)
        self._limits.insert(index, output_limit_tokens)

    def remove(self, number: int, start_s: float) -> None:
        """Forget a request; ``start_s`` is what it was added with."""
        index = bisect_left(self._starts, start_s)
        while index < len(self._starts) and self._numbers[index] != number:
            index += 1
        if index == len(self._starts) or self._starts[index] != start_s:
            raise AssertionError(f"request number {number} is not in the forecast at {start_s}")
        del self._starts[index]
        del self._numbers[index]
        del self._tokens[index]
        del self._limits[index]

    def load_at(self, at_s: float, *, now_s: float, decode_s: float) -> PoolLoad:
        """The pool's load at ``at_s``, not before now, if everyone decodes for ``decode_s``."""
        first = bisect_right(self._starts, at_s - decode_s)
        last = max(first, bisect_right(self._starts, at_s))
        tokens = sum(self._tokens[first:last])
        reserved_tokens = tokens + sum(self._limits[first:last])
        if at_s >= now_s + decode_s:
            return PoolLoad(last - first, tokens, reserved_tokens)
        overdue = bisect_right(self._starts, now_s - decode_s)
        overdue_tokens = sum(self._tokens[:overdue])
        return PoolLoad(
            last - first + overdue,
            tokens + overdue_tokens,
            reserved_tokens + overdue_tokens + sum(self._limits[:overdue]),
        )

    def next_leave_s(self, now_s: float, decode_s: float) -> float:
        """Seconds until the next request should finish; ``decode_s`` if none is decoding."""
        index = bisect_right(self._starts, now_s - decode_s)
        if index == len(self._starts):
            return decode_s
        return self._starts[index] + decode_s - now_s

    def seconds_until(
        self, fits: Callable[[PoolLoad], bool], *, from_s: float, now_s: float, decode_s: float
    ) -> float:
        """Seconds after ``from_s`` until the load fits and stays so, if nobody else comes.

        Found by halving until the time when the last has left, to within 1 % of it; the load is
        taken to fall steadily, which it does once the last has started.
        """
        if not self._starts:
            return 0.0
        last_leave_s = max(self._starts[-1], now_s) + decode_s
        unfit, fit = 0.0, max(0.0, last_leave_s - from_s)
        for _ in range(7):
            middle = (unfit + fit) / 2
            if fits(self.load_at(from_s + middle, now_s=now_s, decode_s=decode_s)):
                fit = middle
            else:
                unfit = middle
        return fit
