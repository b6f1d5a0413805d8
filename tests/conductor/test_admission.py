"""Who is let in, and when the others may come back."""

import pytest

from snowskin.conductor.admission import ADMISSIONS
from snowskin.terms.commands import RejectCause, RejectRequest
from snowskin.terms.events import Outcome

from .cluster import D0, D1, P0, P1, Cluster, arrival, joined

# A step of b sequences of 1000 tokens takes 10 + 2·b ms: 0.0165 lets three run together.
THREE_AT_ONCE = 0.0165


def test_without_admission_everybody_is_let_in_within_the_bound():
    cluster = Cluster((P0, D0), ttft_slo_s=0.1, tbt_slo_s=0.001, max_in_flight=3)
    for name in "abc":
        cluster.place(arrival(name))
    reject = cluster.refuse(arrival("d"))
    assert reject.reason == "3 requests are in flight"
    assert reject.retry_after_s >= 1


@pytest.mark.parametrize("admission", ["baseline", "early", "predicted"])
def test_a_first_token_that_would_come_too_late_is_refused_until_the_queue_has_shrunk(
    admission: str,
):
    cluster = Cluster((P0, D0), admission=admission, ttft_slo_s=10.0, tbt_slo_s=1.0)
    cluster.place(arrival("a", 9000))
    reject = cluster.refuse(arrival("b", 5000))
    assert reject.reason == "predicted TTFT 14.00 s exceeds 10 s"
    assert reject.retry_after_s == pytest.approx(4.0)
    assert reject.decision.ttft_s == pytest.approx(14.0)
    assert [found.node for found in reject.decision.prefill] == [P0]


def test_retry_after_is_at_least_a_second_and_at_most_the_limit():
    cluster = Cluster(
        (P0, D0), admission="early", ttft_slo_s=1.0, tbt_slo_s=1.0, retry_limit_s=30.0
    )
    cluster.place(arrival("a", 1000))
    assert cluster.refuse(arrival("b", 100)).retry_after_s == 1.0
    assert cluster.refuse(arrival("c", 90_000)).retry_after_s == 30.0


def test_early_rejection_sees_only_the_present_load_of_decode():
    cluster = Cluster((P0, P1, D0), admission="early", tbt_slo_s=THREE_AT_ONCE)
    starts = [cluster.place(arrival(name, 1000)) for name in "abcde"]
    for start in starts[:3]:
        cluster.run(start)
    reject = cluster.refuse(arrival("f", 1000))
    assert reject.reason == "TBT 0.018 s on decode-0 would exceed 0.0165 s"
    cluster.finish(starts[0])
    cluster.place(arrival("g", 1000))


@pytest.mark.parametrize("admission", ["early", "predicted"])
def test_room_on_the_device_is_counted_with_the_longest_answers_as_the_engine_does(
    admission: str,
):
    cluster = Cluster((P0,), admission=admission, tbt_slo_s=1.0, decode_s=60.0)
    cluster.tell(joined(D0, device_tokens=3500))
    first = cluster.place(arrival("a", 1000, output_limit=1000))
    cluster.run(first)
    reject = cluster.refuse(arrival("b", 1000, output_limit=501))
    assert reject.cause is RejectCause.DECODE_FULL
    cluster.place(arrival("c", 1000, output_limit=500))
    cluster.finish(first)


def test_rejection_by_prediction_sees_what_still_prefills():
    cluster = Cluster((P0, D0), admission="predicted", tbt_slo_s=THREE_AT_ONCE, decode_s=60.0)
    for name in "abc":
        cluster.place(arrival(name, 1000))
    reject = cluster.refuse(arrival("d", 1000))
    assert reject.reason == "predicted mean TBT 0.018 s exceeds 0.0165 s"


def test_rejection_by_prediction_does_not_count_what_will_have_finished_by_then():
    cluster = Cluster((P0, D0), admission="predicted", tbt_slo_s=THREE_AT_ONCE, decode_s=2.5)
    for name in "abcdefgh":
        cluster.place(arrival(name, 1000))
    assert cluster.conductor.stat().rejected == 0


def test_rejection_by_prediction_says_when_the_pool_will_have_room():
    cluster = Cluster((P0, P1, D0), admission="predicted", tbt_slo_s=THREE_AT_ONCE, decode_s=20.0)
    for name in "abc":
        cluster.run(cluster.place(arrival(name, 1000)))
    cluster.now_s = 10.0
    reject = cluster.refuse(arrival("d", 1000))
    # a started at 1 s and leaves at 21; d would be through prefill by 11.
    assert reject.retry_after_s == pytest.approx(10.0, abs=0.2)
    cluster.now_s += reject.retry_after_s + 0.2
    cluster.place(arrival("d", 1000))


def test_the_decode_time_is_learned_from_those_who_have_finished():
    cluster = Cluster((P0, P1, D0), admission="predicted", tbt_slo_s=THREE_AT_ONCE, decode_s=1000.0)
    start = cluster.place(arrival("a", 1000))
    cluster.run(start)
    cluster.now_s += 3.0
    cluster.finish(start)
    assert cluster.conductor.ledger.decode_time.seconds == pytest.approx(3.0)


def test_the_baseline_turns_away_only_after_prefill():
    cluster = Cluster((P0, D0), admission="baseline", tbt_slo_s=THREE_AT_ONCE)
    starts = [cluster.place(arrival(name, 1000)) for name in "abcd"]
    for start in starts[:3]:
        assert cluster.run(start) == ()
    (reject,) = cluster.run(starts[3], until="prefill")
    assert isinstance(reject, RejectRequest)
    assert reject.reason == "TBT 0.018 s on decode-0 would exceed 0.0165 s"
    assert cluster.conductor.stat().rejected == 1
    assert cluster.conductor.stat().in_flight == 3


@pytest.mark.parametrize("admission", ["early", "predicted"])
def test_decode_without_room_for_a_sequence_is_full(admission: str):
    cluster = Cluster((P0, P1), admission=admission, decode_s=100.0)
    cluster.tell(joined(D0, sequence_limit=1))
    cluster.run(cluster.place(arrival("a", 1000)))
    assert cluster.refuse(arrival("b", 1000)).retry_after_s > 1


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ((), "no prefill node is up"),
        ((D0,), "no prefill node is up"),
        ((P0,), "no decode node is up"),
    ],
)
def test_without_a_node_of_either_role_everybody_is_refused(admission: str, nodes, reason: str):
    reject = Cluster(nodes, admission=admission).refuse(arrival("a"))
    assert reject.reason == reason
    assert reject.retry_after_s == 5.0


def test_a_full_prefill_queue_is_passed_over_and_if_all_are_full_everybody_is_refused():
    cluster = Cluster((D0, D1))
    cluster.tell(joined(P0, sequence_limit=1), joined(P1, sequence_limit=2))
    taken = [cluster.place(arrival(name, 4000)).prefill for name in "abc"]
    assert sorted(taken) == [P0, P1, P1]
    reject = cluster.refuse(arrival("d"))
    assert reject.reason == "the queue of every prefill node is full"
    assert reject.retry_after_s == pytest.approx(4.0)


def test_a_prompt_that_fits_no_decode_node_fails_since_a_retry_would_not_help():
    cluster = Cluster((P0, D0, D1))
    (fail,) = cluster.tell(arrival("a", 100_000))
    assert fail.reason == "no decode node's device memory holds 100000 prompt + 100 output tokens"
    assert cluster.conductor.stat().failed == 1


def test_a_request_that_was_cancelled_makes_room():
    cluster = Cluster((P0, D0), max_in_flight=1)
    start = cluster.place(arrival("a"))
    cluster.refuse(arrival("b"))
    cluster.finish(start, Outcome.CANCELLED)
    cluster.place(arrival("c"))
    assert cluster.conductor.stat().cancelled == 1
