import os

import pytest

from snowskin.store.blocks import BlockStore
from snowskin.store.pool import PoolFull
from snowskin.terms.errors import InvalidInput
from snowskin.terms.events import BlocksCommitted, BlocksEvicted, PlacedBlock
from snowskin.terms.ids import BlockKey, NodeId, Tier
from snowskin.transfer.memory import Segment, SegmentLayout

NODE = NodeId("prefill-0")


def key(number):
    return BlockKey(number.to_bytes(16, "little"))


@pytest.fixture
def store():
    segment = Segment.create(SegmentLayout(slot_count=4, slot_bytes=64, part_count=2))
    yield BlockStore(segment, node=NODE)
    segment.close()


def committed(placed):
    columns = zip(*((block.key, block.slot, block.generation) for block in placed), strict=True)
    return BlocksCommitted(NODE, Tier.DRAM, *columns)


def commit_chain(store, numbers):
    keys = [key(number) for number in numbers]
    placed = store.reserve(keys)
    for block in placed:
        store.segment.data[block.slot] = block.key[0]
    slots = [block.slot for block in placed]
    store.commit(slots, keys)
    store.release(slots)
    return placed


def test_blocks_are_found_once_they_are_committed_and_not_before(store):
    keys = [key(1), key(2)]
    placed = store.reserve(keys)
    assert placed == (PlacedBlock(keys[0], 0, 1), PlacedBlock(keys[1], 1, 1))
    assert store.match(keys) == 0
    assert store.commit([0, 1], keys) == (True, True)
    assert store.match([*keys, key(3)]) == 2
    assert store.pin([*keys, key(3)]) == placed
    assert store.drain_events() == (committed(placed),)
    assert store.drain_events() == ()


def test_a_full_pool_reserves_all_or_nothing(store):
    commit_chain(store, [1, 2])
    pinned = store.pin([key(1)])
    assert store.reserve([None] * 4) == PoolFull(wanted=4, obtainable=3)
    assert store.match([key(1), key(2)]) == 2
    assert len(store.reserve([None] * 3)) == 3
    assert store.match([key(1), key(2)]) == 1
    store.release([block.slot for block in pinned])


def test_an_evicted_slot_changes_generation_before_its_next_use(store):
    commit_chain(store, [1, 2, 3, 4])
    store.drain_events()
    (block,) = store.reserve([key(9)])
    assert (block.slot, block.generation) == (3, 3)
    assert int(store.segment.generation[3]) == 3
    assert store.segment.parts_ready[3] == 0
    assert store.drain_events() == (BlocksEvicted(NODE, Tier.DRAM, (key(4),)),)


def test_a_chain_loses_its_tail_first(store):
    commit_chain(store, [1, 2, 3, 4])
    store.reserve([None, None])
    assert store.match([key(1), key(2), key(3), key(4)]) == 2


def test_a_key_that_is_held_already_keeps_its_first_copy(store):
    (first,) = commit_chain(store, [1])
    (private,) = store.reserve([None])
    assert store.commit([private.slot], [key(1)]) == (False,)
    assert store.pin([key(1)]) == (first,)
    store.release([private.slot])
    assert store.stat().free_slots == 3
    assert store.stat().duplicate_total == 1


def test_a_private_block_has_a_random_key_and_is_free_after_release(store):
    (one,), (two,) = store.reserve([None]), store.reserve([None])
    assert one.key != two.key
    store.release([one.slot, two.slot])
    assert store.stat().free_slots == 4
    assert int(store.segment.generation[one.slot]) == one.generation + 1


def test_a_lease_keeps_blocks_until_it_ends_or_expires(store):
    commit_chain(store, [1, 2, 3, 4])
    assert store.grant_lease("req-1", [key(1), key(2), key(7)], until_s=10.0) == 2
    assert store.grant_lease("req-2", [key(1), key(2), key(3), key(4)], until_s=20.0) == 4
    assert store.reserve([None]) == PoolFull(wanted=1, obtainable=0)
    assert store.end_lease("req-2")
    assert not store.end_lease("req-2")
    assert len(store.reserve([None])) == 1
    assert store.match([key(1), key(2), key(3), key(4)]) == 3
    assert store.expire(9.9) == ()
    assert store.expire(10.0) == ("req-1",)
    assert store.stat().evictable_slots == 3


def test_what_is_held_can_be_told_anew(store):
    placed = commit_chain(store, [1, 2])
    assert store.held() == committed(placed)


def test_a_reader_of_a_segment_cannot_be_its_store(store):
    reader = Segment.attach(os.dup(store.segment.fd), store.segment.layout)
    with pytest.raises(InvalidInput):
        BlockStore(reader, node=NODE)
    reader.close()
