"""The paper's Algorithm 1, by the choices that it must make."""

import pytest

from snowskin.terms.commands import EndLease, GrantLease, StartPrefill
from snowskin.terms.events import (
    FetchFinished,
    IncomingTraffic,
    KvLanded,
    NodeReported,
    PrefillFinished,
    PrefillStarted,
)
from snowskin.terms.ids import NodeId, RequestId

from .cluster import BLOCK, BLOCK_BYTES, D0, P0, P1, P2, Cluster, arrival, held, keys, with_link


def candidate(start: StartPrefill, node: NodeId):
    return next(found for found in start.decision.prefill if found.node == node)


def test_request_goes_where_its_prefix_is_held():
    cluster = Cluster((P0, P1, P2, D0), profile=with_link(1.0))
    cluster.tell(held(P1, "tale", 10))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert start.prefill == P1
    assert start.fetch is None
    assert start.decision.ttft_s == pytest.approx(0.05)
    assert start.decision.best_prefix_blocks == 10
    assert "prefill-1 holds 10 blocks" in start.decision.reason


def test_request_goes_elsewhere_if_the_queue_costs_more_than_the_prefix_saves():
    cluster = Cluster((P0, P1, D0), profile=with_link(1.0))
    cluster.tell(held(P1, "tale", 10))
    assert cluster.place(arrival("long", 3000, story="tale")).prefill == P1
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert start.prefill == P0
    assert candidate(start, P0).ttft_s == pytest.approx(1.05)
    assert candidate(start, P1).ttft_s == pytest.approx(2.0 + 0.05)
    assert "prefill-0 computes the whole prompt" in start.decision.reason


def test_a_prefix_is_fetched_to_an_idle_node_if_its_holder_is_busy():
    cluster = Cluster((P0, P1, D0))
    cluster.tell(held(P1, "tale", 10))
    assert cluster.place(arrival("long", 3000, story="tale")).prefill == P1
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert start.prefill == P0
    assert start.fetch is not None
    assert start.fetch.source == P1
    assert start.decision.ttft_s == pytest.approx(0.1 + 0.05)


def test_the_difference_alone_is_fetched_and_the_terms_add_up():
    cluster = Cluster((P0, P1, D0))
    cluster.tell(held(P0, "tale", 4), held(P1, "tale", 10))
    cluster.place(arrival("x", 3000, story="tale"))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert start.prefill == P0
    chosen = candidate(start, P0)
    assert (chosen.local_blocks, chosen.reused_blocks, chosen.fetch_from) == (4, 10, P1)
    assert chosen.transfer_s == pytest.approx(6 * 0.01)
    assert chosen.prefill_s == pytest.approx(0.05)
    assert start.decision.ttft_s == pytest.approx(0.06 + 0.05)
    assert start.fetch is not None
    assert [block.key for block in start.fetch.blocks] == list(keys("tale", 10)[4:])
    assert "fetches 6 blocks from prefill-1" in start.decision.reason


def test_a_prefix_within_the_threshold_of_the_best_is_good_enough():
    cluster = Cluster((P0, P1, D0), kvcache_balancing_threshold=1.25)
    cluster.tell(held(P0, "tale", 9), held(P1, "tale", 10))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert candidate(start, P0).fetch_from is None
    cluster = Cluster((P0, P1, D0), kvcache_balancing_threshold=1.1)
    cluster.tell(held(P0, "tale", 9), held(P1, "tale", 10))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert candidate(start, P0).fetch_from == P1


def test_a_node_without_any_prefix_may_always_fetch():
    cluster = Cluster((P0, P1, D0), kvcache_balancing_threshold=1e9)
    cluster.tell(held(P1, "tale", 1))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert candidate(start, P0).fetch_from == P1


def test_a_fetch_that_costs_more_than_it_saves_is_left_undone():
    cluster = Cluster((P0, P1, D0), profile=with_link(0.5e6))
    cluster.tell(held(P1, "tale", 10))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert candidate(start, P0).fetch_from is None
    assert candidate(start, P0).prefill_s == pytest.approx(1.05)


def test_kv_that_a_decode_node_generated_is_fetched_from_it():
    cluster = Cluster((P0, P1, D0))
    cluster.tell(held(D0, "tale", 10))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert start.fetch is not None
    assert start.fetch.source == D0
    assert start.prefill in (P0, P1)


def test_the_replica_with_the_least_bytes_in_flight_is_read():
    cluster = Cluster((P0, P1, P2, D0))
    cluster.tell(held(D0, "lore", 8), held(D0, "tale", 10))
    first = cluster.place(arrival("a", 900, story="lore"))
    assert first.fetch is not None
    assert first.fetch.source == D0
    third = next(node for node in (P0, P1, P2) if node != first.prefill)
    cluster.tell(held(third, "tale", 10))
    start = cluster.place(arrival("r", 1050, story="tale"))
    assert {found.fetch_from for found in start.decision.prefill} == {None, third}


def test_bytes_in_flight_make_a_fetch_take_longer_until_it_is_done():
    cluster = Cluster((P0, P1, P2, D0), correction_weight=0)
    cluster.tell(held(D0, "tale", 10))
    first = cluster.place(arrival("a", 1050, story="tale"))
    second = cluster.place(arrival("b", 1050, story="tale"))
    assert candidate(second, second.prefill).transfer_s == pytest.approx(0.2)
    for start in (first, second):
        cluster.run(start)
    third = cluster.place(arrival("c", 1050, story="tale"))
    assert candidate(third, third.prefill).transfer_s == pytest.approx(0.1)


def test_the_last_token_of_a_prompt_is_always_computed():
    cluster = Cluster((P0, D0))
    cluster.tell(held(P0, "tale", 10))
    start = cluster.place(arrival("r", 1000, story="tale"))
    assert candidate(start, P0).reused_blocks == 9
    assert start.decision.ttft_s == pytest.approx(0.1)
    start = cluster.place(arrival("s", 1001, story="tale"))
    assert candidate(start, P0).reused_blocks == 10


def test_equals_are_drawn_at_random_so_that_no_node_is_the_first_choice():
    taken = {Cluster((P0, P1, P2, D0), seed=seed).place(arrival("r")).prefill for seed in range(40)}
    assert taken == {P0, P1, P2}


def test_the_source_of_a_fetch_keeps_its_blocks_until_the_fetch_ends():
    cluster = Cluster((P0, D0), lease_s=7.0)
    cluster.tell(held(D0, "tale", 10))
    wanted = keys("tale", 10)
    lease, start = cluster.tell(arrival("r", 1050, story="tale"))
    assert lease == GrantLease(D0, RequestId("r"), wanted, 7.0)
    assert isinstance(start, StartPrefill)
    assert cluster.conductor.directory.is_leased(D0, wanted[0])
    assert cluster.conductor.next_wakeup_s() == 7.0
    fetched = FetchFinished(RequestId("r"), P0, D0, 10, 10 * BLOCK_BYTES, 0.1)
    assert cluster.tell(fetched) == (EndLease(D0, RequestId("r")),)
    assert not cluster.conductor.directory.is_leased(D0, wanted[0])
    assert cluster.conductor.next_wakeup_s() is None


def test_the_source_of_a_fetch_keeps_the_blocks_before_what_is_fetched_as_well():
    cluster = Cluster((P0, D0), lease_s=7.0)
    cluster.tell(held(P0, "tale", 2))
    cluster.tell(held(D0, "tale", 10))
    lease, start = cluster.tell(arrival("r", 1050, story="tale"))
    assert lease == GrantLease(D0, RequestId("r"), keys("tale", 10), 7.0)
    assert isinstance(start, StartPrefill)
    assert start.fetch is not None
    assert tuple(block.key for block in start.fetch.blocks) == keys("tale", 10)[2:]


def test_a_queue_counts_what_waits_and_what_is_left_of_what_runs():
    cluster = Cluster((P0, D0))
    first = cluster.place(arrival("a", 2000))
    cluster.place(arrival("b", 3000))
    cluster.tell(PrefillStarted(first.request, P0, 0))
    cluster.now_s += 0.5
    assert candidate(cluster.place(arrival("c", 100)), P0).queue_s == pytest.approx(4.5)
    cluster.now_s += 5.0
    assert candidate(cluster.place(arrival("d", 100)), P0).queue_s == pytest.approx(3.1)
    cluster.tell(PrefillFinished(first.request, P0, 2.0))
    assert candidate(cluster.place(arrival("e", 100)), P0).queue_s == pytest.approx(3.2)


def test_a_link_that_is_slower_than_predicted_is_predicted_slower():
    cluster = Cluster((P0, D0))
    cluster.tell(held(D0, "tale", 10))
    start = cluster.place(arrival("a", 1050, story="tale"))
    cluster.tell(FetchFinished(start.request, P0, D0, 10, 10 * BLOCK_BYTES, 0.3))
    cluster.finish(start)
    start = cluster.place(arrival("b", 1050, story="tale"))
    assert candidate(start, P0).transfer_s == pytest.approx(0.2)


def test_a_slow_link_is_told_by_the_node_that_reads_over_it_and_then_not_fetched_over():
    cluster = Cluster((P0, P1, D0))
    cluster.tell(held(D0, "tale", 10))
    for node in (P0, P1):
        cluster.tell(NodeReported(node, 0, 0, 0, incoming=(IncomingTraffic(D0, 0, 20e6),)))
    start = cluster.place(arrival("a", 1050, story="tale"))
    assert candidate(start, P0).transfer_s == candidate(start, P1).transfer_s == 0.05
    cluster.finish(start)
    for node in (P0, P1):
        cluster.tell(NodeReported(node, 0, 0, 0, incoming=(IncomingTraffic(D0, 0, 0.1e6),)))
    start = cluster.place(arrival("b", 1050, story="tale"))
    assert start.fetch is None


def test_a_node_that_is_steadily_slower_than_predicted_is_predicted_slower():
    cluster = Cluster((P0, D0))
    for name in "abcdefgh":
        start = cluster.place(arrival(name))
        cluster.tell(PrefillStarted(start.request, P0, 0))
        cluster.tell(PrefillFinished(start.request, P0, 2 * 1.001), KvLanded(name, D0, 0, 0.0))
        cluster.finish(start)
    start = cluster.place(arrival("r", BLOCK))
    assert start.decision.ttft_s == pytest.approx(0.2, rel=0.01)
