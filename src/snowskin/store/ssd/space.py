"""Room for what is to be written: evicts values, opens, empties and voids files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from snowskin.store.ssd.config import Sync
from snowskin.store.ssd.files import PIECE_BYTES, Bytes, SegmentFile, aligned_buffer, put_header
from snowskin.store.ssd.index import Entry
from snowskin.store.ssd.record import END, PAGE_BYTES, RecordKind
from snowskin.store.ssd.state import TierState


class SpaceMaker:
    """Carries out what ``SsdIndex`` says of files. All its methods run in the writer's thread."""

    def __init__(self, state: TierState) -> None:
        self._state = state
        self._scratch = aligned_buffer(PIECE_BYTES)
        self._page = aligned_buffer(PAGE_BYTES)

    def next_file(self, wanted_pages: int) -> bool:
        """Open a free file with room for a record; False if none can be had."""
        state, index = self._state, self._state.index
        self.end_open_file()
        if not index.has_free and not self._create_file() and not self._drop_emptiest():
            return False
        with state.lock:
            index.open_free()
        if not index.has_free and not self._create_file():
            self.empty_a_file(wanted_pages)
        return True

    def end_open_file(self) -> None:
        """Append no more to the open file, and say so on disk."""
        state, index = self._state, self._state.index
        segment = index.open_segment
        if segment is None:
            return
        if index.room_pages:
            try:
                state.files[segment].write_header(END, index.next_page, self._page)
            except OSError as error:
                self._state.count_disk_error(error)  # It only spares the next start a search.
        with state.lock:
            index.seal()

    def _create_file(self) -> bool:
        state, index = self._state, self._state.index
        number = index.unused_number()
        if number is None:
            return False
        try:
            file = SegmentFile.create(
                state.segment_path(number),
                state.segment_bytes,
                state.new_epoch(),
                direct=state.config.direct_io,
            )
        except OSError as error:
            self._state.count_disk_error(error)
            index.growable = False
            return False
        with state.lock:
            index.growable = True
            state.files[number] = file
            index.add_segment(number, free=True)
        return True

    def _drop_emptiest(self) -> bool:
        """Without a file to move values into: evict the rest of the one with the fewest."""
        state, index = self._state, self._state.index
        segment = index.emptiest()
        if segment is None or not self._void(segment):
            return False
        with state.lock:
            for entry in index.entries_of(segment):
                index.drop(entry)
                state.counts.evicted_total += 1
            index.recycle(segment)
        return True

    def empty_a_file(self, wanted_pages: int) -> None:
        """Move the live values of one file to the open one, and leave room there for a record."""
        state, index = self._state, self._state.index
        evicted: list[Entry] = []
        while True:
            with state.lock:
                segment = index.emptiest()
                if segment is None:
                    return
                if index.live_pages_of(segment) + wanted_pages <= index.room_pages:
                    entries = index.entries_of(segment)
                    break
                evicted += self._evict_one()
        self._mark_evicted(evicted)
        target = index.open_segment
        assert target is not None, "no file is open"
        try:
            for entry in entries:
                self._move(entry, target)
            if entries and state.config.sync is not Sync.NEVER:
                state.files[target].sync()
        except OSError as error:
            self._state.count_disk_error(error)
            return  # What has not moved stays where it is.
        if self._void(segment):
            with state.lock:
                index.recycle(segment)

    def _move(self, entry: Entry, target: int) -> None:
        state, index = self._state, self._state.index
        source, file = state.files[entry.segment], state.files[target]
        page = index.next_page
        done_pages = 0
        while done_pages < entry.page_count:
            count = min(entry.page_count - done_pages, PIECE_BYTES // PAGE_BYTES)
            piece = self._scratch[: count * PAGE_BYTES]
            if not self._read(source, piece, entry, done_pages):
                return
            if done_pages == 0:
                put_header(piece, entry.header(RecordKind.VALUE), file.seed(page))
            file.write(piece, page + done_pages)
            done_pages += count
        moved = Entry(
            key=entry.key,
            segment=target,
            epoch=file.epoch,
            page=page,
            value_bytes=entry.value_bytes,
            value_checksum=entry.value_checksum,
            depth=entry.depth,
        )
        with state.lock:
            state.unsynced[target] = None
            index.append(entry.page_count)
            state.counts.moved_bytes += entry.page_count * PAGE_BYTES
            if index.get(entry.key) is entry:
                index.move(entry, moved)
            else:
                state.mark(moved)  # Removed in the meantime.

    def _read(self, source: SegmentFile, piece: Bytes, entry: Entry, done_pages: int) -> bool:
        """Part of a record to be moved; if it cannot be read, the value is held no more."""
        state, index = self._state, self._state.index
        try:
            if source.read_pages(piece, entry.page + done_pages):
                return True
        except OSError as error:
            self._state.count_disk_error(error)
        with state.lock:
            if index.get(entry.key) is entry:
                index.drop(entry)
                state.counts.corrupt_total += 1
        return False

    def evict_for(self, page_count: int) -> None:
        """Evict until so many more pages may be live."""
        evicted: list[Entry] = []
        with self._state.lock:
            while self._state.index.is_over_limit(page_count):
                victim = self._evict_one()
                if not victim:
                    break
                evicted += victim
        self._mark_evicted(evicted)

    def _evict_one(self) -> tuple[Entry, ...]:
        """The value that goes next; nothing if there is none. With the lock held."""
        entry = self._state.index.evict()
        if entry is None:
            return ()
        self._state.counts.evicted_total += 1
        return (entry,)

    def _mark_evicted(self, entries: Sequence[Entry]) -> None:
        """Mark all of them dead, neighbours at once: the first's header skips the others' records.

        Values mostly go in the order in which they came, so that a batch of small ones costs one
        page, not one for each.
        """
        first: Entry | None = None
        page_count = 0
        for entry in sorted(entries, key=lambda entry: (entry.segment, entry.page)):
            if (
                first is not None
                and (entry.segment, entry.epoch) == (first.segment, first.epoch)
                and entry.page == first.page + page_count
            ):
                page_count += entry.page_count
                continue
            if first is not None:
                self.mark_dead(first, page_count)
            first, page_count = entry, entry.page_count
        if first is not None:
            self.mark_dead(first, page_count)

    def mark_dead(self, entry: Entry, page_count: int | None = None) -> None:
        """Say on disk that a value is held no more; nothing to do if its file is reused already.

        Args:
            page_count: of its record and those right behind it that are dead, too.
        """
        file = self._state.files[entry.segment]
        if file.epoch != entry.epoch:
            return
        header = entry.header(RecordKind.DEAD)
        if page_count is not None:
            header = replace(header, value_bytes=(page_count - 1) * PAGE_BYTES)
        try:
            file.write_header(header, entry.page, self._page)
        except OSError as error:
            self._state.count_disk_error(error)
        with self._state.lock:
            self._state.unsynced[entry.segment] = None

    def _void(self, segment: int) -> bool:
        """Make a file free on disk; False if the disk refuses, and then it is as it was."""
        state = self._state
        try:
            state.files[segment].reset(state.new_epoch(), state.segment_bytes)
        except OSError as error:
            self._state.count_disk_error(error)
            return False
        with state.lock:
            state.unsynced[segment] = None
        return True
