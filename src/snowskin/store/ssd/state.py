"""What the tier's threads share."""

from __future__ import annotations

import errno
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from snowskin.store.eviction import EvictionPolicy, make_policy
from snowskin.store.ssd.config import SsdConfig
from snowskin.store.ssd.files import PIECE_BYTES, Bytes, SegmentFile, aligned_buffer
from snowskin.store.ssd.index import Entry, SsdIndex
from snowskin.store.ssd.queue import WriteQueue
from snowskin.store.ssd.record import PAGE_BYTES
from snowskin.terms.errors import InvalidInput, SnowskinError

_IDLE_SCRATCH_LIMIT = 8


@dataclass
class Counts:
    """What has happened since the start."""

    hit_total: int = 0
    miss_total: int = 0
    queued_total: int = 0
    held_total: int = 0
    conflict_total: int = 0
    queue_full_total: int = 0
    refused_total: int = 0
    written_total: int = 0
    written_bytes: int = 0
    moved_bytes: int = 0
    evicted_total: int = 0
    removed_total: int = 0
    failed_write_total: int = 0
    disk_full_total: int = 0
    disk_error_total: int = 0
    corrupt_total: int = 0
    lost_at_start_total: int = 0


@dataclass
class TierState:
    """Guarded by ``lock``, except that the writer, which alone changes files, reads without it."""

    directory: Path
    config: SsdConfig
    segment_bytes: int
    files: dict[int, SegmentFile] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counts = field(default_factory=Counts)
    last_epoch: int = 0
    marks: deque[Entry] = field(default_factory=deque)
    """Values that are held no more, but whose records do not say so yet."""
    marked_count: int = 0
    queued_mark_count: int = 0
    unsynced: dict[int, None] = field(default_factory=dict)
    refused_until_s: float = 0.0
    unreported_failures: int = 0
    reader_count: int = 0
    closing: bool = False
    writer_died: bool = False
    scratch: list[Bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        policy: EvictionPolicy[bytes] = make_policy(self.config.eviction)
        self.queue = WriteQueue(self.config.write_queue_bytes)
        self.index = SsdIndex(
            segment_pages=self.segment_bytes // PAGE_BYTES,
            segment_limit=self.config.segment_limit(self.segment_bytes),
            policy=policy,
            promote_after=self.config.promote_after,
        )

    @property
    def value_limit_bytes(self) -> int:
        """The largest value."""
        pages = self.index.value_page_limit - 1
        return min(pages * PAGE_BYTES, self.queue.limit_bytes - PAGE_BYTES)

    def check_open(self) -> None:
        """Refuse what comes after ``close``. With the lock held."""
        if self.closing:
            raise InvalidInput("the SSD tier is closed")
        self.check_writer()

    def check_writer(self) -> None:
        """Raise where work would wait for a thread that is no more. With the lock held."""
        if self.writer_died:
            raise SnowskinError(
                "the thread that writes to the SSD has died of a defect, see its log"
            )

    def take_failures(self) -> int:
        """Writes that failed and nobody was told of yet. With the lock held."""
        failed_count, self.unreported_failures = self.unreported_failures, 0
        return failed_count

    def mark(self, entry: Entry) -> None:
        """Have the writer say on disk that the value is held no more. With the lock held."""
        self.marks.append(entry)
        self.queued_mark_count += 1
        self.changed.notify_all()

    def count_disk_error(self, error: OSError) -> None:
        """Count what the system refused. Without the lock held."""
        with self.lock:
            self._count(error)

    def _count(self, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            self.counts.disk_full_total += 1
        else:
            self.counts.disk_error_total += 1

    def segment_path(self, number: int) -> Path:
        """Of the file with this number."""
        return self.directory / f"segment-{number:05d}.snow"

    def new_epoch(self) -> int:
        """Greater than all before."""
        self.last_epoch += 1
        return self.last_epoch

    def take_scratch(self) -> Bytes:
        """Aligned memory of ``PIECE_BYTES``, to be given back."""
        with self.lock:
            if self.scratch:
                return self.scratch.pop()
        return aligned_buffer(PIECE_BYTES)

    def give_scratch(self, buffer: Bytes) -> None:
        """Keep it for the next; a few at most."""
        with self.lock:
            if len(self.scratch) < _IDLE_SCRATCH_LIMIT:
                self.scratch.append(buffer)
