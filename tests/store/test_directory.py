from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snowskin.store.directory import Directory, Replica
from snowskin.terms.commands import EndLease, GrantLease
from snowskin.terms.errors import InvalidInput
from snowskin.terms.events import (
    BlocksCommitted,
    BlocksEvicted,
    NodeJoined,
    NodeLost,
    TimePassed,
)
from snowskin.terms.ids import BlockKey, NodeId, RequestId, Role, SlotIndex, Tier

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
NODES = (A, B, C)
KEYS = tuple(BlockKey(index.to_bytes(16, "big")) for index in range(6))
REQUEST = RequestId("r")


def joined(node: NodeId) -> NodeJoined:
    return NodeJoined(node, Role.PREFILL, 100, 10, 1000)


def committed(node: NodeId, *indices: int, tier: Tier = Tier.DRAM) -> BlocksCommitted:
    keys = tuple(KEYS[index] for index in indices)
    slots = tuple(SlotIndex(index) for index in indices)
    return BlocksCommitted(node, tier, keys, slots, (1,) * len(indices))


def evicted(node: NodeId, *indices: int, tier: Tier = Tier.DRAM) -> BlocksEvicted:
    return BlocksEvicted(node, tier, tuple(KEYS[index] for index in indices))


def lease(node: NodeId, *indices: int, duration_s: float = 10.0) -> GrantLease:
    return GrantLease(node, REQUEST, tuple(KEYS[index] for index in indices), duration_s)


def directory(*events: object, nodes: tuple[NodeId, ...] = NODES, limit: int = 1000) -> Directory:
    made = Directory(replica_limit=limit)
    for event in (*map(joined, nodes), *events):
        made.handle(event, now_s=0.0)
    return made


def test_the_longest_prefix_of_each_node_ends_at_its_first_gap():
    held = directory(committed(A, 0, 1, 2), committed(B, 0, 2, 3), committed(C, 1, 2))
    assert held.longest_prefix(KEYS) == {A: 3, B: 1}


def test_a_prompt_that_nobody_holds_matches_nobody():
    assert directory().longest_prefix(KEYS) == {}
    assert directory(committed(A, 0)).longest_prefix(()) == {}


def test_replicas_name_every_copy_with_dram_first():
    held = directory(
        committed(B, 0, tier=Tier.SSD), committed(B, 0), committed(A, 0, tier=Tier.HBM)
    )
    assert held.replicas(KEYS[0]) == (
        Replica(A, Tier.HBM, SlotIndex(0), 1),
        Replica(B, Tier.DRAM, SlotIndex(0), 1),
        Replica(B, Tier.SSD, SlotIndex(0), 1),
    )
    assert held.replica_count(KEYS[0]) == 2


def test_a_block_evicted_from_one_tier_is_still_held_on_another():
    held = directory(committed(A, 0), committed(A, 0, tier=Tier.SSD), evicted(A, 0))
    assert held.longest_prefix(KEYS) == {A: 1}
    held.handle(evicted(A, 0, tier=Tier.SSD), now_s=0.0)
    assert held.longest_prefix(KEYS) == {}


def test_placed_tells_where_blocks_lie_up_to_the_first_that_is_missing():
    held = directory(committed(A, 0, 1, 3))
    assert [block.slot for block in held.placed(A, KEYS)] == [0, 1]
    assert held.placed(NodeId("nobody"), KEYS) == ()


def test_a_block_committed_anew_lies_where_it_was_committed_last():
    moved = BlocksCommitted(A, Tier.DRAM, KEYS[:1], (SlotIndex(7),), (9,))
    held = directory(committed(A, 0), moved)
    assert held.replicas(KEYS[0]) == (Replica(A, Tier.DRAM, SlotIndex(7), 9),)
    assert held.stat().replicas == 1


def test_a_lost_node_takes_its_replicas_along_and_its_bit_is_used_again():
    held = directory(committed(A, 0, 1), committed(B, 0), NodeLost(A), joined(NodeId("d")))
    assert held.longest_prefix(KEYS) == {B: 1}
    assert held.stat().replicas == 1


def test_a_node_that_joins_again_holds_nothing_until_it_says_so():
    held = directory(committed(A, 0), joined(A))
    assert held.longest_prefix(KEYS) == {}
    held.handle(committed(A, 0, 1), now_s=1.0)
    assert held.longest_prefix(KEYS) == {A: 2}


def test_late_words_of_a_node_that_is_gone_are_counted_and_change_nothing():
    held = directory(NodeLost(A), committed(A, 0), evicted(A, 0), lease(A, 0))
    assert held.longest_prefix(KEYS) == {}
    assert held.stat().stale_events == 3


def test_replicas_beyond_the_limit_are_refused_and_counted():
    held = directory(committed(A, 0, 1, 2), committed(B, 0), limit=2)
    assert held.longest_prefix(KEYS) == {A: 2}
    assert (held.stat().replicas, held.stat().refused_replicas) == (2, 2)


def test_a_limit_below_one_is_refused():
    with pytest.raises(InvalidInput, match="replica_limit must be at least 1, not 0"):
        Directory(replica_limit=0)


def test_a_lease_holds_until_it_runs_out():
    held = directory(committed(A, 0, 1))
    held.handle(lease(A, 0, duration_s=5.0), now_s=1.0)
    assert held.next_wakeup_s() == 6.0
    held.handle(TimePassed(), now_s=5.9)
    assert held.is_leased(A, KEYS[0])
    held.handle(TimePassed(), now_s=6.0)
    assert not held.is_leased(A, KEYS[0])
    assert held.next_wakeup_s() is None


def test_a_lease_ended_early_leaves_no_wakeup_behind():
    held = directory(committed(A, 0), lease(A, 0), EndLease(A, REQUEST))
    assert not held.is_leased(A, KEYS[0])
    assert held.next_wakeup_s() is None
    assert held.stat().leases == 0


def test_a_lease_granted_anew_runs_for_its_new_time():
    held = directory(committed(A, 0), lease(A, 0, duration_s=5.0))
    held.handle(lease(A, 0, duration_s=5.0), now_s=3.0)
    held.handle(TimePassed(), now_s=5.0)
    assert held.is_leased(A, KEYS[0])
    assert held.next_wakeup_s() == 8.0


def test_a_block_leased_twice_is_leased_until_the_second_lease_ends():
    other = GrantLease(A, RequestId("other"), (KEYS[0],), 10.0)
    held = directory(committed(A, 0), lease(A, 0), other, EndLease(A, REQUEST))
    assert held.is_leased(A, KEYS[0])


def test_a_lost_node_ends_its_leases():
    held = directory(committed(A, 0), lease(A, 0), NodeLost(A))
    assert held.stat().leases == 0
    assert held.next_wakeup_s() is None


def test_an_eviction_of_a_leased_block_is_counted():
    held = directory(committed(A, 0, 1), lease(A, 0), evicted(A, 0, 1))
    assert held.stat().broken_leases == 1


@dataclass
class Model:
    """The directory as plain sets, to compare with."""

    held: dict[NodeId, set[tuple[Tier, BlockKey]]] = field(default_factory=dict)

    def handle(self, event: object) -> None:
        match event:
            case NodeJoined(node=node):
                self.held[node] = set()
            case NodeLost(node=node):
                self.held.pop(node, None)
            case BlocksCommitted(node=node, tier=tier, keys=keys) if node in self.held:
                self.held[node] |= {(tier, key) for key in keys}
            case BlocksEvicted(node=node, tier=tier, keys=keys) if node in self.held:
                self.held[node] -= {(tier, key) for key in keys}

    def longest_prefix(self) -> dict[NodeId, int]:
        prefixes = {}
        for node, held in self.held.items():
            keys = {key for _, key in held}
            count = next((i for i, key in enumerate(KEYS) if key not in keys), len(KEYS))
            if count:
                prefixes[node] = count
        return prefixes


nodes = st.sampled_from(NODES)
indices = st.lists(st.integers(0, len(KEYS) - 1), unique=True).map(tuple)
tiers = st.sampled_from([Tier.DRAM, Tier.SSD])
events = st.one_of(
    st.builds(joined, nodes),
    st.builds(NodeLost, nodes),
    st.builds(lambda n, i, t: committed(n, *i, tier=t), nodes, indices, tiers),
    st.builds(lambda n, i, t: evicted(n, *i, tier=t), nodes, indices, tiers),
    st.builds(lambda n, i, d: lease(n, *i, duration_s=d), nodes, indices, st.floats(0.1, 9)),
    st.builds(lambda n: EndLease(n, REQUEST), nodes),
    st.just(TimePassed()),
)


@settings(max_examples=300)
@given(st.lists(events, max_size=40))
def test_the_directory_always_agrees_with_plain_sets(sequence: list[object]):
    held, model = Directory(), Model()
    for now_s, event in enumerate(sequence):
        held.handle(event, now_s=float(now_s))
        model.handle(event)
        assert held.longest_prefix(KEYS) == model.longest_prefix()
        assert held.stat().replicas == sum(len(keys) for keys in model.held.values())
        assert held.stat().blocks == len({k for keys in model.held.values() for _, k in keys})
        wakeup_s = held.next_wakeup_s()
        assert (wakeup_s is not None) == (held.stat().leases > 0)
        assert wakeup_s is None or wakeup_s > now_s
    for node in NODES:
        held.handle(NodeLost(node), now_s=1e9)
    assert (held.stat().blocks, held.stat().replicas, held.stat().leases) == (0, 0, 0)


def test_a_key_that_a_node_names_twice_lies_where_it_was_named_last():
    named = tuple(KEYS[index] for index in (0, 1, 0, 2))
    slots = tuple(SlotIndex(slot) for slot in (5, 6, 7, 8))
    held = directory(BlocksCommitted(A, Tier.DRAM, named, slots, (1, 3, 5, 7)))
    places = [held.replicas(key)[0] for key in KEYS[:3]]
    assert [(place.slot, place.generation) for place in places] == [(7, 5), (6, 3), (8, 7)]
    assert (held.stat().blocks, held.stat().replicas) == (3, 3)
    held.handle(evicted(A, 2, 1, 0), now_s=0.0)
    assert (held.stat().blocks, held.stat().replicas) == (0, 0)


def test_a_part_of_a_chain_lies_where_the_whole_was_said_to_lie():
    slots = tuple(SlotIndex(slot) for slot in range(10, 16))
    whole = BlocksCommitted(A, Tier.DRAM, KEYS, slots, tuple(range(1, 13, 2)))
    held = directory(whole, committed(B, 0), evicted(A, 5, 4, 3))
    assert [(b.slot, b.generation) for b in held.placed(A, KEYS)] == [(10, 1), (11, 3), (12, 5)]
    assert [b.slot for b in held.placed(A, KEYS[2:])] == [12]
    held.handle(evicted(A, 2), now_s=0.0)
    assert held.replicas(KEYS[1]) == (Replica(A, Tier.DRAM, SlotIndex(11), 3),)
