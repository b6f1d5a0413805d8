"""How a node uses a directory on its SSD: the options of the tier, checked once."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from snowskin.store.ssd.record import PAGE_BYTES, SEGMENT_HEADER_PAGES
from snowskin.terms.errors import InvalidInput

_MIB = 1 << 20
_SEGMENT_COUNT_LIMIT = 1024


class Sync(StrEnum):
    """When what was written is made to survive a power cut. A killed process loses nothing."""

    NEVER = "never"
    FLUSH = "flush"
    """At each ``flush``, and before an older copy of moved values is given up."""
    BATCH = "batch"
    """As FLUSH, and after each batch of writes."""


class SsdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a node uses a directory on its SSD.

    Raises:
        InvalidInput: a value out of bounds.
    """

    capacity_bytes: int
    """Most bytes of segment files; values use up to 80 % of all of them but one."""
    eviction: str = "lru"
    """Name of the eviction policy, see ``store.eviction.POLICIES``."""
    write_queue_bytes: int = 64 * _MIB
    """Memory for values that are not on disk yet; also bounds a value."""
    batch_bytes: int = 8 * _MIB
    """Most that one write appends, unless a value alone is larger."""
    segment_bytes: int | None = None
    """Size of a file, for a new directory (an old one keeps its own). None: a 32nd of the
    capacity, from 1 MiB to 1 GiB, or a 256th if that is more. Bounds a value; at least 16 times
    the usual value keeps little of each file unfilled."""
    sync: Sync = Sync.FLUSH
    promote_after: int = 2
    """Reads of a value until it is worth a place in DRAM."""
    direct_io: bool = True
    """Pass the page cache by, where the file system lets us."""

    def __post_init__(self) -> None:
        smallest = (SEGMENT_HEADER_PAGES + 2) * PAGE_BYTES
        if self.new_segment_bytes < smallest or self.new_segment_bytes % PAGE_BYTES:
            raise InvalidInput(
                f"segment_bytes is {self.new_segment_bytes}; it must be a multiple of "
                f"{PAGE_BYTES}, and {smallest} at least"
            )
        self.segment_limit(self.new_segment_bytes)
        for name, least in (("write_queue_bytes", 2 * PAGE_BYTES), ("batch_bytes", PAGE_BYTES)):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.promote_after < 1:
            raise InvalidInput(f"promote_after is {self.promote_after}; it must be at least 1")

    @property
    def new_segment_bytes(self) -> int:
        """Size of the files of a new directory."""
        if self.segment_bytes is not None:
            return self.segment_bytes
        mebibytes = self.capacity_bytes // _MIB
        return max(1, min(mebibytes // 32, 1024), mebibytes // 256) * _MIB

    def segment_limit(self, segment_bytes: int) -> int:
        """How many files of this size the capacity allows.

        Raises:
            InvalidInput: less than 3, or too many to keep open.
        """
        count = self.capacity_bytes // segment_bytes
        if count < 3:
            raise InvalidInput(
                f"capacity_bytes is {self.capacity_bytes}; it must be at least 3 segment files of "
                f"{segment_bytes} bytes"
            )
        if count > _SEGMENT_COUNT_LIMIT:
            raise InvalidInput(
                f"capacity_bytes {self.capacity_bytes} makes {count} segment files of "
                f"{segment_bytes} bytes; choose segment_bytes so that it makes at most "
                f"{_SEGMENT_COUNT_LIMIT}"
            )
        return count
