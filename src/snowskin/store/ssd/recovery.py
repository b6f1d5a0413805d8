"""What a directory holds, found out when it is opened: reads the headers of all records.

Values are checked when they are read, but for two cases, in which a record may be there without its
bytes: the last batch before a crash, and a value found in two places (it was being moved, or put
again). A torn record is dropped, and of two places the newer whole one counts. Everything that is
not taken over is marked dead, so that it cannot come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from snowskin.store.ssd.files import PIECE_BYTES, Bytes, SegmentFile, aligned_buffer
from snowskin.store.ssd.index import Entry
from snowskin.store.ssd.record import (
    END,
    PAGE_BYTES,
    RECORD_MAGIC,
    SEGMENT_HEADER_PAGES,
    RecordHeader,
    RecordKind,
    parse_record,
)
from snowskin.store.ssd.state import TierState
from snowskin.terms.errors import InvalidInput

_SCAN_THREADS = 8
_WINDOW_PAGES = 16
"""Read at once: the headers of small records are close together."""


@dataclass(frozen=True, slots=True)
class _Scanned:
    """One file's values in order of place, where its records end, and what was damaged.

    Attributes:
        damaged_count: records whose header is no more.
        refused_count: pages that the disk did not read while looking for headers.
    """

    segment: int
    entries: tuple[Entry, ...]
    end_page: int
    has_end: bool
    damaged_count: int
    refused_count: int


def open_files(directory: Path, *, direct: bool) -> dict[int, SegmentFile]:
    """The segment files of a directory by number; other files there are left alone.

    Raises:
        OSError: one cannot be opened.
        InvalidInput: they are of another version, or of several sizes.
    """
    files: dict[int, SegmentFile] = {}
    try:
        for path in sorted(directory.glob("segment-*.snow")):
            number = path.stem.removeprefix("segment-")
            if number.isdecimal():
                files[int(number)] = SegmentFile(path, direct=direct)
        if len(_sizes(files)) > 1:
            raise InvalidInput(
                f"{directory} holds segment files of several sizes, "
                f"{sorted(_sizes(files))} bytes: no one tier made them; choose an empty directory"
            )
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return files


def found_segment_bytes(files: dict[int, SegmentFile]) -> int | None:
    """The size that the files have; None if there are none."""
    return max(_sizes(files), default=None)


def _sizes(files: dict[int, SegmentFile]) -> set[int]:
    return {file.header.segment_bytes for file in files.values() if file.header is not None}


def recover(state: TierState) -> None:
    """Fill a state's index from its files. Before any other thread has the state.

    Raises:
        OSError: a file cannot be written. What cannot be read is counted, and lost.
    """
    index = state.index
    state.last_epoch = max((file.epoch for file in state.files.values()), default=0)
    _void_headless(state)
    by_age = sorted(state.files, key=lambda number: state.files[number].epoch)
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        scanned = list(pool.map(lambda number: _scan(number, state), by_age))
    state.counts.lost_at_start_total += sum(found.damaged_count for found in scanned)
    state.counts.disk_error_total += sum(found.refused_count for found in scanned)
    taken = _newest(state, _drop_torn(state, scanned))
    for found in scanned:
        index.add_segment(found.segment, free=found.end_page == SEGMENT_HEADER_PAGES)
    for entry in taken:
        index.add(entry)
    _shrink(state)
    _end_or_reopen(state, scanned)
    index.drain_changes()


def _end_or_reopen(state: TierState, scanned: list[_Scanned]) -> None:
    """A crash leaves a file without an end: put it there, to spare the next start a search.

    But if no file is free, the crash came while one was being emptied into the newest: that must
    go on in the newest, as only there is room for it.
    """
    index = state.index
    for found in reversed(scanned):
        is_partial = SEGMENT_HEADER_PAGES < found.end_page < index.segment_pages
        if not is_partial or found.has_end or found.segment not in state.files:
            continue
        if found is scanned[-1] and not index.has_free:
            index.reopen(found.segment, found.end_page)
        else:
            file = state.files[found.segment]
            file.write_header(END, found.end_page, aligned_buffer(PAGE_BYTES))


def _void_headless(state: TierState) -> None:
    """A file without a header was being made, or has lost what it held: it is free."""
    for file in state.files.values():
        if file.header is None:
            file.reset(state.new_epoch(), state.segment_bytes)


def _scan(segment: int, state: TierState) -> _Scanned:
    file, page_count = state.files[segment], state.index.segment_pages
    scratch = aligned_buffer(PIECE_BYTES)
    window, window_page = scratch[: _WINDOW_PAGES * PAGE_BYTES], -_WINDOW_PAGES
    entries: list[Entry] = []
    page = end_page = SEGMENT_HEADER_PAGES
    damaged_count = refused_count = 0
    has_end = False
    while page < page_count:
        if not window_page <= page < window_page + _WINDOW_PAGES:
            refused_count += file.salvage(window, page)
            window_page = page
        at = (page - window_page) * PAGE_BYTES
        header = parse_record(window[at : at + PAGE_BYTES].tobytes(), file.seed(page))
        if header is None:
            following = _next_record(file, page + 1, page_count, scratch)
            if following is None:
                break
            damaged_count += 1
            page, window_page = following, -_WINDOW_PAGES  # The search has used the memory.
            continue
        if header.kind is RecordKind.END:
            has_end = True
            break
        if page + header.page_count > page_count:
            damaged_count += 1
            break
        if header.kind is RecordKind.VALUE:
            entries.append(_entry(segment, file, page, header))
        page += header.page_count
        end_page = page
    return _Scanned(segment, tuple(entries), end_page, has_end, damaged_count, refused_count)


def _next_record(file: SegmentFile, page: int, page_count: int, scratch: Bytes) -> int | None:
    """The first page from ``page`` on that begins a record of this use of the file."""
    magic = np.frombuffer(RECORD_MAGIC, dtype=np.uint8)
    piece_pages = PIECE_BYTES // PAGE_BYTES
    for start in range(page, page_count, piece_pages):
        piece = scratch[: min(piece_pages, page_count - start) * PAGE_BYTES]
        file.salvage(piece, start)
        pages = piece.reshape(-1, PAGE_BYTES)
        for at in np.flatnonzero((pages[:, : len(magic)] == magic).all(axis=1)):
            found = start + int(at)
            if parse_record(pages[at].tobytes(), file.seed(found)) is not None:
                return found
    return None


def _entry(segment: int, file: SegmentFile, page: int, header: RecordHeader) -> Entry:
    return Entry(
        key=header.key,
        segment=segment,
        epoch=file.epoch,
        page=page,
        value_bytes=header.value_bytes,
        value_checksum=header.value_checksum,
        depth=header.depth,
    )


def _drop_torn(state: TierState, scanned: list[_Scanned]) -> Iterator[Entry]:
    """All values in order of writing, less those of the last batch that are not whole."""
    last = max((number for number, found in enumerate(scanned) if found.entries), default=-1)
    batch_pages = -(-state.config.batch_bytes // PAGE_BYTES)
    for number, found in enumerate(scanned):
        for entry in found.entries:
            in_last_batch = entry.page + entry.page_count > found.end_page - batch_pages
            if number == last and in_last_batch and not _is_whole(state, entry):
                state.counts.lost_at_start_total += 1
                _mark_dead(state, entry)
                continue
            yield entry


def _newest(state: TierState, entries: Iterator[Entry]) -> tuple[Entry, ...]:
    """Of each key the newest whole value, in order of writing; the others are marked dead."""
    taken: dict[bytes, Entry] = {}
    for entry in entries:
        older = taken.get(entry.key)
        if older is None:
            taken[entry.key] = entry
        elif _is_whole(state, entry):
            _mark_dead(state, older)
            del taken[entry.key]
            taken[entry.key] = entry
        else:
            state.counts.lost_at_start_total += 1
            _mark_dead(state, entry)
    return tuple(taken.values())


def _is_whole(state: TierState, entry: Entry) -> bool:
    out = aligned_buffer(entry.value_bytes)[: entry.value_bytes]
    scratch = aligned_buffer(PIECE_BYTES)
    file = state.files[entry.segment]
    try:
        return file.read_value(out, entry.page + 1, scratch) == entry.value_checksum
    except OSError as error:
        state.count_disk_error(error)
        return False


def _mark_dead(state: TierState, entry: Entry) -> None:
    file = state.files[entry.segment]
    file.write_header(entry.header(RecordKind.DEAD), entry.page, aligned_buffer(PAGE_BYTES))


def _shrink(state: TierState) -> None:
    """Keep to a capacity that is less than it was: the emptiest files go first."""
    index = state.index
    while (segment := index.surplus()) is not None:
        for entry in index.entries_of(segment):
            index.drop(entry)
            state.counts.evicted_total += 1
        index.forget_segment(segment)
        file = state.files.pop(segment)
        file.close()
        file.path.unlink()
    while index.is_over_limit(0):
        evicted = index.evict()
        if evicted is None:
            break
        state.counts.evicted_total += 1
        _mark_dead(state, evicted)
