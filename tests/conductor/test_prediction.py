import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.conductor.config import ConductorConfig
from snowskin.conductor.fleet import Fleet
from snowskin.conductor.prediction import Correction, DecodeTime
from snowskin.cost.costs import LinkCost
from snowskin.terms.events import IncomingTraffic
from snowskin.terms.ids import NodeId
from tests.conductor.cluster import D0, D1, P0, P1, PROFILE, joined

times = st.floats(0, 1e6)


@given(st.lists(st.tuples(times, times)), st.floats(0, 1), st.floats(1, 100))
def test_a_correction_never_leaves_its_bounds(observed, weight: float, bound: float):
    correction = Correction(weight=weight, bound=bound)
    for real_s, predicted_s in observed:
        correction.observe(real_s=real_s, predicted_s=predicted_s)
        assert 1 / bound * 0.999 <= correction.ratio <= bound * 1.001


def test_a_steady_factor_is_learned():
    correction = Correction(weight=0.1, bound=8.0)
    for _ in range(100):
        correction.observe(real_s=3.0, predicted_s=2.0)
    assert correction.ratio == pytest.approx(1.5, rel=1e-3)


def test_true_predictions_are_left_exactly_as_they_are():
    correction = Correction(weight=0.1, bound=8.0)
    correction.observe(real_s=0.3, predicted_s=0.3)
    assert correction.ratio == 1.0


def test_real_decode_times_replace_the_guess_by_their_mean():
    decode_time = DecodeTime(first_guess_s=1000.0, weight=0.01)
    for decode_s in (2.0, 4.0, 9.0):
        decode_time.observe(decode_s)
    assert decode_time.seconds == pytest.approx(5.0)


def test_the_decode_time_follows_a_change_of_the_workload():
    decode_time = DecodeTime(first_guess_s=1.0, weight=0.1)
    for decode_s in [2.0] * 50 + [8.0] * 50:
        decode_time.observe(decode_s)
    assert decode_time.seconds == pytest.approx(8.0, rel=0.01)


def test_with_no_weight_the_decode_time_stays_as_configured():
    decode_time = DecodeTime(first_guess_s=10.0, weight=0.0)
    decode_time.observe(2.0)
    assert decode_time.seconds == 10.0


def test_a_prefix_is_fetched_from_the_holder_that_its_peers_read_least_from():
    fleet = Fleet(ConductorConfig(), PROFILE)
    for node in (P0, P1, D0, D1):
        fleet.join(joined(node))
    held = {P0: 4, D0: 4}

    def source() -> NodeId:
        best = fleet.best_source(held, 4, random.Random(0))
        assert best is not None
        return best.node

    fleet.hear_traffic(D1, (IncomingTraffic(P0, 5000),))
    assert source() == D0
    fleet.hear_traffic(P1, (IncomingTraffic(D0, 9000),))
    assert source() == P0
    fleet.hear_traffic(P1, ())
    assert source() == D0
    fleet.lose(D1)
    fleet.hear_traffic(P1, (IncomingTraffic(D0, 1),))
    assert source() == P0


def test_a_link_is_as_fast_as_its_receiver_measured_it_of_late():
    fleet = Fleet(ConductorConfig(), PROFILE)
    for node in (P0, P1, D0, D1):
        fleet.join(joined(node))

    def measured() -> dict[NodeId, LinkCost]:
        best = fleet.best_source({D0: 4}, 4, random.Random(0))
        assert best is not None
        return dict(best.measured)

    fleet.hear_traffic(P0, (IncomingTraffic(D0, 0, 5e6, 0.25), IncomingTraffic(P1, 0, 1e6)))
    fleet.hear_traffic(P1, (IncomingTraffic(D0, 70, 2e6), IncomingTraffic(NodeId("gone"), 0, 1e6)))
    fleet.hear_traffic(D1, (IncomingTraffic(D0, 9, None, 0.5),))
    latency_s = PROFILE.transfer.latency_s
    assert measured() == {P0: LinkCost(0.25, 5e6), P1: LinkCost(latency_s, 2e6)}
    for nonsense in (0.0, -1.0, math.inf, math.nan):
        fleet.hear_traffic(P0, (IncomingTraffic(D0, 0, nonsense),))
        assert measured() == {P1: LinkCost(latency_s, 2e6)}
    fleet.hear_traffic(P0, ())
    assert measured() == {P1: LinkCost(latency_s, 2e6)}
    fleet.lose(P1)
    assert measured() == {}


def test_a_node_that_joins_late_is_taken_to_be_as_fast_as_its_peers():
    fleet = Fleet(ConductorConfig(), PROFILE)
    fleet.join(joined(D0))
    for _ in range(100):
        fleet.decode[D0].observe_step(real_s=1.0, predicted_s=4.0)
    fleet.join(joined(D1))
    fleet.join(joined(P0))
    assert fleet.decode[D1].compute.ratio == pytest.approx(0.25, rel=1e-3)
    assert fleet.prefill[P0].compute.ratio == 1.0
