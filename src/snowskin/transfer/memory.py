"""A node's segment: the memory that it lends to the pool, and the table that says what is in it.

One memfd holds both. It has no name, so nothing is left behind when its last process dies. Only
its owner writes (the kernel refuses later writable mappings where it can); the owner's Messenger
and peers on the same host map it to read.

The protocol between the owner and readers in other processes is a sequence lock per slot. Its
word is the slot's ``generation``: even while the slot is free, odd while it is in use, and never
the same twice.

=========  ==================================================================================
owner      order of writes
=========  ==================================================================================
begin      parts_ready = 0, checksum = 0, key, state = WRITING, then generation + 1 (now odd)
publish    the bytes of the parts, then parts_ready
seal       the bytes of all parts, then key, checksum, parts_ready, then state = SEALED
retire     generation + 1 (now even), then state = FREE; the bytes may change from here on
=========  ==================================================================================

A reader is told slot and generation by a message. It reads generation, then parts_ready (and
state), copies no more than the ready parts, and reads generation again: if both times it was the
one told, the bytes are those meant; if not, the block is a miss.

Why this suffices: each table access is one aligned load or store of at most 8 bytes, made by a
separate call into numpy, so neither a compiler merges or reorders them nor can they tear; and x86
keeps stores in order, and loads in order (bulk copies included, as a store after a copy is not
seen before it). On ARM the hardware gives no such promise and numpy no fence, so there a reader
may in theory see ``parts_ready`` before the bytes; Snowskin is tested on x86-64 alone.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import BlockKey
from snowskin.transfer.available import available_bytes

KEY_BYTES = 16
_PAGE_BYTES = 4096
_CACHE_LINE_BYTES = 64
_PREFAULT_STRIDE_BYTES = 256 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it.
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module does not name it.


class SlotState(enum.IntEnum):
    """What a slot's bytes are."""

    FREE = 0
    WRITING = 1
    SEALED = 2


class SegmentLayout(msgspec.Struct, frozen=True):
    """The shape of a segment: ``slot_count`` blocks, each ``part_count`` parts (layers).

    Raises:
        InvalidInput: a size that is not positive, or a block that does not split into its parts.
    """

    slot_count: int
    slot_bytes: int
    part_count: int

    def __post_init__(self) -> None:
        for name in ("slot_count", "slot_bytes", "part_count"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.slot_bytes % self.part_count:
            raise InvalidInput(
                f"slot_bytes {self.slot_bytes} does not split into {self.part_count} equal parts"
            )

    @property
    def part_bytes(self) -> int:
        """Bytes of one part (one layer of one block)."""
        return self.slot_bytes // self.part_count

    @property
    def data_bytes(self) -> int:
        """Bytes of all slots together."""
        return self.slot_count * self.slot_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes before the first slot: the slot table, rounded up to whole pages."""
        return _round_up(self.column_offsets[-1], _PAGE_BYTES)

    @property
    def column_offsets(self) -> tuple[int, ...]:
        """Where generation, checksum, parts_ready, state and key begin, and where they end."""
        return tuple(_table_offsets(self.slot_count))

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole mapping."""
        return self.table_bytes + _round_up(self.data_bytes, _PAGE_BYTES)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _table_offsets(slot_count: int) -> list[int]:
    """Where each column of the table begins, and where the last one ends."""
    offsets = [0]
    for entry_bytes in (8, 8, 4, 1, KEY_BYTES):
        offsets.append(_round_up(offsets[-1] + entry_bytes * slot_count, _CACHE_LINE_BYTES))
    return offsets


class Segment:
    """A mapped segment. Make one with ``create`` (the owner) or ``attach`` (a reader).

    Attributes:
        data: ``[slot_count, part_count, part_bytes]`` uint8, a view of the mapping; read-only
            for a reader.
        generation: ``[slot_count]`` uint64, see the module's page for the protocol.
        parts_ready: ``[slot_count]`` uint32, leading parts of each slot that may be read.
        state: ``[slot_count]`` uint8 of ``SlotState``.
        checksum: ``[slot_count]`` uint64, xxh3-64 of a sealed slot's bytes.
        key: ``[slot_count, 16]`` uint8.
        prefault_s: what it took to have every page present; 0 for a reader.
    """

    def __init__(self, fd: int, layout: SegmentLayout, *, owner: bool) -> None:
        self.fd = fd
        self.layout = layout
        self.owner = owner
        self.prefault_s = 0.0
        access = mmap.PROT_READ | mmap.PROT_WRITE if owner else mmap.PROT_READ
        self._map = mmap.mmap(fd, layout.total_bytes, flags=mmap.MAP_SHARED, prot=access)
        count = layout.slot_count
        offsets = _table_offsets(count)
        raw = np.frombuffer(self._map, dtype=np.uint8)
        self.generation: npt.NDArray[np.uint64] = _column(raw, offsets[0], 8 * count).view(
            np.uint64
        )
        self.checksum: npt.NDArray[np.uint64] = _column(raw, offsets[1], 8 * count).view(np.uint64)
        self.parts_ready: npt.NDArray[np.uint32] = _column(raw, offsets[2], 4 * count).view(
            np.uint32
        )
        self.state: npt.NDArray[np.uint8] = _column(raw, offsets[3], count)
        keys = _column(raw, offsets[4], KEY_BYTES * count)
        self.key: npt.NDArray[np.uint8] = keys.reshape(count, KEY_BYTES)
        start = layout.table_bytes
        self.data: npt.NDArray[np.uint8] = raw[start : start + layout.data_bytes].reshape(
            count, layout.part_count, layout.part_bytes
        )

    @classmethod
    def create(cls, layout: SegmentLayout) -> Segment:
        """A new segment with all slots free and all pages present.

        Raises:
            InvalidInput: more memory than is available, or a system without memfd. Checked
                beforehand, as running out later would kill the process.
        """
        if not hasattr(os, "memfd_create"):
            raise InvalidInput("segments need Linux (memfd_create); this system has none")
        available = available_bytes()
        if available is not None and layout.total_bytes > available:
            raise InvalidInput(
                f"a segment of {layout.slot_count} blocks takes {layout.total_bytes} bytes, but "
                f"only {available} are available; choose fewer blocks (at most "
                f"{available // layout.slot_bytes}) or free memory"
            )
        fd = os.memfd_create("snowskin-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.total_bytes)
            segment = cls(fd, layout, owner=True)
        except BaseException:
            os.close(fd)
            raise
        segment.prefault_s = _prefault(segment._map)
        _seal_against_others(fd)
        return segment

    @classmethod
    def attach(cls, fd: int, layout: SegmentLayout) -> Segment:
        """Map an existing segment to read. Takes ownership of ``fd``, even if it raises.

        Raises:
            InvalidInput: the file's size is not the layout's.
        """
        try:
            file_bytes = os.fstat(fd).st_size
            if file_bytes != layout.total_bytes:
                raise InvalidInput(
                    f"the segment has {file_bytes} bytes, its layout says {layout.total_bytes}"
                )
            return cls(fd, layout, owner=False)
        except BaseException:
            os.close(fd)
            raise

    def begin(self, slot: int, key: BlockKey | None) -> int:
        """Take a free slot into use (no part ready) and give its new, odd generation."""
        generation = int(self.generation[slot]) + 1
        assert generation % 2 == 1, f"slot {slot} is in use already"
        self.parts_ready[slot] = 0
        self.checksum[slot] = 0
        self._write_key(slot, key)
        self.state[slot] = SlotState.WRITING
        self.generation[slot] = generation
        return generation

    def publish(self, slots: Sequence[int] | npt.NDArray[np.intp] | int, parts_ready: int) -> None:
        """Let readers have the first ``parts_ready`` parts of slots, whose bytes are in place."""
        self.parts_ready[slots] = parts_ready

    def seal(self, slot: int, key: BlockKey | None = None) -> int:
        """Declare all bytes of a slot final; its checksum, which is stored beside it.

        Args:
            key: the block's key if ``begin`` was not told it.
        """
        assert self.state[slot] == SlotState.WRITING, f"slot {slot} is not being written"
        checksum = self.compute_checksum(slot)
        if key is not None:
            self._write_key(slot, key)
        self.checksum[slot] = checksum
        self.parts_ready[slot] = self.layout.part_count
        self.state[slot] = SlotState.SEALED
        return checksum

    def retire(self, slot: int) -> None:
        """Free a slot in use; readers that still hold its generation have a miss from now on."""
        generation = int(self.generation[slot]) + 1
        assert generation % 2 == 0, f"slot {slot} is free already"
        self.generation[slot] = generation
        self.state[slot] = SlotState.FREE

    def compute_checksum(self, slot: int) -> int:
        """xxh3-64 of the slot's bytes as they are now."""
        return int(xxhash.xxh3_64_intdigest(self.data[slot]))

    def close(self) -> None:
        """Let go of the mapping and the descriptor. Idempotent.

        Arrays taken from ``data`` or the table keep the pages mapped until the last of them is
        gone, so a view in use never turns into a fault; this object's own arrays are emptied.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        for name in ("generation", "checksum", "parts_ready", "state", "key", "data"):
            setattr(self, name, getattr(self, name)[:0].copy())
        with contextlib.suppress(BufferError):
            self._map.close()  # A view elsewhere: the pages go with the last one.

    def _write_key(self, slot: int, key: BlockKey | None) -> None:
        self.key[slot] = np.frombuffer(key or bytes(KEY_BYTES), dtype=np.uint8)


def _column(raw: npt.NDArray[np.uint8], offset: int, length_bytes: int) -> npt.NDArray[np.uint8]:
    return raw[offset : offset + length_bytes]


def _prefault(mapping: mmap.mmap) -> float:
    """Have every page present now, so that no later write pays for it; the time it took."""
    begin_s = time.perf_counter()
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, len(mapping), _PREFAULT_STRIDE_BYTES):
        length = min(_PREFAULT_STRIDE_BYTES, len(mapping) - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError:
            # An older kernel: a write to each page has the same effect. The pages are all zero.
            np.frombuffer(mapping, dtype=np.uint8, count=length, offset=start)[::_PAGE_BYTES] = 0
    return time.perf_counter() - begin_s


def _seal_against_others(fd: int) -> None:
    """Fix the size, and refuse writable mappings other than the owner's, where supported."""
    size = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for seals in (size, _F_SEAL_FUTURE_WRITE, fcntl.F_SEAL_SEAL):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
