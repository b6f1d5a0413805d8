import random
from collections import Counter

import msgspec
import pytest

from snowskin.conductor.draw import RECORDED_CANDIDATES
from snowskin.conductor.prefill_choice import (
    POLICIES,
    FetchSource,
    PrefillPool,
    PrefillQuestion,
)
from snowskin.cost.costs import LinkCost, PrefillCost
from snowskin.terms.ids import NodeId

A, B = NodeId("a"), NodeId("b")


def question(source: FetchSource | None = None) -> PrefillQuestion:
    return PrefillQuestion(1000, 100, PrefillCost(0.0, 1e-3, 0.0), 1.0, source)


def pool(*rows: tuple[NodeId, int, float]) -> PrefillPool:
    nodes, blocks, queue_s = map(list, zip(*rows, strict=True))
    return PrefillPool(nodes, blocks, queue_s, [1.0] * len(rows))


SOURCE = FetchSource(B, 9, 0, 100, link=LinkCost(0.01, 10_000.0), correction=1.0)
# a is free and holds nothing; b holds the prefix and is busy; c is free soonest but one.
POOL = pool((A, 0, 0.0), (B, 9, 0.5))


@pytest.mark.parametrize(
    ("policy", "node", "reused_blocks", "ttft_s", "reason"),
    [
        ("kvcache-centric", A, 9, 0.1 + 0.1, "least TTFT: a fetches 9 blocks from b"),
        ("cache-aware", B, 9, 0.5 + 0.1, "least TTFT: b holds 9 blocks of the prompt"),
        ("load-balance", A, 0, 1.0, "a has the shortest queue"),
    ],
)
def test_each_policy_weighs_prefix_queue_and_fetch_in_its_own_way(
    policy: str, node: NodeId, reused_blocks: int, ttft_s: float, reason: str
):
    choice = POLICIES[policy](question(SOURCE), POOL, random.Random(0))
    assert (choice.chosen.node, choice.chosen.reused_blocks) == (node, reused_blocks)
    assert choice.chosen.ttft_s == pytest.approx(ttft_s)
    assert choice.reason == reason
    assert [candidate.node for candidate in choice.candidates] == [A, B]


def test_a_node_that_has_measured_its_link_is_predicted_by_that():
    source = msgspec.structs.replace(
        SOURCE, busy_bytes=200, measured={A: LinkCost(0.5, 1000.0), B: LinkCost(0.0, 1.0)}
    )
    views = pool((A, 0, 0.0), (B, 9, 9.0), (NodeId("c"), 0, 0.0), (NodeId("d"), 8, 0.0))
    choice = POLICIES["kvcache-centric"](question(source), views, random.Random(0))
    # a would need 1.6 s; c needs 120 ms and d 40 ms, by the profile.
    assert [one.transfer_s for one in choice.candidates] == pytest.approx([0.0, 0.0, 0.12, 0.04])
    assert [one.fetch_from for one in choice.candidates] == [None, None, B, B]


def test_the_random_policy_takes_each_node_about_as_often():
    rng = random.Random(0)
    taken = Counter(
        POLICIES["random"](question(SOURCE), POOL, rng).chosen.node for _ in range(1000)
    )
    assert 400 < taken[A] < 600


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_choices(policy: str):
    equals = pool(*((NodeId(f"n{index}"), 0, 0.0) for index in range(8)))

    def run() -> list[NodeId]:
        rng = random.Random(7)
        return [POLICIES[policy](question(), equals, rng).chosen.node for _ in range(50)]

    assert run() == run()
    assert len(set(run())) == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_fleet_is_recorded_by_its_best_nodes_and_the_chosen_one(policy: str):
    fleet = pool(*((NodeId(f"n{index:03}"), 0, 100.0 - index) for index in range(100)))
    choice = POLICIES[policy](question(), fleet, random.Random(3))
    names = [candidate.node for candidate in choice.candidates]
    assert len(names) == RECORDED_CANDIDATES
    assert names == sorted(names)
    assert choice.chosen in choice.candidates
    assert names[0] == "n084" or policy == "random"


def test_a_node_corrected_to_be_slow_is_avoided():
    slow_a = PrefillPool([A, B], [0, 0], [0.0, 0.0], [2.0, 1.0])
    choice = POLICIES["kvcache-centric"](question(), slow_a, random.Random(0))
    assert choice.chosen.node == B
    assert [candidate.prefill_s for candidate in choice.candidates] == [2.0, 1.0]
