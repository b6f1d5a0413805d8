import random

import pytest

from snowskin.conductor.decode_choice import DecodePool, choose_decode
from snowskin.cost.costs import DecodeCost
from snowskin.terms.commands import DecodeCandidate
from snowskin.terms.events import DecodeStarted, NodeReported, Outcome, RequestFinished
from snowskin.terms.ids import NodeId

from .cluster import D0, D1, P0, P1, Cluster, arrival

COST = DecodeCost(10e-3, 1e-3, 1e-6)
REQUEST = arrival("new", 1000, output_limit=200)


def row(
    name: str,
    sequences: int = 0,
    tokens: int = 0,
    reserved_tokens: int = 0,
    sequence_limit: int = 100,
    device_tokens: int = 100_000,
) -> tuple[object, ...]:
    return (NodeId(name), sequences, tokens, reserved_tokens, sequence_limit, device_tokens, 1.0)


def pool(*rows: tuple[object, ...]) -> DecodePool:
    return DecodePool(*map(list, zip(*rows, strict=True)))


def test_the_least_tbt_after_joining_is_chosen_with_every_score():
    choice = choose_decode(
        REQUEST, pool(row("a", 1, 8000), row("b", 3, 1000)), COST, random.Random(0)
    )
    assert choice.chosen.node == "b"
    assert choice.candidates == (
        DecodeCandidate(NodeId("a"), 2, 9000, pytest.approx(21e-3)),
        DecodeCandidate(NodeId("b"), 4, 2000, pytest.approx(16e-3)),
    )
    assert choice.reason == "b has the least TBT"


@pytest.mark.parametrize(
    "full",
    [
        row("a", 5, 0, sequence_limit=5),
        row("a", 0, 0, device_tokens=1199),
        row("a", 1, 1000, 98_801),
    ],
)
def test_a_node_without_room_is_passed_over(full: tuple[object, ...]):
    choice = choose_decode(REQUEST, pool(full, row("b", 50, 50_000)), COST, random.Random(0))
    assert choice.chosen.node == "b"


def test_if_no_node_has_room_the_least_loaded_takes_the_request_into_its_queue():
    nodes = pool(row("a", 9, 0, sequence_limit=9), row("b", 8, 0, sequence_limit=8))
    choice = choose_decode(REQUEST, nodes, COST, random.Random(0))
    assert choice.chosen.node == "b"
    assert "no decode node has room" in choice.reason


def test_requests_that_still_prefill_count_for_their_decode_node():
    cluster = Cluster((P0, D0, D1))
    starts = [cluster.place(arrival(name)) for name in "abcd"]
    assert sorted(start.decode for start in starts) == [D0, D0, D1, D1]


def test_tokens_that_were_generated_count_until_their_request_is_gone():
    cluster = Cluster((P0, D0, D1))
    first = cluster.place(arrival("a"))
    cluster.run(first)
    cluster.tell(NodeReported(first.decode, 1, 0, 6001))
    second = cluster.place(arrival("b", 3000))
    assert second.decode != first.decode
    third = cluster.place(arrival("c"))
    assert third.decode == second.decode, "3000 + 1001 tokens are still fewer than 6001 + 1001"
    cluster.tell(RequestFinished(first.request, Outcome.COMPLETED, 5000))
    assert cluster.place(arrival("d")).decode == first.decode


def test_a_node_whose_steps_are_slower_than_predicted_gets_less():
    cluster = Cluster((P0, P1, D0, D1))
    for _ in range(10):
        cluster.tell(NodeReported(D0, 1, 0, 1000, step_s=0.12))
    assert {cluster.place(arrival(name)).decode for name in "abcd"} == {D1}


def test_the_length_that_a_client_allows_is_not_taken_for_the_length_to_come():
    decisions = [Cluster(seed=3).place(arrival("r", output_limit=limit)) for limit in (1, 90_000)]
    assert decisions[0] == decisions[1]


def test_a_start_of_decode_before_the_word_of_landing_counts_once():
    cluster = Cluster((P0, D0))
    start = cluster.place(arrival("a"))
    cluster.run(start, until="prefill")
    cluster.tell(DecodeStarted(start.request, D0))
    assert cluster.conductor.ledger.fleet.decode[D0].present == 1
