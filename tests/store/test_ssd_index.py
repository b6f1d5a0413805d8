"""Laws of the index: places never overlap, the capacity holds, and there is always a way on."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snowskin.store.eviction import make_policy
from snowskin.store.ssd.index import LIVE_RATIO, Entry, SsdIndex
from snowskin.store.ssd.record import PAGE_BYTES, SEGMENT_HEADER_PAGES

SEGMENT_PAGES = 12
SEGMENT_LIMIT = 5
USABLE_PAGES = SEGMENT_PAGES - SEGMENT_HEADER_PAGES
KEYS = st.integers(0, 30).map(lambda number: number.to_bytes(16, "little"))


class IndexLaws(RuleBasedStateMachine):
    """Does what the writer does, without a disk; a file system has room for so many files."""

    policy = "lru"

    def __init__(self):
        super().__init__()
        self.index = SsdIndex(
            segment_pages=SEGMENT_PAGES,
            segment_limit=SEGMENT_LIMIT,
            policy=make_policy(self.policy),
            promote_after=3,
        )
        self.disk_files = SEGMENT_LIMIT
        self.epochs = dict.fromkeys(range(SEGMENT_LIMIT), 0)
        self.known = set()
        self.hits = {}

    def create_file(self):
        number = self.index.unused_number()
        if number is None:
            assert self.index.segment_count == self.index.segment_limit
            return False
        if self.index.segment_count >= self.disk_files:
            self.index.growable = False
            return False
        self.index.growable = True
        self.index.add_segment(number, free=True)
        return True

    def next_file(self, wanted_pages):
        index = self.index
        index.seal()
        if not index.has_free and not self.create_file():
            segment = index.emptiest()
            for entry in index.entries_of(segment):
                index.drop(entry)
            self.void(segment)
        index.open_free()
        if index.has_free or self.create_file():
            return
        while (segment := index.emptiest()) is not None:
            if index.live_pages_of(segment) + wanted_pages <= index.room_pages:
                for entry in index.entries_of(segment):
                    index.move(entry, self.placed(entry.key, entry.value_bytes))
                self.void(segment)
                return
            assert index.evict() is not None

    def void(self, segment):
        self.epochs[segment] += 1
        self.index.recycle(segment)

    def placed(self, key, value_bytes):
        segment = self.index.open_segment
        pages = 1 + -(-value_bytes // PAGE_BYTES)
        page = self.index.append(pages)
        return Entry(key, segment, self.epochs[segment], page, value_bytes, 0, 0)

    @rule(key=KEYS, value_pages=st.integers(0, USABLE_PAGES - 1))
    def write(self, key, value_pages):
        index = self.index
        if index.get(key) is not None:
            return
        pages = 1 + value_pages
        if index.room_pages < pages:
            self.next_file(pages)
        assert index.room_pages >= pages
        while index.is_over_limit(pages):
            assert index.evict() is not None
        index.add(self.placed(key, value_pages * PAGE_BYTES))
        self.hits[key] = 0

    @rule(key=KEYS)
    def read(self, key):
        if self.index.get(key) is not None:
            self.hits[key] += 1
            assert self.index.count_hit(key) == (self.hits[key] % 3 == 0)

    @rule(key=KEYS)
    def remove(self, key):
        entry = self.index.get(key)
        if entry is not None:
            self.index.drop(entry)

    @precondition(lambda self: self.index.segment_count >= 1)
    @rule(room=st.integers(1, SEGMENT_LIMIT))
    def disk_room_changes(self, room):
        self.disk_files = max(room, self.index.segment_count)

    @rule()
    def report(self):
        stored, dropped = self.index.drain_changes()
        held = {entry.key for entry in self.index.entries()}
        assert set(stored) == held - self.known
        assert set(dropped) == self.known - held
        self.known = held
        assert self.index.drain_changes() == ((), ())

    @invariant()
    def places_are_disjoint_and_within_their_files(self):
        entries = self.index.entries()
        assert len(entries) == len(self.index)
        taken = {}
        for entry in entries:
            assert entry.epoch == self.epochs[entry.segment]
            assert entry.page >= SEGMENT_HEADER_PAGES
            for page in range(entry.page, entry.page + entry.page_count):
                assert page < SEGMENT_PAGES
                assert taken.setdefault((entry.segment, page), entry) is entry
        assert self.index.live_pages == len(taken)
        for segment in {entry.segment for entry in entries}:
            live = sum(at[0] == segment for at in taken)
            assert self.index.live_pages_of(segment) == live

    @invariant()
    def the_capacity_holds(self):
        assert self.index.segment_count <= SEGMENT_LIMIT
        limit = LIVE_RATIO * (SEGMENT_LIMIT - 1) * USABLE_PAGES
        assert self.index.live_pages <= max(limit, USABLE_PAGES)


class LfuIndexLaws(IndexLaws):
    policy = "lfu"


class LengthAwareIndexLaws(IndexLaws):
    policy = "length-aware"


TestLruIndexLaws = IndexLaws.TestCase
TestLfuIndexLaws = LfuIndexLaws.TestCase
TestLengthAwareIndexLaws = LengthAwareIndexLaws.TestCase
TestLruIndexLaws.settings = settings(max_examples=60, stateful_step_count=60)
TestLfuIndexLaws.settings = TestLruIndexLaws.settings
TestLengthAwareIndexLaws.settings = TestLruIndexLaws.settings


def test_values_that_die_in_the_order_in_which_they_came_are_never_moved():
    laws = IndexLaws()
    laws.index = SsdIndex(
        segment_pages=SEGMENT_PAGES, segment_limit=7, policy=make_policy("lru"), promote_after=3
    )
    laws.epochs = dict.fromkeys(range(7), 0)
    laws.disk_files = 7
    for number in range(500):
        if laws.index.room_pages < 2:
            laws.next_file(2)
            assert laws.index.next_page == SEGMENT_HEADER_PAGES, "something was moved"
        while laws.index.is_over_limit(2):
            laws.index.evict()
        laws.index.add(laws.placed(number.to_bytes(16, "little"), PAGE_BYTES))
    assert len(laws.index) == int(LIVE_RATIO * 6 * USABLE_PAGES) // 2
