"""The one thread that writes: it takes batches from the queue and appends them to the files."""

from __future__ import annotations

import time

from snowskin.store.ssd.answers import WRITE_RETRY_S
from snowskin.store.ssd.config import Sync
from snowskin.store.ssd.files import put_header
from snowskin.store.ssd.index import Entry
from snowskin.store.ssd.queue import Pending
from snowskin.store.ssd.record import PAGE_BYTES, RecordKind
from snowskin.store.ssd.space import SpaceMaker
from snowskin.store.ssd.state import TierState


class LogWriter:
    """Carries out what ``SsdIndex`` decides. All its methods run in the writer's thread.

    The order of steps keeps every moment safe to be killed at. A value is held once its record is
    written. A record of a value that is held no more is marked dead before anything newer is
    written. A file is voided only when all that it held is written (and, unless ``Sync.NEVER``,
    synced) elsewhere.
    """

    def __init__(self, state: TierState) -> None:
        self._state = state
        self._space = SpaceMaker(state)

    def run(self) -> None:
        """Work until the tier closes and all is written."""
        try:
            if self._state.index.open_segment is not None and not self._state.index.has_free:
                self._space.empty_a_file(0)  # A crash came in the midst of it.
            while self._step():
                pass
            self._space.end_open_file()
        except BaseException:
            with self._state.lock:
                self._state.writer_died = True
            raise
        finally:
            with self._state.lock:
                self._state.changed.notify_all()

    def _step(self) -> bool:
        state = self._state
        with state.lock:
            while True:
                marks = tuple(state.marks)
                batch = state.queue.batch(state.config.batch_bytes)
                if marks or batch:
                    break
                if state.closing and state.queue.is_settled:
                    return False
                state.changed.wait()
            state.marks.clear()
        for entry in marks:
            self._space.mark_dead(entry)
        if batch:
            self._append(batch)
        with state.lock:
            state.marked_count += len(marks)
            state.changed.notify_all()
        return True

    def _append(self, batch: tuple[Pending, ...]) -> None:
        """Write neighbours of the queue, in as few pieces as the files allow."""
        index = self._state.index
        while batch:
            with self._state.lock:
                count = _fitting(batch, index.room_pages)
            run, batch = batch[:count], batch[count:]
            if not run:
                if not self._space.next_file(batch[0].page_count):
                    self._give_up(batch)
                    return
                continue
            self._space.evict_for(sum(pending.page_count for pending in run))
            try:
                self._write(run)
            except OSError as error:
                self._state.count_disk_error(error)
                self._give_up((*run, *batch))
                return

    def _write(self, run: tuple[Pending, ...]) -> None:
        state, index = self._state, self._state.index
        with state.lock:
            segment, first_page = index.open_segment, index.next_page
            dead = [pending.cancelled for pending in run]
        assert segment is not None, "no file is open"
        file = state.files[segment]
        entries = []
        page = first_page
        for pending, is_dead in zip(run, dead, strict=True):
            entry = Entry(
                key=pending.key,
                segment=segment,
                epoch=file.epoch,
                page=page,
                value_bytes=len(pending.value),
                value_checksum=pending.checksum,
                depth=pending.depth,
            )
            kind = RecordKind.DEAD if is_dead else RecordKind.VALUE
            put_header(pending.record, entry.header(kind), file.seed(page))
            entries.append(entry)
            page += entry.page_count
        file.write(state.queue.records(run), first_page)
        with state.lock:
            state.unsynced[segment] = None
        if state.config.sync is Sync.BATCH:
            file.sync()
        with state.lock:
            index.append(page - first_page)
            for pending, entry, is_dead in zip(run, entries, dead, strict=True):
                if not pending.cancelled:
                    index.add(entry)
                    state.counts.written_total += 1
                elif not is_dead:
                    state.mark(entry)  # Removed while it was being written.
            state.counts.written_bytes += (page - first_page) * PAGE_BYTES
            state.refused_until_s = 0.0
            state.queue.settle(run)
            state.changed.notify_all()

    def _give_up(self, batch: tuple[Pending, ...]) -> None:
        """The disk does not take these: they are held no more."""
        state = self._state
        with state.lock:
            failed_count = sum(not pending.cancelled for pending in batch)
            state.counts.failed_write_total += failed_count
            state.unreported_failures += failed_count
            state.refused_until_s = time.monotonic() + WRITE_RETRY_S
            state.queue.settle(batch)
            state.changed.notify_all()


def _fitting(batch: tuple[Pending, ...], room_pages: int) -> int:
    """How many from the front fit."""
    for count, pending in enumerate(batch):
        room_pages -= pending.page_count
        if room_pages < 0:
            return count
    return len(batch)
