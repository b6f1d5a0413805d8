"""Drawing the least of some scores, and listing the best of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

RECORDED_CANDIDATES = 16
"""A decision records so many of the best candidates: enough to explain it at any fleet's size."""


def draw_least(scores: Sequence[float], rng: random.Random) -> int:
    """Index of the least score; random among equals, or an idle cluster would load its first."""
    least = min(scores)
    if scores.count(least) == 1:
        return scores.index(least)
    return rng.choice([index for index, score in enumerate(scores) if score == least])


def shortlist(scores: Sequence[float], chosen: int) -> Sequence[int]:
    """Indices that a ``Decision`` records, in node order: the least scores', and ``chosen``."""
    if len(scores) <= RECORDED_CANDIDATES:
        return range(len(scores))
    best = sorted(range(len(scores)), key=scores.__getitem__)[:RECORDED_CANDIDATES]
    if chosen not in best:
        best[-1] = chosen
    return sorted(best)
