"""Requests wait for a node that is on its way back, and not for ever."""

import pytest

from snowskin.terms.commands import (
    FailRequest,
    HoldRequest,
    RejectCause,
    RejectRequest,
    StartPrefill,
)
from snowskin.terms.events import (
    NodeLost,
    Outcome,
    PrefillFinished,
    PrefillStarted,
    RequestFinished,
    TimePassed,
)
from snowskin.terms.ids import RequestId

from .cluster import D0, P0, P1, Cluster, arrival, joined

R = RequestId("r")


@pytest.mark.parametrize("lost", [P0, D0])
def test_a_queued_request_waits_for_the_only_node_of_a_role(lost):
    cluster = Cluster((P0, D0))
    cluster.place(arrival("r"))
    (hold,) = cluster.tell(NodeLost(lost))
    assert isinstance(hold, HoldRequest)
    role = lost.partition("-")[0]
    assert hold.decision.reason == f"waits up to 30 s, since no {role} node is up"
    assert cluster.conductor.stat().in_flight == 1
    (start,) = cluster.tell(joined(lost), after_s=5.0)
    assert isinstance(start, StartPrefill)
    assert cluster.conductor.next_wakeup_s() is None
    cluster.run(start)
    cluster.finish(start)
    assert cluster.conductor.stat().completed == 1


def test_the_words_of_the_placement_that_was_given_up_are_let_pass():
    cluster = Cluster((P0, D0))
    cluster.place(arrival("r"))
    cluster.tell(NodeLost(D0))
    assert cluster.tell(PrefillStarted(R, P0, 0), PrefillFinished(R, P0, 1.0)) == ()
    assert cluster.conductor.stat().stale_events == 2


def test_who_waits_in_vain_fails_when_the_time_is_over():
    cluster = Cluster((P0, D0))
    cluster.place(arrival("r"))
    cluster.tell(NodeLost(P0))
    assert cluster.conductor.next_wakeup_s() == 30.0
    assert cluster.tell(TimePassed(), after_s=29.0) == ()
    (fail,) = cluster.tell(TimePassed(), after_s=1.0)
    reason = "its node was lost, and it waited 30 s: no prefill node is up"
    assert fail == FailRequest(R, reason, ())
    assert cluster.conductor.stat().failed == 1


@pytest.mark.parametrize("lost", [P0, D0])
def test_who_comes_while_a_node_is_away_waits_like_the_others_and_after_them(lost):
    cluster = Cluster((P0, D0))
    cluster.place(arrival("r"))
    cluster.tell(NodeLost(lost))
    (hold,) = cluster.tell(arrival("late"))
    assert isinstance(hold, HoldRequest)
    starts = cluster.tell(joined(lost))
    assert [start.request for start in starts] == ["r", "late"]
    assert cluster.conductor.stat().placed_again == 1


def test_who_came_late_and_waits_in_vain_is_told_to_come_again():
    cluster = Cluster((P0, D0))
    cluster.tell(NodeLost(P0), arrival("late"))
    (reject,) = cluster.tell(TimePassed(), after_s=30.0)
    assert isinstance(reject, RejectRequest)
    assert reject.cause is RejectCause.NO_NODE
    assert reject.reason == "waited 30 s: no prefill node is up"
    assert reject.retry_after_s >= 1


def test_a_cluster_that_stays_broken_or_never_was_whole_says_so_at_once():
    cluster = Cluster((P0,))
    assert cluster.refuse(arrival("early")).cause is RejectCause.NO_NODE
    cluster.tell(joined(D0), NodeLost(D0), TimePassed())
    cluster.tell(TimePassed(), after_s=30.0)
    assert cluster.refuse(arrival("late")).reason == "no decode node is up"


def test_no_more_may_wait_than_would_have_been_queued():
    cluster = Cluster((D0,))
    cluster.tell(joined(P0, sequence_limit=2), NodeLost(P0))
    cluster.tell(arrival("a"), arrival("b"))
    reject = cluster.refuse(arrival("c"))
    assert reject.cause is RejectCause.PREFILL_FULL
    assert reject.reason == "no prefill node is up, and 2 requests wait for it"


def test_who_waits_counts_as_in_flight():
    cluster = Cluster((P0, D0), max_in_flight=1)
    cluster.tell(NodeLost(P0), arrival("a"))
    assert cluster.refuse(arrival("b")).cause is RejectCause.IN_FLIGHT


def test_who_leaves_while_waiting_is_counted_and_forgotten():
    cluster = Cluster((P0, D0))
    cluster.tell(NodeLost(P0), arrival("r"))
    assert cluster.tell(RequestFinished(R, Outcome.CANCELLED, 0)) == ()
    assert cluster.conductor.stat().cancelled == 1
    assert cluster.conductor.next_wakeup_s() is None
    assert cluster.tell(joined(P0)) == ()


def test_an_admitted_request_waits_for_a_place_where_all_queues_are_full():
    cluster = Cluster((D0,))
    cluster.tell(joined(P0, sequence_limit=1), joined(P1, sequence_limit=1))
    first, second = cluster.place(arrival("a")), cluster.place(arrival("b"))
    (hold,) = cluster.tell(NodeLost(first.prefill))
    assert hold.decision.reason == "waits up to 30 s, since the queue of every prefill node is full"
    *_, start = cluster.run(second, until="prefill")
    assert isinstance(start, StartPrefill)
    assert (start.request, start.prefill) == ("a", second.prefill)


def test_who_waited_is_admitted_by_the_rules_when_a_node_is_back():
    cluster = Cluster((P0, D0), admission="early", ttft_slo_s=0.5)
    cluster.tell(NodeLost(P0), arrival("slow", 1000))
    (reject,) = cluster.tell(joined(P0))
    assert isinstance(reject, RejectRequest)
    assert reject.cause is RejectCause.TTFT


def test_a_prompt_that_outgrows_every_node_fails_when_they_are_back():
    cluster = Cluster((P0, D0))
    cluster.tell(NodeLost(D0), arrival("r", 1000))
    (fail,) = cluster.tell(joined(D0, device_tokens=1000))
    assert isinstance(fail, FailRequest)
    assert "no decode node's device memory holds" in fail.reason
