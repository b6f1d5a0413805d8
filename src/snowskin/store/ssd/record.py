"""What the bytes on the SSD mean: the headers of segment files and of the records in them. Pure.

A segment file is a run of pages of 4 KiB. Its first two each hold the same segment header, so that
one bad page does not cost the file. Records follow, each of them a page with its header and key,
then its value, filled up to whole pages: a page-aligned value moves between disk and a page-aligned
buffer without a copy, and a record lost to a bad header ends at the next page with a good one.

Every record's header carries an xxh3-64 checksum of itself and its key, seeded with its place and
with the file's nonce, which is drawn anew whenever the file is reused: neither a record of an
earlier use nor a value that is the image of a record can pass for one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from snowskin.terms.errors import InvalidInput

PAGE_BYTES = 4096
SEGMENT_HEADER_PAGES = 2
KEY_LIMIT_BYTES = 1024
RECORD_MAGIC = b"SkRc"

_RECORD = struct.Struct("<4sHHQQI20xQ")  # …, header checksum
_SEGMENT_MAGIC = b"SnowskinSegment\n"
_SEGMENT = struct.Struct("<16sIIQQQQ")  # …, header checksum
_VERSION = 1


class RecordKind(IntEnum):
    """What a record says."""

    VALUE = 1
    """Its key has this value."""
    DEAD = 2
    """It was a value, since removed, evicted or found elsewhere. Its pages are void. Of neighbours
    that were evicted together the first says so for all: its size covers their records, which a
    start would find again only if that page were damaged."""
    END = 3
    """Nothing follows in this file."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The first page of a record.

    Attributes:
        value_checksum: xxh3-64 of the value.
        depth: index of the block in its chain; 0 for other objects.
    """

    kind: RecordKind
    key: bytes
    value_bytes: int
    value_checksum: int
    depth: int

    @property
    def page_count(self) -> int:
        """Pages of the whole record."""
        return record_pages(self.value_bytes)


END = RecordHeader(RecordKind.END, b"", 0, 0, 0)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first page of a file. Files are ordered by ``epoch``, which no two uses share."""

    epoch: int
    nonce: int
    segment_bytes: int

    def seed(self, page: int) -> int:
        """Of the checksum of a record's header at a page."""
        return (self.nonce + page) % 2**64


def record_pages(value_bytes: int) -> int:
    """Pages of a record with a value of this size."""
    return 1 + -(-value_bytes // PAGE_BYTES)


def pack_record(header: RecordHeader, seed: int) -> bytes:
    """The bytes of a record's header and key, less than a page."""
    head = _RECORD.pack(
        RECORD_MAGIC,
        header.kind,
        len(header.key),
        header.value_bytes,
        header.value_checksum,
        header.depth,
        0,
    )[:-8]
    return head + _checksum(head + header.key, seed) + header.key


def parse_record(page: bytes, seed: int) -> RecordHeader | None:
    """The header at the start of a page; None if there is none of this place and use."""
    if len(page) < _RECORD.size or not page.startswith(RECORD_MAGIC):
        return None
    _, kind, key_bytes, value_bytes, value_checksum, depth, _ = _RECORD.unpack_from(page)
    if key_bytes > KEY_LIMIT_BYTES:
        return None
    key = page[_RECORD.size : _RECORD.size + key_bytes]
    head = page[: _RECORD.size - 8]
    if page[_RECORD.size - 8 : _RECORD.size] != _checksum(head + key, seed):
        return None
    return RecordHeader(RecordKind(kind), key, value_bytes, value_checksum, depth)


def pack_segment(header: SegmentHeader) -> bytes:
    """The bytes of a segment header."""
    head = _SEGMENT.pack(
        _SEGMENT_MAGIC, _VERSION, PAGE_BYTES, header.epoch, header.nonce, header.segment_bytes, 0
    )[:-8]
    return head + _checksum(head, 0)


def parse_segment(page: bytes) -> SegmentHeader | None:
    """The segment header at the start of a page; None if it is damaged or was never written.

    Raises:
        InvalidInput: whole, but of another version of this layout.
    """
    if len(page) < _SEGMENT.size:
        return None
    magic, version, page_bytes, epoch, nonce, segment_bytes, _ = _SEGMENT.unpack_from(page)
    end = _SEGMENT.size - 8
    if magic != _SEGMENT_MAGIC or page[end : end + 8] != _checksum(page[:end], 0):
        return None
    if (version, page_bytes) != (_VERSION, PAGE_BYTES):
        raise InvalidInput(
            f"the SSD directory has layout version {version} with pages of {page_bytes} bytes; "
            f"this is version {_VERSION} with {PAGE_BYTES}: choose an empty directory"
        )
    return SegmentHeader(epoch, nonce, segment_bytes)


def _checksum(data: bytes, seed: int) -> bytes:
    return int(xxhash.xxh3_64_intdigest(data, seed)).to_bytes(8, "little")
