"""Values on their way to the SSD: a ring of memory in which they lie as they will lie on disk.

Neighbours in the ring are neighbours on disk, so that a batch is one write straight from the ring.
A value can be read from here until it is on disk. Not thread-safe; ``Pending.value`` may be used
without the lock between ``reserve`` and ``finish``, or between ``pin`` and ``unpin``.
"""

from __future__ import annotations

from collections import deque

from snowskin.store.ssd.files import Bytes, aligned_buffer
from snowskin.store.ssd.record import PAGE_BYTES, record_pages


class Pending:
    """A value in the ring.

    Attributes:
        sequence: its place in the order of all writes, from 1.
        filled: its bytes are in place.
        cancelled: removed, or never filled: it must not be found.
    """

    __slots__ = (
        "cancelled",
        "checksum",
        "depth",
        "done",
        "filled",
        "key",
        "record",
        "sequence",
        "start",
        "uses",
        "value",
    )

    def __init__(self, key: bytes, checksum: int, depth: int, start: int, record: Bytes) -> None:
        self.key = key
        self.checksum = checksum
        self.depth = depth
        self.start = start
        self.record = record
        self.value = record[PAGE_BYTES:]
        self.sequence = 0
        self.filled = False
        self.cancelled = False
        self.done = False
        self.uses = 0

    @property
    def page_count(self) -> int:
        """Pages of its record."""
        return len(self.record) // PAGE_BYTES


class WriteQueue:
    """A bounded queue of records in one ring of memory, taken out in the order of ``reserve``."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes // PAGE_BYTES * PAGE_BYTES
        self._memory = aligned_buffer(self.limit_bytes)
        self._head = 0
        self._ring: deque[Pending] = deque()
        self._waiting: deque[Pending] = deque()
        self._by_key: dict[bytes, Pending] = {}
        self.last_sequence = 0

    @property
    def queued_bytes(self) -> int:
        """Memory in use, headers and filling included."""
        return sum(len(pending.record) for pending in self._ring)

    @property
    def oldest_unwritten(self) -> int:
        """The sequence before which all is settled."""
        return self._waiting[0].sequence if self._waiting else self.last_sequence + 1

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._waiting

    def find(self, key: bytes) -> Pending | None:
        """The value of this key on its way, filled or not; None if there is none."""
        return self._by_key.get(key)

    def reserve(self, key: bytes, value_bytes: int, checksum: int, depth: int) -> Pending | None:
        """Room for a value, to be filled and then declared so; None if there is none now."""
        assert key not in self._by_key, f"{key!r} is queued already"
        length = record_pages(value_bytes) * PAGE_BYTES
        start = self._find_room(length)
        if start is None:
            return None
        record = self._memory[start : start + length]
        pending = Pending(key, checksum, depth, start, record)
        pending.value = record[PAGE_BYTES : PAGE_BYTES + value_bytes]
        self.last_sequence += 1
        pending.sequence = self.last_sequence
        self._head = start + length
        self._ring.append(pending)
        self._waiting.append(pending)
        self._by_key[key] = pending
        return pending

    def cancel(self, pending: Pending) -> None:
        """Let it not be found any more; its place in the queue stays."""
        pending.cancelled = True
        if self._by_key.get(pending.key) is pending:
            del self._by_key[pending.key]

    def batch(self, limit_bytes: int) -> tuple[Pending, ...]:
        """The filled ones at the front, neighbours in the ring, at least one and up to a limit."""
        taken: list[Pending] = []
        length = 0
        for pending in self._waiting:
            follows = not taken or pending.start == taken[-1].start + len(taken[-1].record)
            length += len(pending.record)
            if not pending.filled or not follows or (taken and length > limit_bytes):
                break
            taken.append(pending)
        return tuple(taken)

    def records(self, batch: tuple[Pending, ...]) -> Bytes:
        """The memory of neighbours, as one piece."""
        end = batch[-1].start + len(batch[-1].record)
        return self._memory[batch[0].start : end]

    def settle(self, batch: tuple[Pending, ...]) -> None:
        """The front of the queue is on disk, or given up; its memory is free once not in use."""
        for pending in batch:
            first = self._waiting.popleft()
            assert first is pending, "records are settled in order"
            pending.done = True
            if self._by_key.get(pending.key) is pending:
                del self._by_key[pending.key]
        self._free()

    def pin(self, pending: Pending) -> None:
        """Keep its memory for a reader."""
        pending.uses += 1

    def unpin(self, pending: Pending) -> None:
        """The reader is through."""
        pending.uses -= 1
        self._free()

    def _free(self) -> None:
        while self._ring and self._ring[0].done and not self._ring[0].uses:
            self._ring.popleft()

    def _find_room(self, length: int) -> int | None:
        if not self._ring:
            return 0 if length <= self.limit_bytes else None
        tail, head = self._ring[0].start, self._head
        if head > tail:
            if head + length <= self.limit_bytes:
                return head
            return 0 if length <= tail else None
        return head if head + length <= tail else None
