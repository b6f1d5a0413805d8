"""The words in which the SSD tier answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from snowskin.store.ssd.files import Bytes

WRITE_RETRY_S = 1.0
"""How long writes are refused after the disk failed or was full, before it is tried again."""


class WriteOutcome(Enum):
    """What became of a write."""

    QUEUED = "queued"
    """It can be read from now on, and will be on disk soon."""
    HELD = "held"
    """The key had this very value already: nothing was to be done."""
    CONFLICT = "conflict"
    """The key has another value, which stays: remove it first."""
    QUEUE_FULL = "queue-full"
    """The disk does not keep up: try later, or drop the value."""
    REFUSED = "refused"
    """The disk is full or failing; it is tried again after ``WRITE_RETRY_S``."""


class MissReason(Enum):
    """Why there are no bytes."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    """They were not those that had been written; the entry is gone, and counted."""
    DISK_ERROR = "disk-error"
    """The system could not read them; the entry is gone, and counted."""


@dataclass(frozen=True, slots=True)
class Miss:
    """There are no bytes for the key. The buffer of the read may hold anything."""

    reason: MissReason


@dataclass(frozen=True, slots=True)
class Hit:
    """The value is in the caller's buffer, whole and right.

    Attributes:
        promote: it has been read so often that the caller should keep it in DRAM.
    """

    value_bytes: int
    promote: bool


@dataclass(frozen=True, slots=True)
class Value:
    """A value in memory of its own; see ``Hit``."""

    data: Bytes
    promote: bool


class HeldValue(msgspec.Struct, frozen=True):
    """A value on disk, as a node reports it."""

    key: bytes
    value_bytes: int
    depth: int


class Flushed(msgspec.Struct, frozen=True):
    """All writes and removals before the call are settled.

    Attributes:
        failed_count: values since the last flush that had been QUEUED, but are not held, as the
            disk was full or failed.
        complete: False if the time ran out first, or the disk refused to sync.
    """

    complete: bool
    failed_count: int


class SsdStat(msgspec.Struct, frozen=True):
    """What the tier holds now, and what has happened since it was opened."""

    capacity_bytes: int
    segment_bytes: int
    segment_count: int
    """Files that exist; times ``segment_bytes`` it is what the tier takes of the disk."""
    value_count: int
    live_bytes: int
    """Pages of the values held, headers and filling included."""
    queued_bytes: int
    value_limit_bytes: int
    direct_io: bool
    """O_DIRECT is in use."""
    open_s: float
    """What it took to find out what the directory holds."""
    hit_total: int
    miss_total: int
    """Reads without bytes, for whichever reason."""
    queued_total: int
    held_total: int
    conflict_total: int
    queue_full_total: int
    refused_total: int
    written_total: int
    """Values that reached the disk."""
    written_bytes: int
    """Pages of these, headers and filling included."""
    moved_bytes: int
    """Pages written again, to empty files."""
    evicted_total: int
    removed_total: int
    failed_write_total: int
    """Values that had been queued, but never reached the disk."""
    disk_full_total: int
    disk_error_total: int
    corrupt_total: int
    """Values whose bytes were not those that had been written, or not there; found by reads."""
    lost_at_start_total: int
    """Records found torn or damaged when the directory was opened."""
