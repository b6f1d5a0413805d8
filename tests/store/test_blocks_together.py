"""The store among threads and among nodes: bytes, leases, transfer and directory together."""

import random
import threading

import numpy as np
import pytest

from snowskin.store.blocks import BlockStore
from snowskin.store.directory import Directory
from snowskin.store.pool import PoolFull
from snowskin.terms.events import NodeJoined
from snowskin.terms.ids import BlockKey, NodeId, Role
from snowskin.transfer.engine import BlockPull, TransferEngine
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.messenger import MessengerProcess

CLUSTER_KEY = b"key of the store's tests"
LAYOUT = SegmentLayout(slot_count=32, slot_bytes=4 * 1024, part_count=4)


def key_of(chain, depth):
    return BlockKey(bytes([chain, depth]) * 8)


def chain_of(chain, length):
    return [key_of(chain, depth) for depth in range(length)]


def write(store, key, slot):
    """Fill a block with bytes that follow from its key, layer after layer."""
    for part in range(LAYOUT.part_count):
        store.segment.data[slot, part] = key[0] + 3 * key[1] + part
        store.publish([slot], part + 1)


def is_right(segment, key, slot):
    wanted = np.arange(LAYOUT.part_count) + key[0] + 3 * key[1]
    return np.array_equal(segment.data[slot], np.repeat(wanted[:, None], 1024, axis=1))


class Node:
    def __init__(self, name):
        self.segment = Segment.create(LAYOUT)
        self.store = BlockStore(self.segment, node=NodeId(name))

    def prefill(self, keys):
        """Reuse what is held and write the rest, as an engine does; False if there is no room."""
        pinned = self.store.pin(keys)
        rest = keys[len(pinned) :]
        reserved = self.store.reserve(rest)
        if isinstance(reserved, PoolFull):
            self.store.release([block.slot for block in pinned])
            return False
        for block in reserved:
            write(self.store, block.key, block.slot)
        slots = [block.slot for block in reserved]
        self.store.commit(slots, keys, depth=len(pinned))
        right = all(is_right(self.segment, block.key, block.slot) for block in pinned)
        assert right, "a pinned block changed"
        self.store.release([block.slot for block in (*pinned, *reserved)])
        return True


@pytest.fixture
def node():
    made = Node("prefill-0")
    yield made
    made.segment.close()


def directory_for(*nodes):
    directory = Directory()
    for name in nodes:
        joined = NodeJoined(
            node=name,
            role=Role.PREFILL,
            block_count=LAYOUT.slot_count,
            sequence_limit=1,
            device_tokens=1,
        )
        directory.handle(joined, now_s=0.0)
    return directory


@pytest.mark.parametrize("eviction", ["lru", "lfu", "length-aware"])
def test_threads_that_reuse_write_and_evict_leave_every_block_right(eviction):
    node = Node("prefill-0")
    node.store = BlockStore(node.segment, node=node.store.node, eviction=eviction)
    directory = directory_for(node.store.node)
    done, stop = [], threading.Event()

    def work(seed):
        rng = random.Random(seed)
        for turn in range(150):
            keys = chain_of(rng.randrange(10), rng.randrange(1, 7))
            if turn % 5 == 0:
                node.store.grant_lease(f"reader-{seed}", keys, until_s=turn + 2.0)
            done.append(node.prefill(keys))
            node.store.expire(float(turn))
        node.store.end_lease(f"reader-{seed}")

    def tell():
        while not stop.is_set():
            for event in node.store.drain_events():
                directory.handle(event, now_s=0.0)

    teller = threading.Thread(target=tell)
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in (teller, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    teller.join()
    for event in node.store.drain_events():
        directory.handle(event, now_s=0.0)
    assert sum(done) > 300
    held = node.store.held().blocks
    assert all(is_right(node.segment, block.key, block.slot) for block in held)
    stat = node.store.stat()
    assert (stat.reserved_slots, stat.lease_count) == (0, 0)
    assert stat.evictable_slots == stat.committed_slots == len(held)
    assert stat.evicted_total > 0
    assert directory.stat().replicas == len(held)
    for block in held:
        (replica,) = directory.replicas(block.key)
        assert (replica.slot, replica.generation) == (block.slot, block.generation)
    node.segment.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_prefix_is_fetched_from_a_peer_by_what_the_directory_says(node, transport):
    reader = Node("prefill-1")
    keys = chain_of(3, 6)
    assert node.prefill(keys)
    directory = directory_for(node.store.node, reader.store.node)
    for event in node.store.drain_events():
        directory.handle(event, now_s=0.0)
    assert directory.longest_prefix(keys)[node.store.node] == 6
    node.store.grant_lease("fetch", keys, until_s=10.0)
    places = [directory.replicas(key)[0] for key in keys]
    reserved = reader.store.reserve(keys)
    pulls = [
        BlockPull(place.slot, place.generation, block.slot)
        for place, block in zip(places, reserved, strict=True)
    ]
    messenger = MessengerProcess.start(node.segment, node=node.store.node, cluster_key=CLUSTER_KEY)
    engine = TransferEngine(reader.segment, transport=transport, cluster_key=CLUSTER_KEY)
    result = engine.pull(messenger.peer, pulls, timeout_s=30)
    assert all(result.landed)
    assert reader.store.commit([block.slot for block in reserved], keys) == (True,) * 6
    for ours, theirs in zip(reserved, places, strict=True):
        assert is_right(reader.segment, ours.key, ours.slot)
        assert reader.segment.checksum[ours.slot] == node.segment.checksum[theirs.slot]
    engine.close()
    messenger.stop()
    reader.segment.close()


def test_a_block_evicted_before_it_is_fetched_is_a_miss(node):
    reader = Node("prefill-1")
    keys = chain_of(1, 2)
    node.prefill(keys)
    (batch,) = node.store.drain_events()
    for chain in range(2, 10):
        node.prefill(chain_of(chain, 4))
    assert node.store.match(keys) == 0
    reserved = reader.store.reserve(keys)
    pulls = [
        BlockPull(there.slot, there.generation, here.slot)
        for there, here in zip(batch.blocks, reserved, strict=True)
    ]
    messenger = MessengerProcess.start(node.segment, node=node.store.node, cluster_key=CLUSTER_KEY)
    engine = TransferEngine(reader.segment, transport="auto", cluster_key=CLUSTER_KEY)
    assert engine.pull(messenger.peer, pulls, timeout_s=30).landed == (False, False)
    engine.close()
    messenger.stop()
    reader.segment.close()
