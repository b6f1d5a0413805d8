"""Reads of the SSD tier: in the caller's thread, without a lock, checked before they count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from snowskin.store.ssd.answers import Miss, MissReason, Value
from snowskin.store.ssd.files import Bytes
from snowskin.store.ssd.index import Entry
from snowskin.store.ssd.queue import Pending
from snowskin.store.ssd.state import TierState

_ATTEMPTS = 8
"""A value that moves while it is read is looked up again; so often in a row it moves for no one."""


class ValueReader:
    """Finds values in the queue or on disk."""

    def __init__(self, state: TierState) -> None:
        self._state = state

    def read(self, key: bytes, memory: Callable[[int], Bytes]) -> Value | Miss:
        """A value in the memory that ``memory`` gives for its size."""
        state = self._state
        with state.lock:
            state.check_open()
            state.reader_count += 1
        try:
            for _ in range(_ATTEMPTS):
                answer = self._attempt(key, memory)
                if answer is not None:
                    return answer
            return self._count_miss(MissReason.ABSENT)
        finally:
            with state.lock:
                state.reader_count -= 1
                if state.closing:
                    state.changed.notify_all()

    def _attempt(self, key: bytes, memory: Callable[[int], Bytes]) -> Value | Miss | None:
        """None: the value was taken away or moved meanwhile, look again."""
        state = self._state
        with state.lock:
            entry = state.index.get(key)
            pending = state.queue.find(key) if entry is None else None
            if pending is not None and not pending.filled:
                pending = None
            if pending is not None:
                state.queue.pin(pending)
        if entry is not None:
            return self._from_disk(entry, memory(entry.value_bytes))
        if pending is not None:
            return self._from_queue(pending, memory)
        return self._count_miss(MissReason.ABSENT)

    def _from_queue(self, pending: Pending, memory: Callable[[int], Bytes]) -> Value:
        state = self._state
        try:
            out = memory(len(pending.value))
            np.copyto(out, pending.value)
        finally:
            with state.lock:
                state.queue.unpin(pending)
        with state.lock:
            state.counts.hit_total += 1
        return Value(out, promote=False)

    def _from_disk(self, entry: Entry, out: Bytes) -> Value | Miss | None:
        state = self._state
        file = state.files[entry.segment]
        scratch = state.take_scratch()
        reason = MissReason.CORRUPT
        checksum = None
        try:
            checksum = file.read_value(out, entry.page + 1, scratch)
        except OSError as error:
            reason = MissReason.DISK_ERROR
            state.count_disk_error(error)
        state.give_scratch(scratch)
        with state.lock:
            held = state.index.get(entry.key)
            if checksum == entry.value_checksum:
                state.counts.hit_total += 1
                return Value(out, promote=held is not None and state.index.count_hit(entry.key))
            if held is not entry:
                return None
            state.index.drop(entry)
            state.mark(entry)
            if reason is MissReason.CORRUPT:
                state.counts.corrupt_total += 1
            state.counts.miss_total += 1
        return Miss(reason)

    def _count_miss(self, reason: MissReason) -> Miss:
        with self._state.lock:
            self._state.counts.miss_total += 1
        return Miss(reason)
