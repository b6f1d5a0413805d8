import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.measure.histogram import Histogram


def filled(values: list[float]) -> Histogram:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in values:
        histogram.observe(value)
    return histogram


def test_a_value_on_an_edge_belongs_to_the_bucket_below_it() -> None:
    histogram = filled([0.5, 1.0, 1.5, 4.0, 9.0])
    assert histogram.counts == (2, 1, 1, 1)
    assert (histogram.count, histogram.sum) == (5, 16.0)


def test_an_empty_histogram_has_no_mean_and_no_percentile() -> None:
    assert filled([]).mean() is None
    assert filled([]).percentile(90) is None


@pytest.mark.parametrize("edges", [(), (1.0, 1.0), (2.0, 1.0)])
def test_edges_that_do_not_rise_are_refused(edges: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="edges"):
        Histogram(edges)


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        filled([]).observe(math.nan)


def test_histograms_with_other_edges_do_not_merge() -> None:
    with pytest.raises(ValueError, match="edges"):
        filled([]).merge(Histogram((5.0,)))


values = st.lists(st.floats(0, 10), min_size=1)


@given(values, values)
def test_merging_counts_as_if_all_values_had_come_to_one(a: list[float], b: list[float]) -> None:
    merged, whole = filled(a), filled(a + b)
    merged.merge(filled(b))
    assert merged.counts == whole.counts
    assert merged.sum == pytest.approx(whole.sum)
    assert merged.percentile(90) == pytest.approx(whole.percentile(90))


@given(values, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_rise_with_the_percent_and_stay_within_what_was_seen(
    seen: list[float], p: float, q: float
) -> None:
    low, high = filled(seen).percentile(min(p, q)), filled(seen).percentile(max(p, q))
    assert low is not None
    assert high is not None
    assert min(seen) <= low <= high + 1e-9
    assert high <= max(seen)
