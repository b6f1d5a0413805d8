"""Laws of sharing a pull out: no byte is lost or fetched twice, whatever the workers do."""

import itertools

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from snowskin.transfer.slicing import (
    BATCH_LEAST_BYTES,
    RANGES_LIMIT,
    Batch,
    Coverage,
    Range,
    SliceBoard,
    worker_count,
)


class PullByManyHands(RuleBasedStateMachine):
    """Workers take batches and account for them in any way and order."""

    def __init__(self):
        super().__init__()
        self.block_bytes, self.blocks = 3 * BATCH_LEAST_BYTES + 777, 7
        self.board = SliceBoard(self.blocks, self.block_bytes, slice_bytes=65536)
        self.held = []
        self.landed = {block: [] for block in range(self.blocks)}
        self.whole = set()

    @rule(workers=st.integers(1, 5))
    def take(self, workers):
        batch = self.board.take(workers)
        if batch is None:
            assert self.board.queued_bytes == 0
            return
        assert batch.ranges
        assert batch.follow or batch.size_bytes <= self.board.total_bytes
        for one in batch.ranges:
            assert 0 <= one.start < one.stop <= self.block_bytes
            assert not self.board.is_dropped(one.block)
        self.held.extend(batch.ranges)

    @rule(data=st.data(), outcome=st.sampled_from(["land", "part", "back", "defer", "drop"]))
    def settle(self, data, outcome):
        if not self.held:
            return
        one = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if outcome == "part" and one.stop - one.start > 1:
            cut = data.draw(st.integers(one.start + 1, one.stop - 1))
            self.land(one._replace(stop=cut))
            self.board.give_back([one._replace(start=cut)])
        elif outcome == "back":
            self.board.give_back([one._replace(attempt=one.attempt + 1)])
        elif outcome == "defer":
            self.board.defer([one])
        elif outcome == "drop":
            self.board.drop(one)
        else:
            self.land(one)

    def land(self, one):
        if self.board.land(one.block, one.stop - one.start):
            self.whole.add(one.block)
        self.landed[one.block].append((one.start, one.stop))

    @invariant()
    def every_byte_is_in_one_place(self):
        board = self.board
        held_bytes = sum(one.stop - one.start for one in self.held)
        assert board.in_flight_bytes == held_bytes
        assert (
            board.queued_bytes + board.in_flight_bytes + board.landed_bytes + board.dropped_bytes
            == board.total_bytes
        )
        assert board.is_open == (board.queued_bytes + held_bytes > 0)

    @invariant()
    def nothing_lands_twice(self):
        for block, pieces in self.landed.items():
            ordered = sorted(pieces)
            for (_, stop), (start, _) in itertools.pairwise(ordered):
                assert stop <= start
            all_of_it = sum(stop - start for start, stop in pieces) == self.block_bytes
            assert (block in self.whole) == all_of_it

    def teardown(self):
        """However it stood, workers that succeed bring all that was not dropped."""
        self.board.give_back(self.held)
        for workers in (3, 3, 1):
            while (batch := self.board.take(workers)) is not None:
                for one in batch.ranges:
                    self.land(one)
        assert not self.board.is_open
        for block in range(self.blocks):
            assert block in self.whole or self.board.is_dropped(block)


TestPullByManyHands = PullByManyHands.TestCase


def test_a_lone_worker_takes_all_at_once_and_follows():
    board = SliceBoard(3, 100, slice_bytes=65536)
    whole = tuple(Range(block, 0, 100) for block in range(3))
    assert board.take(1) == Batch(whole, follow=True, size_bytes=300)
    assert board.take(1) is None


def test_a_batch_has_a_bounded_number_of_ranges():
    board = SliceBoard(3 * RANGES_LIMIT // 2, 10, slice_bytes=65536)
    first = board.take(1)
    board.defer(first.ranges)
    batches = [board.take(1), board.take(1)]
    assert [len(batch.ranges) for batch in batches] == [RANGES_LIMIT, RANGES_LIMIT // 2]
    assert board.take(1) is None


def test_a_block_that_fits_its_batch_is_not_split():
    board = SliceBoard(40, 700_000, slice_bytes=65536)
    while (batch := board.take(4)) is not None:
        assert not batch.follow
        assert all((one.start, one.stop) == (0, 700_000) for one in batch.ranges)
        for one in batch.ranges:
            board.land(one.block, 700_000)


def test_a_block_too_large_for_a_batch_is_split_between_slices():
    board = SliceBoard(1, 16 << 20, slice_bytes=1000)
    cuts = []
    while (batch := board.take(2)) is not None:
        cuts += [one.stop for one in batch.ranges]
    assert len(cuts) > 4
    assert all(cut % 1000 == 0 for cut in cuts[:-1])
    assert cuts[-1] == 16 << 20


def test_what_is_deferred_is_shared_out_evenly_among_the_workers():
    board = SliceBoard(9, 1 << 20, slice_bytes=65536)
    while (batch := board.take(3)) is not None and not batch.follow:
        board.defer(batch.ranges)
    shares = [batch]
    shares += [board.take(2), board.take(1)]
    assert [len(share.ranges) for share in shares] == [3, 3, 3]
    assert all(share.follow for share in shares)
    assert board.take(1) is None


@given(st.integers(1, 1 << 40), st.integers(1, 64), st.integers(1, 1 << 30))
def test_there_is_a_worker_for_each_way_that_is_worth_it(total_bytes, ways, least_bytes):
    count = worker_count(total_bytes, ways, least_bytes)
    assert 1 <= count <= ways
    assert count == 1 or count * least_bytes <= total_bytes


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_leading_bytes_are_known_in_whatever_order_pieces_land(lengths, rng):
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    pieces = list(itertools.pairwise(bounds))
    rng.shuffle(pieces)
    coverage, here = Coverage(), set()
    for start, stop in pieces:
        here.update(range(start, stop))
        leading = next(at for at in range(bounds[-1] + 1) if at not in here)
        assert coverage.add(start, stop) == leading
    assert coverage.leading_bytes == bounds[-1]
