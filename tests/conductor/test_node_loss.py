"""What becomes of requests whose node dies."""

import pytest

from snowskin.terms.commands import EndLease, FailRequest, StartPrefill
from snowskin.terms.events import (
    FetchFinished,
    KvLanded,
    NodeLost,
    NodeReported,
    Outcome,
    PrefillFinished,
    PrefillStarted,
    RequestFinished,
)
from snowskin.terms.ids import RequestId

from .cluster import BLOCK_BYTES, D0, D1, P0, P1, Cluster, arrival, held, joined

R = RequestId("r")


def test_a_queued_request_is_placed_again_when_its_prefill_node_dies():
    cluster = Cluster((P0, P1, D0))
    start = cluster.place(arrival("r"))
    (again,) = cluster.tell(NodeLost(start.prefill))
    assert isinstance(again, StartPrefill)
    assert {again.prefill, start.prefill} == {P0, P1}
    assert cluster.conductor.stat().placed_again == 1


def test_a_request_in_prefill_is_placed_again_since_no_token_was_out():
    cluster = Cluster((P0, P1, D0))
    start = cluster.place(arrival("r"))
    cluster.tell(PrefillStarted(R, start.prefill, 0))
    (again,) = cluster.tell(NodeLost(start.prefill))
    assert isinstance(again, StartPrefill)
    cluster.run(again)
    cluster.finish(again)
    assert cluster.conductor.stat().completed == 1


def test_a_request_whose_decode_node_dies_before_the_first_token_is_placed_again():
    cluster = Cluster((P0, D0, D1))
    start = cluster.place(arrival("r"))
    (again,) = cluster.tell(NodeLost(start.decode))
    assert isinstance(again, StartPrefill)
    assert {again.decode, start.decode} == {D0, D1}


def test_a_request_that_streams_fails_when_its_decode_node_dies_and_is_told_which():
    cluster = Cluster((P0, D0, D1))
    start = cluster.place(arrival("r"))
    cluster.run(start)
    (fail,) = cluster.tell(NodeLost(start.decode))
    assert fail == FailRequest(R, f"node {start.decode} was lost after the first token", (P0,))
    assert cluster.conductor.stat().failed == 1
    assert cluster.tell(RequestFinished(R, Outcome.FAILED, 3)) == ()
    assert cluster.conductor.stat().failed == 1


def test_a_prefill_node_may_die_once_the_kv_has_landed():
    cluster = Cluster((P0, P1, D0))
    start = cluster.place(arrival("r"))
    cluster.run(start)
    assert cluster.tell(NodeLost(start.prefill)) == ()
    cluster.finish(start)
    assert cluster.conductor.stat().completed == 1


def test_a_request_whose_kv_had_not_landed_fails_with_its_prefill_node():
    cluster = Cluster((P0, P1, D0))
    start = cluster.place(arrival("r"))
    cluster.run(start, until="prefill")
    (fail,) = cluster.tell(NodeLost(start.prefill))
    assert fail == FailRequest(R, f"node {start.prefill} was lost after the first token", (D0,))


def test_a_request_is_not_placed_more_often_than_allowed():
    cluster = Cluster((P0, P1, D0), max_placements=2)
    start = cluster.place(arrival("r"))
    (again,) = cluster.tell(NodeLost(start.prefill))
    cluster.tell(joined(start.prefill))
    (fail,) = cluster.tell(NodeLost(again.prefill))
    assert fail.reason == f"node {again.prefill} was lost, the last of 2 that were tried"


def test_without_waiting_a_request_fails_if_no_other_node_is_up():
    cluster = Cluster((P0, D0), hold_s=0.0)
    cluster.place(arrival("r"))
    (fail,) = cluster.tell(NodeLost(P0))
    assert fail == FailRequest(R, "node prefill-0 was lost, and no prefill node is up", (D0,))


def test_a_restarted_node_counts_as_lost_first():
    cluster = Cluster((P0, P1, D0))
    cluster.tell(held(P0, "tale", 10))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert start.prefill == P0
    (again,) = cluster.tell(joined(P0))
    assert isinstance(again, StartPrefill)
    assert again.decision.best_prefix_blocks == 0, "its blocks are gone with it"


def test_an_admitted_request_is_not_turned_away_when_it_is_placed_again():
    cluster = Cluster((P0, P1, D0), admission="predicted", ttft_slo_s=2.0)
    first, second = cluster.place(arrival("a", 1500)), cluster.place(arrival("b", 1500))
    assert first.prefill != second.prefill
    (again,) = cluster.tell(NodeLost(first.prefill))
    assert isinstance(again, StartPrefill)
    assert again.decision.ttft_s == pytest.approx(3.0)


def test_a_fetch_whose_source_dies_is_forgotten_and_the_request_goes_on():
    cluster = Cluster((P0, D1))
    cluster.tell(joined(D0, device_tokens=1), held(D0, "tale", 10))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert start.fetch is not None
    assert start.decode == D1
    assert cluster.tell(NodeLost(D0), joined(D0)) == ()
    assert cluster.tell(FetchFinished(R, P0, D0, 3, 3 * BLOCK_BYTES, 0.1)) == ()
    cluster.run(StartPrefill(R, P0, D1, None, start.decision))


def test_the_lease_of_a_fetch_ends_when_the_fetching_node_dies():
    cluster = Cluster((P0, P1, D0))
    cluster.tell(held(D0, "tale", 10))
    start = cluster.place(arrival("r", 1050, story="tale"))
    commands = cluster.tell(NodeLost(start.prefill))
    assert commands[0] == EndLease(D0, R)
    assert isinstance(commands[-1], StartPrefill)


def test_a_cancelled_request_frees_its_place_and_its_lease():
    cluster = Cluster((P0, D0))
    cluster.tell(held(D0, "tale", 10))
    cluster.place(arrival("r", 1050, story="tale"))
    assert cluster.tell(RequestFinished(R, Outcome.CANCELLED, 0)) == (EndLease(D0, R),)
    assert cluster.place(arrival("s", 1000)).decision.prefill[0].queue_s == 0.0


def test_late_words_of_an_earlier_placement_are_let_pass():
    cluster = Cluster((P0, P1, D0))
    start = cluster.place(arrival("r"))
    (again,) = cluster.tell(NodeLost(start.prefill))
    cluster.tell(joined(start.prefill))
    stale = (PrefillStarted(R, start.prefill, 0), PrefillFinished(R, start.prefill, 1.0))
    assert cluster.tell(*stale, KvLanded(R, D1, 0, 0.0)) == ()
    assert cluster.conductor.stat().stale_events == 3
    cluster.run(again)


def test_words_of_unknown_requests_and_nodes_are_counted():
    cluster = Cluster((P0, D0))
    assert cluster.tell(NodeLost(P1), NodeReported(D1, 0, 0, 0), KvLanded(R, D0, 0, 0.0)) == ()
    assert cluster.conductor.stat().stale_events == 3


def test_a_node_that_claims_to_reuse_more_than_the_prompt_has_still_work_to_do():
    cluster = Cluster((P0, D0))
    cluster.place(arrival("r", 1000))
    cluster.tell(PrefillStarted(R, P0, 5000))
    assert cluster.place(arrival("s")).decision.prefill[0].queue_s == pytest.approx(1e-3)


def test_a_report_of_a_prefill_node_is_no_stale_event():
    cluster = Cluster((P0, D0))
    cluster.tell(NodeReported(P0, 1, 0, 0, step_s=0.1))
    assert cluster.conductor.stat().stale_events == 0
