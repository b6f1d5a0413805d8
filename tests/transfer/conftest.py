import threading
import time

import numpy as np
import pytest

from snowskin.transfer.engine import BlockPull, TransferEngine
from snowskin.transfer.memory import Segment, SegmentLayout

from .owner import KEY, Owner, content

LAYOUT = SegmentLayout(slot_count=24, slot_bytes=5 * 4099, part_count=5)


def when_ready(segment, slots, parts, act):
    """A started thread that acts once so many parts of the slots are ready (or after 20 s)."""

    def watch():
        deadline_s = time.monotonic() + 20
        while (segment.parts_ready[slots] < parts).any() and time.monotonic() < deadline_s:
            time.sleep(0.0005)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


class Reader:
    """A node that pulls: its own segment and engines over it."""

    def __init__(self, layout=LAYOUT):
        self.layout = layout
        self.segment = Segment.create(layout)
        self._engines = []

    def engine(self, transport, cluster_key=KEY, **more):
        made = TransferEngine(self.segment, transport=transport, cluster_key=cluster_key, **more)
        self._engines.append(made)
        return made

    def blocks(self, generations, slots=None):
        """Pulls of the owner's first slots (or ``slots``) into fresh slots of our own."""
        slots = range(len(generations)) if slots is None else slots
        for slot in range(len(generations)):
            if self.segment.generation[slot] % 2:
                self.segment.retire(slot)
            self.segment.begin(slot, None)
            self.segment.data[slot] = 0
        pairs = zip(slots, generations, strict=True)
        return [BlockPull(there, gen, here) for here, (there, gen) in enumerate(pairs)]

    def assert_right(self, blocks, result, peer_layout=None):
        """Every landed block has the right bytes, all published."""
        layout = peer_layout or self.layout
        for block, landed in zip(blocks, result.landed, strict=True):
            if landed:
                wanted = content(block.remote_slot, block.remote_generation, layout)
                assert np.array_equal(self.segment.data[block.local_slot], wanted)
                assert self.segment.parts_ready[block.local_slot] == layout.part_count

    def close(self):
        for engine in self._engines:
            engine.close()
        self.segment.close()


@pytest.fixture(scope="module")
def owners():
    """The owners of a module's tests: one serves until a test has killed it."""
    made = []
    yield made
    for owner in made:
        owner.close()


@pytest.fixture
def owner(owners):
    """A living owner whose slots are all free."""
    if not owners or not owners[-1].is_whole:
        owners.append(Owner(LAYOUT))
    owners[-1].tell("clear")
    return owners[-1]


@pytest.fixture
def reader():
    made = Reader()
    yield made
    made.close()


@pytest.fixture(params=["shm", "tcp"])
def transport(request):
    return request.param
