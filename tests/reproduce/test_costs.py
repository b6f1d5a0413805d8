"""What the cost models say of the papers' figures."""

from __future__ import annotations

import pytest

from snowskin.reproduce import costs, paper
from snowskin.reproduce.report import Result, Row
from snowskin.reproduce.workloads import Scale

ALL = Scale()


def rows(result: Result, start: str) -> list[Row]:
    return [each for each in result.report.rows if each.name.startswith(start)]


def test_prefill_is_within_5_per_cent_of_each_of_the_ten_points_of_figure_14() -> None:
    points = rows(costs.latency_breakdown(ALL), "prefill,")
    assert len(points) == 10
    for point in points:
        assert point.ours == pytest.approx(point.paper, rel=0.05), point.name


def test_load_and_decode_step_are_within_5_per_cent_of_figure_14() -> None:
    result = costs.latency_breakdown(ALL)
    for point in rows(result, "load,") + rows(result, "decode step,"):
        assert point.ours == pytest.approx(point.paper, rel=0.05), point.name


def test_transfers_are_within_10_per_cent_of_figure_12() -> None:
    points = costs.transfer_times(ALL).report.rows
    assert len(points) == 11
    for point in points:
        assert point.ours == pytest.approx(point.paper, rel=0.1), point.name


def test_reuse_thresholds_round_to_those_that_table_1_prints() -> None:
    for point in rows(costs.reuse_threshold(ALL), "threshold"):
        assert point.ours is not None
        assert round(point.ours) == point.paper


def test_layer_wise_storing_adds_far_less_than_storing_after_prefill() -> None:
    result = costs.store_time(ALL)
    serialised, layer_wise = rows(result, "serialised"), rows(result, "layer-wise")
    assert len(serialised) == len(layer_wise) == len(paper.STORE_S)
    for after, during in zip(serialised, layer_wise, strict=True):
        assert after.ours is not None
        assert during.ours is not None
        # One of 80 layers is left when prefill ends, and the latency.
        assert during.ours < after.ours / 10
