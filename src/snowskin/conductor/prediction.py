"""Online correction: predictions that are steadily off by a factor are put right."""

from __future__ import annotations


class Correction:
    """The factor by which a prediction must be multiplied, as observed so far.

    A bounded, exponentially weighted mean of real over predicted. One freak observation can
    neither move it by more than its weight nor take it beyond the bound.

    Args:
        weight: weight of the newest observation, 0–1.
        bound: the factor stays within 1/bound … bound.
        start: the factor before anything was observed.
    """

    __slots__ = ("_bound", "_weight", "ratio")

    def __init__(self, *, weight: float, bound: float, start: float = 1.0) -> None:
        self._weight = weight
        self._bound = bound
        self.ratio = start

    def observe(self, *, real_s: float, predicted_s: float) -> None:
        """Learn from one outcome; ``predicted_s`` is the uncorrected prediction."""
        if predicted_s <= 0 or real_s < 0:
            return
        sample = min(max(real_s / predicted_s, 1 / self._bound), self._bound)
        self.ratio += self._weight * (sample - self.ratio)


class DecodeTime:
    """The uniform decode time t_d of arXiv §7.4, learned from requests that have finished.

    The plain mean of the first observations, then an exponentially weighted one: lengths scatter so
    widely that a fast mean would be noise.

    Args:
        first_guess_s: used until the first request has finished.
        weight: least weight of the newest observation, 0 (keep the guess) to 1.
    """

    __slots__ = ("_observed", "_weight", "seconds")

    def __init__(self, *, first_guess_s: float, weight: float) -> None:
        self.seconds = first_guess_s
        self._weight = weight
        self._observed = 0

    def observe(self, decode_s: float) -> None:
        """Learn how long one request really decoded."""
        if self._weight == 0 or decode_s <= 0:
            return
        self._observed += 1
        self.seconds += max(self._weight, 1 / self._observed) * (decode_s - self.seconds)
