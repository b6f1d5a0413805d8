"""The search for the greatest speed at which a promise holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snowskin.reproduce import parameters as p
from snowskin.reproduce.capacity import SpeedLadder

LOWEST, HIGHEST = (math.pow(p.SPEED_STEP, bound) for bound in p.SPEED_BOUNDS)


def fading(limit: float, target: float) -> SpeedLadder:
    """A score that falls evenly over the logarithm of speed, and meets the target at ``limit``."""
    return SpeedLadder(lambda speed: [target - math.log2(speed / limit) / 10])


@settings(deadline=None)
@given(
    limit=st.floats(LOWEST * 1.01, HIGHEST / 1.01), target=st.sampled_from([0.5, 0.9, 1.0])
)  # fmt: skip
def test_the_capacity_of_an_even_score_is_found_exactly(limit: float, target: float) -> None:
    assert fading(limit, target).capacity(0, target=target) == pytest.approx(limit, rel=1e-6)


@settings(deadline=None)
@given(limit=st.floats(LOWEST * 1.01, HIGHEST / 1.01))
def test_a_sudden_break_is_found_within_one_step(limit: float) -> None:
    ladder = SpeedLadder(lambda speed: [1.0 if speed <= limit else 0.0])
    found = ladder.capacity(0, target=0.9)
    assert found is not None
    assert limit / p.SPEED_STEP <= found <= limit * p.SPEED_STEP


def test_a_promise_that_never_holds_has_no_capacity() -> None:
    assert SpeedLadder(lambda _: [0.5]).capacity(0, target=0.9) is None


def test_a_promise_that_always_holds_has_the_greatest_speed_tried() -> None:
    assert SpeedLadder(lambda _: [1.0]).capacity(0, target=0.9) == HIGHEST


def test_no_speed_is_played_twice_for_two_promises() -> None:
    played: list[float] = []

    def play(speed: float) -> list[float]:
        played.append(speed)
        return [1.0 - speed / 10, 1.0 - speed / 5]

    ladder = SpeedLadder(play)
    first, second = ladder.capacity(0, target=0.5), ladder.capacity(1, target=0.5)
    assert len(played) == len(set(played))
    assert first == pytest.approx(5.0, rel=0.02)
    assert second == pytest.approx(2.5, rel=0.02)
