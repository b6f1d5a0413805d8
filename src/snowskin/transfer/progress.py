"""How far a pull has come: what all transports share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from snowskin.transfer.memory import Segment
from snowskin.transfer.paths import Flight
from snowskin.transfer.slicing import Coverage


class BlockPull(msgspec.Struct, frozen=True):
    """One block to be read: from a peer's slot, if it is still of that generation, into our own."""

    remote_slot: int
    remote_generation: int
    local_slot: int


class PullResult(msgspec.Struct, frozen=True):
    """What a pull brought.

    Attributes:
        landed: for each block asked for, whether all of it is here and right.
        kv_bytes: bytes of the blocks that landed.
        transfer_s: from the call to the last byte, waiting for the source included.
        checksum_failures: blocks whose bytes arrived wrong; they are not among the landed.
        waited_s: of ``transfer_s``, how long nothing was ready to be read.
    """

    landed: tuple[bool, ...]
    kv_bytes: int
    transfer_s: float
    checksum_failures: int
    waited_s: float = 0.0


class PullProgress:
    """The state of one pull. Indices are of its blocks.

    A transport that pulls with several threads changes it under ``lock``.

    Args:
        cancelled: set by any thread to stop the pull.
        on_part: called whenever the number of leading parts that have landed in *every* block
            rises, with that number.
    """

    def __init__(
        self,
        segment: Segment,
        blocks: Sequence[BlockPull],
        *,
        timeout_s: float,
        cancelled: threading.Event | None,
        on_part: Callable[[int], None] | None,
    ) -> None:
        self.segment = segment
        self.blocks = blocks
        self.begin_s = time.monotonic()
        self.deadline_s = self.begin_s + timeout_s
        self.part_count = segment.layout.part_count
        self.parts: npt.NDArray[np.int64] = np.zeros(len(blocks), dtype=np.int64)
        """Leading parts of each block that are here and right."""
        self.missed = np.zeros(len(blocks), dtype=np.bool_)
        self.checksum_failures = 0
        self.waited_s = 0.0
        self.lock = threading.Lock()
        self.flight: Flight | None = None
        """Where all of the pull goes one way: its load on that."""
        self._cancelled = cancelled
        self._on_part = on_part
        self._parts_told = 0
        self._coverage: dict[int, Coverage] = {}

    @cached_property
    def remote_slots(self) -> npt.NDArray[np.intp]:
        """Of each block, where it is at the peer."""
        return np.array([block.remote_slot for block in self.blocks], dtype=np.intp)

    @cached_property
    def local_slots(self) -> npt.NDArray[np.intp]:
        """Of each block, where it goes."""
        return np.array([block.local_slot for block in self.blocks], dtype=np.intp)

    @cached_property
    def generations(self) -> npt.NDArray[np.uint64]:
        """Of each block, the generation that the peer's slot must have."""
        return np.array([block.remote_generation for block in self.blocks], dtype=np.uint64)

    def open_indices(self) -> npt.NDArray[np.intp]:
        """Blocks that are neither whole nor missed."""
        return np.flatnonzero(~self.missed & (self.parts < self.part_count))

    def must_stop(self) -> bool:
        """Whether the pull was cancelled or its time is over."""
        if self._cancelled is not None and self._cancelled.is_set():
            return True
        return time.monotonic() >= self.deadline_s

    def land(self, indices: npt.NDArray[np.intp] | int, parts: int) -> None:
        """The first ``parts`` parts of these blocks are in place: let our own readers have them."""
        slots = (
            self.blocks[indices].local_slot
            if isinstance(indices, int)
            else self.local_slots[indices]
        )
        self.parts[indices] = parts
        self.segment.publish(slots, parts)
        if self._on_part is not None:
            least = int(self.parts.min())
            if least > self._parts_told:
                self._parts_told = least
                self._on_part(least)

    def land_bytes(self, index: int, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` of a block are in place, in whatever order they come."""
        layout = self.segment.layout
        if stop - start == layout.slot_bytes:
            self.land(index, layout.part_count)
            return
        coverage = self._coverage.get(index)
        if coverage is None:
            coverage = self._coverage[index] = Coverage()
        before = coverage.leading_bytes // layout.part_bytes
        parts = coverage.add(start, stop) // layout.part_bytes
        if parts > before:
            self.land(index, parts)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While this lasts, the source has nothing ready."""
        begin_s = time.monotonic()
        if self.flight is not None:
            self.flight.is_waiting = True
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - begin_s
            if self.flight is not None:
                self.flight.is_waiting = False

    def miss(self, index: int) -> None:
        """This block cannot be had."""
        self.missed[index] = True

    def reject(self, index: int) -> None:
        """This block arrived, but its bytes are not those that the source stored."""
        self.missed[index] = True
        self.checksum_failures += 1
        self.segment.publish(self.blocks[index].local_slot, 0)

    def result(self) -> PullResult:
        """What has come of it."""
        whole = self.part_count
        pairs = zip(self.parts.tolist(), self.missed.tolist(), strict=True)
        landed = tuple(parts == whole and not missed for parts, missed in pairs)
        return PullResult(
            landed=landed,
            kv_bytes=sum(landed) * self.segment.layout.slot_bytes,
            transfer_s=time.monotonic() - self.begin_s,
            checksum_failures=self.checksum_failures,
            waited_s=self.waited_s,
        )
