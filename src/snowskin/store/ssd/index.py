"""What the SSD holds and where, and what goes next: the pure bookkeeping of the tier. No I/O.

**How room is made.** Values are appended to one open segment file; the others are full (*sealed*)
or *free*. Two rules, one for values and one for files:

- The eviction policy keeps live pages at or under ``LIVE_RATIO`` of all files but one, less the
  pages at the ends of files into which the next record did not fit.
- When the last free file is opened, the sealed one with the fewest live pages is emptied into it
  and is the next free one.

This always progresses: by the first rule some sealed file has no more than ``LIVE_RATIO`` of its
pages live, so to empty it leaves room in the open one; and if a large value needs more than that,
the policy evicts until it fits, at the worst everything. It copies little: values that die in the
order in which they came leave whole dead files, which cost no copy at all (with six files or
more); if deaths are spread at random, at most ``1 / (1 - LIVE_RATIO)`` pages are written for each
page that came, about half of that on average. To drop the live rest of a file instead would copy
nothing, but evict values that the policy wants kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from snowskin.store.eviction import EvictionPolicy
from snowskin.store.ssd.record import (
    SEGMENT_HEADER_PAGES,
    RecordHeader,
    RecordKind,
    record_pages,
)

LIVE_RATIO = 0.8
"""Most live pages per page of disk; our choice: at most 5 pages written per page that came."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value on disk. A value that moves has a new entry.

    Attributes:
        segment: number of its file; ``epoch`` is of the use of that file that it belongs to.
        page: of its record's header, counted from the start of the file.
    """

    key: bytes
    segment: int
    epoch: int
    page: int
    value_bytes: int
    value_checksum: int
    depth: int

    @property
    def page_count(self) -> int:
        """Pages of its record."""
        return record_pages(self.value_bytes)

    def header(self, kind: RecordKind) -> RecordHeader:
        """What its record's first page says."""
        return RecordHeader(kind, self.key, self.value_bytes, self.value_checksum, self.depth)


class SsdIndex:
    """Values, their places, and the files. Not thread-safe.

    Args:
        segment_pages: pages of a file, its header included.
        segment_limit: most files, at least 3.
        promote_after: reads of a value until it is worth a place in DRAM.
    """

    def __init__(
        self,
        *,
        segment_pages: int,
        segment_limit: int,
        policy: EvictionPolicy[bytes],
        promote_after: int,
    ) -> None:
        self.segment_pages = segment_pages
        self.segment_limit = segment_limit
        self.growable = True
        """False while the file system has no room for another file."""
        self.live_pages = 0
        self._policy = policy
        self._promote_after = promote_after
        self._entries: dict[bytes, Entry] = {}
        self._hits: dict[bytes, int] = {}
        self._held: dict[int, dict[bytes, Entry]] = {}
        self._held_pages: dict[int, int] = {}
        self._free: deque[int] = deque()
        self._sealed: dict[int, None] = {}
        self._unfilled: dict[int, int] = {}
        self._open: int | None = None
        self._next_page = segment_pages
        self._changes: dict[bytes, bool] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def value_page_limit(self) -> int:
        """Pages of the largest record that fits a file."""
        return self.segment_pages - SEGMENT_HEADER_PAGES

    # Values.

    def get(self, key: bytes) -> Entry | None:
        """Where a value lies. Counts as no use."""
        return self._entries.get(key)

    def entries(self) -> tuple[Entry, ...]:
        """All values, the longest held first."""
        return tuple(self._entries.values())

    def count_hit(self, key: bytes) -> bool:
        """A held value was read; whether it should be promoted (each ``promote_after`` reads)."""
        self._policy.touch(key)
        hits = self._hits.get(key, 0) + 1
        if hits >= self._promote_after:
            self._hits.pop(key, None)
            return True
        self._hits[key] = hits
        return False

    def add(self, entry: Entry) -> None:
        """A new value is on disk."""
        assert entry.key not in self._entries, f"{entry.key!r} is held already"
        self._place(entry)
        self._policy.insert(entry.key, depth=entry.depth)
        self._note(entry.key, was_held=False)

    def move(self, old: Entry, new: Entry) -> None:
        """A held value lies elsewhere from now on."""
        assert self._entries[old.key] is old
        self._unplace(old)
        self._place(new)

    def drop(self, entry: Entry) -> None:
        """A value is held no more."""
        assert self._entries[entry.key] is entry
        self._unplace(entry)
        del self._entries[entry.key]
        self._hits.pop(entry.key, None)
        self._policy.remove(entry.key)
        self._note(entry.key, was_held=True)

    def evict(self) -> Entry | None:
        """Drop the value that the policy wants to go next; None if there is none."""
        key = self._policy.victim()
        if key is None:
            return None
        entry = self._entries[key]
        self.drop(entry)
        return entry

    def is_over_limit(self, incoming_pages: int) -> bool:
        """Whether values must be evicted before so many more pages are live."""
        files = self.segment_limit if self.growable else len(self._held)
        pages = max(1, files - 1) * self.value_page_limit - sum(self._unfilled.values())
        return self.live_pages > 0 and self.live_pages + incoming_pages > LIVE_RATIO * pages

    def drain_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Keys held now that were not at the last call, and those that were but are no more."""
        changes, self._changes = self._changes, {}
        stored = tuple(key for key, was_held in changes.items() if not was_held)
        dropped = tuple(key for key, was_held in changes.items() if was_held)
        return stored, dropped

    # Files.

    @property
    def segment_count(self) -> int:
        """Files that exist."""
        return len(self._held)

    @property
    def open_segment(self) -> int | None:
        """The file that is appended to."""
        return self._open

    @property
    def next_page(self) -> int:
        """Where the next record goes in the open file."""
        return self._next_page

    @property
    def room_pages(self) -> int:
        """Pages left in the open file."""
        return 0 if self._open is None else self.segment_pages - self._next_page

    @property
    def has_free(self) -> bool:
        """Whether a free file is left."""
        return bool(self._free)

    def unused_number(self) -> int | None:
        """The number for another file; None if there are as many as there may be."""
        if len(self._held) >= self.segment_limit:
            return None
        return next(number for number in range(len(self._held) + 1) if number not in self._held)

    def add_segment(self, segment: int, *, free: bool) -> None:
        """A file exists: free, or sealed."""
        assert segment not in self._held, f"segment {segment} is known already"
        self._held[segment] = {}
        self._held_pages[segment] = 0
        if free:
            self._free.append(segment)
        else:
            self._sealed[segment] = None

    def reopen(self, segment: int, next_page: int) -> None:
        """A sealed file is appended to again, from ``next_page`` on."""
        assert self._open is None, "a file is open already"
        del self._sealed[segment]
        self._open, self._next_page = segment, next_page

    def surplus(self) -> int | None:
        """A sealed file beyond the limit, the one with the fewest live pages; None if none is."""
        if len(self._held) <= self.segment_limit:
            return None
        while self._free:
            self._sealed[self._free.popleft()] = None
        return self.emptiest()

    def forget_segment(self, segment: int) -> None:
        """A sealed file without live values is gone."""
        assert not self._held[segment], f"segment {segment} has live values"
        del self._sealed[segment]
        self._unfilled.pop(segment, None)
        del self._held[segment]
        del self._held_pages[segment]

    def seal(self) -> None:
        """Append no more to the open file."""
        if self._open is not None:
            self._sealed[self._open] = None
            self._unfilled[self._open] = self.room_pages
            self._open = None

    def open_free(self) -> int:
        """Append to the file that has been free the longest."""
        assert self._open is None, "a file is open already"
        self._open = self._free.popleft()
        self._next_page = SEGMENT_HEADER_PAGES
        return self._open

    def append(self, page_count: int) -> int:
        """Take pages of the open file; the first of them."""
        assert page_count <= self.room_pages, "the open file has no room"
        page = self._next_page
        self._next_page += page_count
        return page

    def emptiest(self) -> int | None:
        """The sealed file with the fewest live pages (of equals, the one sealed first)."""
        return min(self._sealed, key=self._held_pages.__getitem__, default=None)

    def live_pages_of(self, segment: int) -> int:
        """Live pages in a file."""
        return self._held_pages[segment]

    def entries_of(self, segment: int) -> tuple[Entry, ...]:
        """Live values of a file, in order of place."""
        return tuple(sorted(self._held[segment].values(), key=lambda entry: entry.page))

    def recycle(self, segment: int) -> None:
        """A sealed file without live values is free."""
        assert not self._held[segment], f"segment {segment} has live values"
        del self._sealed[segment]
        self._unfilled.pop(segment, None)
        self._free.append(segment)

    def _place(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._held[entry.segment][entry.key] = entry
        self._held_pages[entry.segment] += entry.page_count
        self.live_pages += entry.page_count

    def _unplace(self, entry: Entry) -> None:
        del self._held[entry.segment][entry.key]
        self._held_pages[entry.segment] -= entry.page_count
        self.live_pages -= entry.page_count

    def _note(self, key: bytes, *, was_held: bool) -> None:
        """Remember what was before; a key that is back where it was has not changed."""
        if self._changes.setdefault(key, was_held) != was_held:
            del self._changes[key]
