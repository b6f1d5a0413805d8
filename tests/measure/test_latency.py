import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.measure.latency import intervals_s, mean, percentile, tail_count, tbt_s, ttft_s

seconds = st.floats(0, 1e4, allow_nan=False)


def test_ttft_runs_from_arrival_to_the_first_token() -> None:
    assert ttft_s(2.0, 2.5) == 0.5


def test_a_first_token_before_the_arrival_is_refused() -> None:
    with pytest.raises(ValueError, match="before the arrival"):
        ttft_s(2.0, 1.0)


def test_intervals_leave_out_the_wait_for_the_first_token() -> None:
    assert intervals_s([10.0, 10.5, 12.5]) == (0.5, 2.0)
    assert intervals_s([10.0]) == ()


@pytest.mark.parametrize(("count", "tail"), [(0, 0), (1, 1), (9, 1), (10, 1), (11, 2), (100, 10)])
def test_the_longest_tenth_is_rounded_up(count: int, tail: int) -> None:
    assert tail_count(count) == tail


def test_tbt_is_the_mean_of_the_longest_tenth() -> None:
    assert tbt_s([1.0] * 18 + [3.0, 5.0]) == 4.0
    assert tbt_s([0.1, 0.9]) == 0.9
    assert tbt_s([]) is None


@given(st.lists(seconds, min_size=1))
def test_tbt_lies_between_the_mean_and_the_longest_interval(intervals: list[float]) -> None:
    tbt, average = tbt_s(intervals), mean(intervals)
    assert tbt is not None
    assert average is not None
    assert average - 1e-6 <= tbt <= max(intervals) + 1e-6


@given(st.lists(seconds, min_size=1), st.floats(0, 100))
def test_percentiles_equal_numpys_linear_ones(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(
        float(np.percentile(values, percent)), rel=1e-9, abs=1e-9
    )


def test_percentile_of_nothing_is_none_and_a_wrong_percent_is_refused() -> None:
    assert percentile([], 50) is None
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)
