"""Whatever the peer's slots are, a pull brings exactly what is whole, and all of it right."""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from snowskin.transfer.engine import BlockPull, TransferEngine
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.messenger import MessengerProcess

from .conftest import when_ready

SLOTS = 12
KEY = b"laws"
SLOT = st.fixed_dictionaries(
    {
        "parts": st.integers(0, 3),
        "sealed": st.booleans(),
        "retired": st.booleans(),
        "reused": st.booleans(),
    }
)


class World:
    def __init__(self, part_bytes):
        self.layout = SegmentLayout(SLOTS, 3 * part_bytes, 3)
        self.source = Segment.create(self.layout)
        self.own = Segment.create(self.layout)
        self.messenger = MessengerProcess.start(self.source, node="peer", cluster_key=KEY)
        self.engines = {
            name: TransferEngine(self.own, transport=name, cluster_key=KEY)
            for name in ("shm", "tcp")
        }
        self.rng = np.random.default_rng(part_bytes)

    def begin(self, segment, slot):
        if segment.generation[slot] % 2:
            segment.retire(slot)
        return segment.begin(slot, None)

    def fill(self, slot):
        self.source.data[slot] = self.rng.integers(0, 256, self.source.data.shape[1:], np.uint8)

    def close(self):
        for engine in self.engines.values():
            engine.close()
        self.messenger.stop()
        self.source.close()
        self.own.close()


@pytest.fixture(scope="module", params=[1, 1000, 65_537])
def world(request):
    made = World(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(slots=st.lists(SLOT, min_size=1, max_size=SLOTS), seed=st.integers(0, 2**16))
def test_a_pull_brings_exactly_what_is_whole(world, transport, slots, seed):
    rng = np.random.default_rng(seed)
    there, here = rng.permutation(SLOTS), rng.permutation(SLOTS)
    blocks, expected = [], []
    for position, slot in enumerate(slots):
        remote, local = int(there[position]), int(here[position])
        blocks.append(BlockPull(remote, world.begin(world.source, remote), local))
        world.begin(world.own, local)
        world.own.data[local] = 0
        world.fill(remote)
        if slot["sealed"]:
            world.source.seal(remote)
        else:
            world.source.publish(remote, slot["parts"])
        parts = 3 if slot["sealed"] else slot["parts"]
        if slot["retired"]:
            world.source.retire(remote)
            if slot["reused"]:
                world.source.begin(remote, None)
                world.fill(remote)
                world.source.seal(remote)
        expected.append(None if slot["retired"] else parts)
    cancelled = threading.Event()
    # What is not whole there would be waited for in vain: stop when all is here that can come.
    slots_here = [block.local_slot for block in blocks]
    parts_here = [parts or 0 for parts in expected]
    watch = when_ready(world.own, slots_here, parts_here, cancelled.set)
    result = world.engines[transport].pull(
        world.messenger.peer, blocks, timeout_s=30, cancelled=cancelled
    )
    watch.join()
    assert result.landed == tuple(parts == 3 for parts in expected)
    assert result.checksum_failures == 0
    for block, parts in zip(blocks, expected, strict=True):
        assert world.own.parts_ready[block.local_slot] == (parts or 0)
        assert np.array_equal(
            world.own.data[block.local_slot, : parts or 0],
            world.source.data[block.remote_slot, : parts or 0],
        )
