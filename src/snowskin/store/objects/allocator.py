"""Where objects of any size lie in a node's memory: pure, with low fragmentation.

Good fit from segregated lists (after TLSF, Masmano et al. 2004): free extents are binned by size,
sixteen bins to each power of two, so that a fitting one is found in constant time and wastes at
most a sixteenth. A freed extent is merged with its free neighbours at once. When no extent is
large enough, an object is laid out in several large pieces; so room that was freed here and there
is of use at once, without moving anything.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import msgspec

_BINS_BITS = 4
_LOOKS_LIMIT = 32
PIECE_LEAST_BYTES = 64 << 10
"""No piece of a divided object is smaller, except its last."""
PIECES_LIMIT = 64
"""Most pieces of one object; what the kernel gathers in one call is far more."""


class Extent(NamedTuple):
    """A run of bytes in the segment."""

    offset: int
    length_bytes: int


class AllocatorStat(msgspec.Struct, frozen=True):
    """Bytes now."""

    capacity_bytes: int
    free_bytes: int
    largest_free_bytes: int
    free_extents: int

    @property
    def fragmentation_ratio(self) -> float:
        """How much of the free memory is not in its largest piece, 0 to 1."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0


class ExtentAllocator:
    """Hands out extents of ``capacity_bytes``, all of them multiples of ``granule_bytes``."""

    def __init__(self, capacity_bytes: int, *, granule_bytes: int) -> None:
        self._granule_bytes = granule_bytes
        self.capacity_bytes = capacity_bytes // granule_bytes * granule_bytes
        self.free_bytes = 0
        # In granules: start → length, end → start, and the bins; bit b of the mask: bin b has one.
        self._length: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._bins: dict[int, dict[int, None]] = {}
        self._mask = 0
        self._add(0, self.capacity_bytes // granule_bytes)

    def rounded(self, size_bytes: int) -> int:
        """Bytes that an object of this size takes; an empty one takes a granule too."""
        return max(1, -(-size_bytes // self._granule_bytes)) * self._granule_bytes

    def allocate(self, size_bytes: int) -> tuple[Extent, ...] | None:
        """Extents of ``rounded(size_bytes)`` bytes in all, or None where there is no room."""
        wanted = self.rounded(size_bytes) // self._granule_bytes
        if wanted * self._granule_bytes > self.free_bytes:
            return None
        start = self._find(wanted)
        if start is not None:
            return (self._take(start, wanted),)
        return self._gather(wanted)

    def free(self, extents: tuple[Extent, ...]) -> None:
        """Give extents back, exactly as they were handed out."""
        for extent in extents:
            start = extent.offset // self._granule_bytes
            length = extent.length_bytes // self._granule_bytes
            after = self._length.get(start + length)
            if after is not None:
                self._remove(start + length, after)
                length += after
            before = self._start_of_end.get(start)
            if before is not None:
                length += start - before
                self._remove(before, start - before)
                start = before
            assert start not in self._length, f"the extent at {extent.offset} is free already"
            self._add(start, length)

    def stat(self) -> AllocatorStat:
        """A snapshot."""
        largest = 0
        if self._mask:
            largest = max(self._length[start] for start in self._bins[self._mask.bit_length() - 1])
        return AllocatorStat(
            capacity_bytes=self.capacity_bytes,
            free_bytes=self.free_bytes,
            largest_free_bytes=largest * self._granule_bytes,
            free_extents=len(self._length),
        )

    def _find(self, wanted: int) -> int | None:
        """Start of a free extent with at least so many granules, of the smallest bin that fits."""
        own = _bin_of(wanted)
        larger = self._mask >> (own + 1)
        # The own bin may hold many that are just too small.
        for start in islice(self._bins.get(own, ()), 1 if larger else _LOOKS_LIMIT):
            if self._length[start] >= wanted:
                return start
        if not larger:
            return None
        number = own + (larger & -larger).bit_length()
        return next(iter(self._bins[number]))

    def _gather(self, wanted: int) -> tuple[Extent, ...] | None:
        least = -(-PIECE_LEAST_BYTES // self._granule_bytes)
        pieces: list[Extent] = []
        while wanted:
            start = None
            if self._mask and len(pieces) < PIECES_LIMIT:
                start = next(iter(self._bins[self._mask.bit_length() - 1]))
            if start is None or self._length[start] < min(least, wanted):
                self.free(tuple(pieces))
                return None
            piece = self._take(start, min(wanted, self._length[start]))
            pieces.append(piece)
            wanted -= piece.length_bytes // self._granule_bytes
        return tuple(pieces)

    def _take(self, start: int, count: int) -> Extent:
        length = self._length[start]
        self._remove(start, length)
        if length > count:
            self._add(start + count, length - count)
        return Extent(start * self._granule_bytes, count * self._granule_bytes)

    def _add(self, start: int, length: int) -> None:
        if not length:
            return
        number = _bin_of(length)
        self._length[start] = length
        self._start_of_end[start + length] = start
        self._bins.setdefault(number, {})[start] = None
        self._mask |= 1 << number
        self.free_bytes += length * self._granule_bytes

    def _remove(self, start: int, length: int) -> None:
        number = _bin_of(length)
        del self._length[start]
        del self._start_of_end[start + length]
        bin_of_size = self._bins[number]
        del bin_of_size[start]
        if not bin_of_size:
            del self._bins[number]
            self._mask ^= 1 << number
        self.free_bytes -= length * self._granule_bytes


def _bin_of(length: int) -> int:
    """Bins are in order of size; each of the first sixteen sizes has one of its own."""
    if length < 1 << _BINS_BITS:
        return length
    shift = length.bit_length() - 1 - _BINS_BITS
    return (shift << _BINS_BITS) + (length >> shift)
