"""The load that a system can carry: the highest replay speed at which its promise holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from snowskin.reproduce import parameters as p

STRIDE = 4
"""Steps of the grid that the search takes until it has passed the capacity."""


class SpeedLadder:
    """Plays one system at speeds of a geometric grid, each once, whatever is asked of it.

    Args:
        play: gives one score for each promise at a replay speed. A promise holds while its score
            is at least its target, and scores fall with speed.
    """

    def __init__(self, play: Callable[[float], Sequence[float]]) -> None:
        self._play = play
        self._scores: dict[int, Sequence[float]] = {}

    def points(self, promise: int) -> list[tuple[float, float]]:
        """Speed and score of everything played so far, in order of speed."""
        return [(_speed(step), self._scores[step][promise]) for step in sorted(self._scores)]

    def at_own_speed(self, promise: int) -> float:
        """The score at the workload's own speed."""
        return self._score(0, promise)

    def capacity(self, promise: int, *, target: float) -> float | None:
        """The speed at which the score falls to the target; None if no speed is slow enough.

        Between the last step that holds and the first that does not, the score is taken to fall
        evenly over the logarithm of speed.
        """
        lowest, highest = p.SPEED_BOUNDS
        holds = breaks = 0
        if self._score(0, promise) >= target:
            while self._score(breaks, promise) >= target:
                holds = breaks
                if breaks == highest:
                    return _speed(highest)
                breaks = min(breaks + STRIDE, highest)
        else:
            while self._score(holds, promise) < target:
                breaks = holds
                if holds == lowest:
                    return None
                holds = max(holds - STRIDE, lowest)
        while breaks - holds > 1:
            middle = (holds + breaks) // 2
            if self._score(middle, promise) >= target:
                holds = middle
            else:
                breaks = middle
        above, below = self._score(holds, promise), self._score(breaks, promise)
        return _speed(holds + (above - target) / (above - below))

    def _score(self, step: int, promise: int) -> float:
        scores = self._scores.get(step)
        if scores is None:
            scores = self._scores[step] = self._play(_speed(step))
        return scores[promise]


def _speed(step: float) -> float:
    return math.pow(p.SPEED_STEP, step)
