"""Laws of the allocator, against the plainest model: a list of who has which byte."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snowskin.store.objects.allocator import (
    PIECE_LEAST_BYTES,
    PIECES_LIMIT,
    ExtentAllocator,
)

GRANULE = 1024
GRANULES = 600


class AllocatorLaws(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocator = ExtentAllocator(GRANULES * GRANULE + 77, granule_bytes=GRANULE)
        self.owner = [None] * GRANULES
        self.taken = {}
        self.number = 0

    @rule(size=st.one_of(st.integers(0, 4 * GRANULE), st.integers(0, 700 * GRANULE)))
    def allocate(self, size):
        free = self.owner.count(None)
        extents = self.allocator.allocate(size)
        wanted = max(1, -(-size // GRANULE))
        if extents is None:
            assert wanted > self.largest_run()
            fine = [run for run in self.runs() if run * GRANULE >= PIECE_LEAST_BYTES]
            assert wanted > free or wanted > sum(fine)
            return
        assert sum(extent.length_bytes for extent in extents) == wanted * GRANULE
        assert len(extents) <= PIECES_LIMIT
        if wanted <= self.largest_run():
            assert len(extents) == 1
        for extent in extents[:-1]:
            assert extent.length_bytes >= PIECE_LEAST_BYTES
        for granule in granules(extents):
            assert self.owner[granule] is None, "handed out twice"
            self.owner[granule] = self.number
        self.taken[self.number] = extents
        self.number += 1

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data):
        number = data.draw(st.sampled_from(sorted(self.taken)))
        extents = self.taken.pop(number)
        self.allocator.free(extents)
        for granule in granules(extents):
            self.owner[granule] = None

    @invariant()
    def what_is_free_is_known_and_merged(self):
        stat = self.allocator.stat()
        runs = self.runs()
        assert stat.free_bytes == sum(runs) * GRANULE
        assert stat.free_extents == len(runs)
        assert 0 <= stat.fragmentation_ratio <= 1

    def runs(self):
        text = "".join("." if owner is None else "#" for owner in self.owner)
        return [len(run) for run in text.split("#") if run]

    def largest_run(self):
        return max(self.runs(), default=0)


def granules(extents):
    for extent in extents:
        assert extent.offset % GRANULE == extent.length_bytes % GRANULE == 0
        first = extent.offset // GRANULE
        yield from range(first, first + extent.length_bytes // GRANULE)


TestAllocatorLaws = AllocatorLaws.TestCase
TestAllocatorLaws.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_large_object_fits_into_what_small_ones_left_here_and_there():
    allocator = ExtentAllocator(64 << 20, granule_bytes=GRANULE)
    blocks = [allocator.allocate(1 << 20) for _ in range(64)]
    for block in blocks[::2]:
        allocator.free(block)
    assert allocator.stat().largest_free_bytes == 1 << 20
    extents = allocator.allocate(16 << 20)
    assert extents is not None
    assert len(extents) == 16
    assert allocator.allocate(17 << 20) is None
    assert allocator.stat().free_bytes == 16 << 20
