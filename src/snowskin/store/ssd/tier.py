"""The SSD tier: values that outlive both the memory and the process, in files of one directory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import xxhash

from snowskin.store.ssd.answers import Flushed, HeldValue, Hit, Miss, SsdStat, Value, WriteOutcome
from snowskin.store.ssd.config import SsdConfig, Sync
from snowskin.store.ssd.files import Bytes, SegmentFile, aligned_buffer
from snowskin.store.ssd.lock import lock_directory
from snowskin.store.ssd.queue import Pending
from snowskin.store.ssd.reader import ValueReader
from snowskin.store.ssd.record import KEY_LIMIT_BYTES, PAGE_BYTES
from snowskin.store.ssd.recovery import found_segment_bytes, open_files, recover
from snowskin.store.ssd.state import TierState
from snowskin.store.ssd.writer import LogWriter
from snowskin.terms.errors import InvalidInput

Buffer = bytes | bytearray | memoryview | Bytes

_CLOSE_S = 60.0


class SsdTier:
    """Write-once values by key, on disk. Safe to use from any thread.

    A write is copied into a bounded queue and can be read at once; one thread appends the queue to
    segment files in large batches. Reads go straight to the disk, in the caller's thread and
    without a lock, and every value is checked before it is given out. After a restart, even a kill
    in mid-write, all that was flushed is held, unless evicted or removed. Each value takes whole
    pages of 4 KiB and one more.

    Args:
        directory: for this tier alone; made if it does not exist. One process at a time.

    Raises:
        InvalidInput: the directory cannot be used, or another process has it (named by its pid).
    """

    def __init__(self, directory: Path, config: SsdConfig) -> None:
        self._lock_fd: int | None = None
        self._files: dict[int, SegmentFile] = {}
        begin_s = time.perf_counter()
        with contextlib.ExitStack() as undo:
            undo.callback(self._let_go)
            self._lock_fd = lock_directory(directory)
            try:
                self._files = open_files(directory, direct=config.direct_io)
                segment_bytes = found_segment_bytes(self._files) or config.new_segment_bytes
                self._state = TierState(directory, config, segment_bytes, self._files)
                recover(self._state)
            except OSError as error:
                raise InvalidInput(f"SSD directory {directory} cannot be used: {error}") from error
            undo.pop_all()
        self._reader = ValueReader(self._state)
        self._open_s = time.perf_counter() - begin_s
        self._writer = threading.Thread(
            target=LogWriter(self._state).run, name="ssd-writer", daemon=True
        )
        self._writer.start()

    @property
    def value_limit_bytes(self) -> int:
        """The largest value that can be written."""
        return self._state.value_limit_bytes

    def write(self, key: bytes, data: Buffer, *, depth: int = 0) -> WriteOutcome:
        """Have a value written soon; it is copied, so ``data`` may change afterwards.

        Args:
            key: up to 1 KiB; a block key, or any other.
            data: contiguous, up to ``value_limit_bytes``.
            depth: index of a block in its chain, for the eviction policy.

        Raises:
            InvalidInput: a key or value out of bounds.
        """
        value = _as_bytes(data)
        _check_bounds(key, value, self.value_limit_bytes)
        checksum = int(xxhash.xxh3_64_intdigest(value.data))
        state = self._state
        with state.lock:
            state.check_open()
            outcome, pending = self._accept(key, len(value), checksum, depth)
        if pending is None:
            return outcome
        filled = False
        try:
            np.copyto(pending.value, value)
            pending.record[PAGE_BYTES + len(value) :] = 0
            filled = True
        finally:
            with state.lock:
                if not filled:
                    state.queue.cancel(pending)
                pending.filled = True
                state.changed.notify_all()
        return outcome

    def _accept(
        self, key: bytes, value_bytes: int, checksum: int, depth: int
    ) -> tuple[WriteOutcome, Pending | None]:
        state, counts = self._state, self._state.counts
        held = state.index.get(key)
        queued = state.queue.find(key)
        present = None
        if held is not None:
            present = (held.value_bytes, held.value_checksum)
        elif queued is not None:
            present = (len(queued.value), queued.checksum)
        if present == (value_bytes, checksum):
            counts.held_total += 1
            return WriteOutcome.HELD, None
        if present is not None:
            counts.conflict_total += 1
            return WriteOutcome.CONFLICT, None
        if time.monotonic() < state.refused_until_s:
            counts.refused_total += 1
            return WriteOutcome.REFUSED, None
        pending = state.queue.reserve(key, value_bytes, checksum, depth)
        if pending is None:
            counts.queue_full_total += 1
            return WriteOutcome.QUEUE_FULL, None
        counts.queued_total += 1
        return WriteOutcome.QUEUED, pending

    def read_into(self, key: bytes, buffer: bytearray | memoryview | Bytes) -> Hit | Miss:
        """Read a value into the front of a buffer; straight from disk if that begins on a page.

        Raises:
            InvalidInput: the buffer is read-only, or smaller than the value (see ``size``).
        """
        out = _as_bytes(buffer)
        if not out.flags.writeable:
            raise InvalidInput("the buffer is read-only; values are read into writable memory")

        def front(value_bytes: int) -> Bytes:
            if value_bytes > len(out):
                raise InvalidInput(
                    f"the buffer has {len(out)} bytes, the value {value_bytes}; ask size() first"
                )
            return out[:value_bytes]

        value = self._reader.read(key, front)
        return value if isinstance(value, Miss) else Hit(len(value.data), value.promote)

    def read(self, key: bytes) -> Value | Miss:
        """A value in memory of its own."""
        return self._reader.read(key, lambda value_bytes: aligned_buffer(value_bytes)[:value_bytes])

    def contains(self, key: bytes) -> bool:
        """Whether a read would find the key now. Counts as no use."""
        return self.size(key) is not None

    def size(self, key: bytes) -> int | None:
        """Bytes of a value; None if the key is not held. Counts as no use."""
        with self._state.lock:
            self._state.check_open()
            entry = self._state.index.get(key)
            if entry is not None:
                return entry.value_bytes
            pending = self._state.queue.find(key)
            return len(pending.value) if pending is not None and pending.filled else None

    def remove(self, key: bytes) -> bool:
        """Hold a key no more; False if it was not held. Survives a restart from ``flush`` on."""
        state = self._state
        with state.lock:
            state.check_open()
            pending = state.queue.find(key)
            if pending is not None:
                state.queue.cancel(pending)
            entry = state.index.get(key)
            if entry is not None:
                state.index.drop(entry)
                state.mark(entry)
            found = entry is not None or pending is not None
            state.counts.removed_total += found
            return found

    def flush(self, timeout_s: float = 60.0) -> Flushed:
        """Wait until all that was written and removed before is on disk (and synced, if so set).

        Raises:
            SnowskinError: the writer thread died, which is a defect.
        """
        state = self._state
        deadline_s = time.monotonic() + timeout_s
        with state.lock:
            state.check_open()
            last, marks = state.queue.last_sequence, state.queued_mark_count
            while state.queue.oldest_unwritten <= last or state.marked_count < marks:
                state.check_writer()
                if not state.changed.wait(deadline_s - time.monotonic()):
                    return Flushed(complete=False, failed_count=state.take_failures())
            unsynced, state.unsynced = state.unsynced, {}
            failed_count = state.take_failures()
            files = [state.files[number] for number in unsynced]
        complete = state.config.sync is Sync.NEVER or self._sync(files)
        if not complete:
            with state.lock:
                state.unsynced.update(unsynced)
        return Flushed(complete=complete, failed_count=failed_count)

    def held(self) -> tuple[HeldValue, ...]:
        """Every value on disk, in order of writing (those moved since come by when they moved)."""
        with self._state.lock:
            entries = self._state.index.entries()
        return tuple(HeldValue(entry.key, entry.value_bytes, entry.depth) for entry in entries)

    def drain_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Keys that are on disk and were not at the last call (or the start), and the reverse.

        Bounded without being called: keys that came and went in between are left out.
        """
        with self._state.lock:
            return self._state.index.drain_changes()

    def stat(self) -> SsdStat:
        """Figures, see ``SsdStat``."""
        state = self._state
        with state.lock:
            return SsdStat(
                capacity_bytes=state.config.capacity_bytes,
                segment_bytes=state.segment_bytes,
                segment_count=state.index.segment_count,
                value_count=len(state.index),
                live_bytes=state.index.live_pages * PAGE_BYTES,
                queued_bytes=state.queue.queued_bytes,
                value_limit_bytes=state.value_limit_bytes,
                direct_io=any(file.direct for file in state.files.values()),
                open_s=self._open_s,
                **asdict(state.counts),
            )

    def close(self) -> None:
        """Write and sync (unless NEVER) what is queued; let go of the directory. Idempotent."""
        state = self._state
        with state.lock:
            if state.closing:
                return
            state.closing = True
            state.changed.notify_all()
        self._writer.join()
        with state.lock:
            state.changed.wait_for(lambda: not state.reader_count, _CLOSE_S)
        if state.config.sync is not Sync.NEVER:
            self._sync(list(state.files.values()))
        self._let_go()

    def __enter__(self) -> SsdTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sync(self, files: list[SegmentFile]) -> bool:
        """Sync all; False if the disk refused one."""
        complete = True
        for file in files:
            try:
                file.sync()
            except OSError as error:
                self._state.count_disk_error(error)
                complete = False
        return complete

    def _let_go(self) -> None:
        for file in self._files.values():
            file.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _as_bytes(data: Buffer) -> Bytes:
    """The same memory as a flat array of bytes."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    if not array.flags.c_contiguous:
        raise InvalidInput("the memory of a value must be contiguous; this array's is not")
    return array.reshape(-1).view(np.uint8)


def _check_bounds(key: bytes, value: Bytes, value_limit_bytes: int) -> None:
    if not 0 < len(key) <= KEY_LIMIT_BYTES:
        raise InvalidInput(f"the key has {len(key)} bytes; it must have 1 to {KEY_LIMIT_BYTES}")
    if len(value) > value_limit_bytes:
        raise InvalidInput(
            f"the value has {len(value)} bytes, but the SSD tier takes {value_limit_bytes} at "
            f"most; split it, or choose larger segment_bytes (in a new directory) and "
            f"write_queue_bytes"
        )
