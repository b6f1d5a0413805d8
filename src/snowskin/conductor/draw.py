"""Drawing the least of some scores, and listing the best of them."""

from __future__ import annotations

import random
from math import inf

RECORDED_CANDIDATES = 16
"""A decision records so many of the best candidates: enough to explain it at any fleet's size."""


def draw_least(scores: list[float], rng: random.Random) -> int:
    """Index of the least score; random among equals, or an idle cluster would load its first."""
    least, first, equals = inf, 0, 0
    for index, score in enumerate(scores):
        if score < least:
            least, first, equals = score, index, 1
        elif score == least:
            equals += 1
    if equals == 1:
        return first
    return rng.choice([index for index, score in enumerate(scores) if score == least])


def shortlist(scores: list[float], chosen: int) -> list[int]:
    """Indices that a ``Decision`` records, in node order: the least scores', and ``chosen``."""
    if len(scores) <= RECORDED_CANDIDATES:
        return list(range(len(scores)))
    best = sorted(range(len(scores)), key=scores.__getitem__)[:RECORDED_CANDIDATES]
    if chosen not in best:
        best[-1] = chosen
    return sorted(best)
