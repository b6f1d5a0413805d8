"""Laws of the ring: order, bounds, and no byte of a value that is in use is ever given away."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snowskin.store.ssd.queue import WriteQueue
from snowskin.store.ssd.record import PAGE_BYTES, record_pages

LIMIT_PAGES = 16


class QueueLaws(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.queue = WriteQueue(LIMIT_PAGES * PAGE_BYTES)
        self.waiting = []
        self.pinned = []
        self.count = 0

    def in_use(self):
        return self.waiting + [pending for pending in self.pinned if pending not in self.waiting]

    @rule(value_bytes=st.integers(0, (LIMIT_PAGES - 1) * PAGE_BYTES))
    def reserve(self, value_bytes):
        key = str(self.count).encode()
        pending = self.queue.reserve(key, value_bytes, 0, 0)
        if pending is None:
            assert self.in_use(), "an empty ring has room for any value within its limit"
            return
        self.count += 1
        assert pending.sequence == self.count
        pending.record[:] = self.count % 251
        assert len(pending.value) == value_bytes
        self.waiting.append(pending)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def fill(self, data):
        data.draw(st.sampled_from(self.waiting)).filled = True

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def pin(self, data):
        pending = data.draw(st.sampled_from(self.waiting))
        self.queue.pin(pending)
        self.pinned.append(pending)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        pending = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(pending)
        self.queue.unpin(pending)

    @rule(limit_pages=st.integers(1, LIMIT_PAGES))
    def settle(self, limit_pages):
        batch = self.queue.batch(limit_pages * PAGE_BYTES)
        assert list(batch) == self.waiting[: len(batch)]
        assert all(pending.filled for pending in batch)
        assert bool(batch) == bool(self.waiting and self.waiting[0].filled)
        if not batch:
            return
        pages = sum(pending.page_count for pending in batch)
        assert len(batch) == 1 or pages <= limit_pages
        records = self.queue.records(batch)
        expected = b"".join(pending.record.tobytes() for pending in batch)
        assert records.tobytes() == expected
        self.queue.settle(batch)
        del self.waiting[: len(batch)]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        pending = data.draw(st.sampled_from(self.waiting))
        self.queue.cancel(pending)
        assert self.queue.find(pending.key) is None

    @invariant()
    def bytes_in_use_are_untouched_and_within_the_bound(self):
        for pending in self.in_use():
            assert (pending.record == pending.sequence % 251).all()
        assert self.queue.queued_bytes <= LIMIT_PAGES * PAGE_BYTES
        for pending in self.waiting:
            found = self.queue.find(pending.key)
            assert found is (None if pending.cancelled else pending)
        oldest = self.waiting[0].sequence if self.waiting else self.count + 1
        assert self.queue.oldest_unwritten == oldest


TestQueueLaws = QueueLaws.TestCase


def test_a_record_takes_a_page_and_its_value_in_whole_pages():
    sizes = [0, 1, PAGE_BYTES, PAGE_BYTES + 1]
    assert [record_pages(size) for size in sizes] == [1, 2, 2, 3]
