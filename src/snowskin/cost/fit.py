"""Fitting costs to samples, with the fit's own error.

Coefficients are times, so none may be negative. With four of them at most, the non-negative least
squares are found by trying every subset of columns. Rows are divided by their time: the *relative*
error is what a scheduler cares about, and long prompts would otherwise drown the short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from snowskin.cost.costs import DecodeCost, PrefillCost
from snowskin.cost.profile import FitError
from snowskin.terms.errors import InvalidInput
from snowskin.terms.samples import DecodeSample, PrefillSample

_Array = NDArray[np.float64]


def fit_prefill(samples: Sequence[PrefillSample]) -> tuple[PrefillCost, FitError]:
    """The prefill cost nearest to the samples by relative error.

    Raises:
        InvalidInput: there is no sample, or one without a time above 0.
    """
    columns = np.array(
        [
            (
                1.0,
                s.prompt_tokens - s.reused_tokens,
                float(s.prompt_tokens) ** 2 - float(s.reused_tokens) ** 2,
                s.reused_tokens,
            )
            for s in samples
        ]
    )
    coefficients, error = _fit(columns, np.array([s.prefill_s for s in samples]))
    return PrefillCost(*coefficients), error


def fit_decode(samples: Sequence[DecodeSample]) -> tuple[DecodeCost, FitError]:
    """The decode cost nearest to the samples by relative error.

    Raises:
        InvalidInput: there is no sample, or one without a time above 0.
    """
    columns = np.array([(1.0, s.sequences, s.context_tokens) for s in samples])
    coefficients, error = _fit(columns, np.array([s.step_s for s in samples]))
    return DecodeCost(*coefficients), error


def prefill_error(cost: PrefillCost, samples: Sequence[PrefillSample]) -> FitError:
    """How far a given prefill cost lies from samples."""
    predicted = np.array([cost.seconds(s.prompt_tokens, s.reused_tokens) for s in samples])
    return _error(predicted, np.array([s.prefill_s for s in samples]))


def decode_error(cost: DecodeCost, samples: Sequence[DecodeSample]) -> FitError:
    """How far a given decode cost lies from samples."""
    predicted = np.array([cost.step_s(s.sequences, s.context_tokens) for s in samples])
    return _error(predicted, np.array([s.step_s for s in samples]))


def _fit(columns: _Array, real_s: _Array) -> tuple[list[float], FitError]:
    if real_s.size == 0 or not bool(np.all(real_s > 0)):
        raise InvalidInput("a cost is fitted to at least one sample, each with a time above 0")
    scaled = columns / real_s[:, None]
    # Columns differ by nine orders of magnitude; unit norms keep the solver honest.
    norms = np.linalg.norm(scaled, axis=0)
    usable = [column for column in range(columns.shape[1]) if norms[column] > 0]
    target = np.ones(real_s.size)
    best: _Array = np.zeros(columns.shape[1])
    best_loss = float("inf")
    for size in range(1, len(usable) + 1):
        for chosen in combinations(usable, size):
            picked = list(chosen)
            solution = np.linalg.lstsq(scaled[:, picked] / norms[picked], target, rcond=None)[0]
            if bool(np.any(solution < 0)):
                continue
            loss = float(np.sum((scaled[:, picked] / norms[picked] @ solution - target) ** 2))
            # A further column must earn its place, or noise would decide between equals.
            if loss < best_loss * (1 - 1e-9):
                best_loss = loss
                best = np.zeros(columns.shape[1])
                best[picked] = solution / norms[picked]
    return [float(value) for value in best], _error(columns @ best, real_s)


def _error(predicted_s: _Array, real_s: _Array) -> FitError:
    residual = float(np.sum((predicted_s - real_s) ** 2))
    spread = float(np.sum((real_s - real_s.mean()) ** 2))
    return FitError(
        samples=int(real_s.size),
        worst_ratio=float(np.max(np.abs(predicted_s / real_s - 1))),
        r_squared=1 - residual / spread if spread > 0 else None,
    )
