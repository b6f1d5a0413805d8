"""The reader's side of ``transfer.memory``'s protocol where all memory is read from afar."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from snowskin.transfer.memory import SegmentLayout, SlotState
from snowskin.transfer.progress import PullProgress

Pieces = Sequence[tuple[int, int]]
"""Address and bytes of each."""
LOOK_BLOCKS = 1024
"""So many blocks are looked at with one read of the table."""
ROUND_BYTES = 32 << 20
"""At most about so much is read between two looks at generations, cancellation and deadline."""
PAUSE_LEAST_S = 50e-6
PAUSE_MOST_S = 2e-3
_ENTRY_BYTES = 32
_GENERATION, _CHECKSUM, _PARTS, _STATE = 0, 8, 16, 20
"""Where an entry of a peer's table is put in ours."""
SCRATCH_BYTES = LOOK_BLOCKS * _ENTRY_BYTES


class _Columns:
    """Where the columns of a peer's slot table are."""

    def __init__(self, layout: SegmentLayout, start: int) -> None:
        generation, checksum, parts_ready, state = layout.column_offsets[:4]
        self.generation = start + generation
        self.checksum = start + checksum
        self.parts_ready = start + parts_ready
        self.state = start + state
        self.data = start + layout.table_bytes


class Reading:
    """One pull by one-sided reads. Indices are of its blocks.

    Args:
        layout: of the peer's segment.
        start: address of its mapping there.
        scratch: ``SCRATCH_BYTES`` of ours that can be read into.

    Attributes:
        reached: whether any read succeeded.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        start: int,
        progress: PullProgress,
        scratch: npt.NDArray[np.uint8],
    ) -> None:
        self._layout = layout
        self._columns = _Columns(layout, start)
        self._progress = progress
        self.reached = False
        self._start = scratch.ctypes.data
        entries = scratch.reshape(LOOK_BLOCKS, _ENTRY_BYTES)
        self._generation = entries[:, _GENERATION : _GENERATION + 8].view(np.uint64)[:, 0]
        self._checksum = entries[:, _CHECKSUM : _CHECKSUM + 8].view(np.uint64)[:, 0]
        self._parts = entries[:, _PARTS : _PARTS + 4].view(np.uint32)[:, 0]
        self._state = entries[:, _STATE]

    def run(self, read: Callable[[Pieces, Pieces], None]) -> None:
        """Read until every block has landed or missed, or the pull must stop.

        Args:
            read: reads pieces of the peer's memory (second) into pieces of ours (first).

        Raises:
            OSError: the peer is gone, or does not answer.
        """
        self._read = read
        progress = self._progress
        progress.missed |= progress.remote_slots >= self._layout.slot_count
        progress.missed |= progress.generations % 2 == 0
        pause_s = PAUSE_LEAST_S
        begin = 0
        while len(indices := progress.open_indices()) and not progress.must_stop():
            begin = begin if begin < len(indices) else 0
            window = indices[begin : begin + LOOK_BLOCKS]
            if self._round(window):
                pause_s = PAUSE_LEAST_S
            else:
                begin += len(window)
                if begin >= len(indices):
                    with progress.waiting():
                        time.sleep(pause_s)
                    pause_s = min(2 * pause_s, PAUSE_MOST_S)

    def _round(self, indices: npt.NDArray[np.intp]) -> bool:
        """One look at the peer's table and one round of reads; whether anything moved."""
        progress = self._progress
        indices = self._still_live(indices)
        if not len(indices):
            return True
        self._read_table(indices, generation_only=False)
        count = len(indices)
        ready = np.minimum(self._parts[:count], progress.part_count).astype(np.int64)
        sealed = self._state[:count] == SlotState.SEALED
        checksums = self._checksum[:count].copy()
        moving = np.flatnonzero(ready > progress.parts[indices])
        if not len(moving):
            return False
        part_bytes = self._layout.part_bytes
        sizes_bytes = (ready - progress.parts[indices])[moving] * part_bytes
        fitting = max(1, int(np.searchsorted(np.cumsum(sizes_bytes), ROUND_BYTES, side="right")))
        moving = moving[:fitting]
        self._read_bytes(indices[moving], ready[moving])
        live = set(self._still_live(indices[moving]).tolist())
        for position in moving.tolist():
            index = int(indices[position])
            if index not in live:
                continue
            is_final = ready[position] == progress.part_count and sealed[position]
            slot = progress.blocks[index].local_slot
            if is_final and progress.segment.compute_checksum(slot) != int(checksums[position]):
                progress.reject(index)
            else:
                progress.land(index, int(ready[position]))
        return True

    def _still_live(self, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Those whose slots have the right generation now; the others are misses."""
        progress = self._progress
        self._read_table(indices, generation_only=True)
        live: npt.NDArray[np.bool_] = (
            self._generation[: len(indices)] == progress.generations[indices]
        )
        progress.missed[indices[~live]] = True
        return indices[live]

    def _read_table(self, indices: npt.NDArray[np.intp], *, generation_only: bool) -> None:
        columns = self._columns
        wanted = [(columns.generation, 8, _GENERATION)]
        if not generation_only:
            wanted = [
                (columns.checksum, 8, _CHECKSUM),
                (columns.parts_ready, 4, _PARTS),
                (columns.state, 1, _STATE),
            ]
        slots = self._progress.remote_slots[indices].tolist()
        ours: list[tuple[int, int]] = []
        theirs: list[tuple[int, int]] = []
        for base, entry_bytes, place in wanted:
            for position, slot in enumerate(slots):
                ours.append((self._start + position * _ENTRY_BYTES + place, entry_bytes))
                theirs.append((base + slot * entry_bytes, entry_bytes))
        self._read(ours, theirs)
        self.reached = True

    def _read_bytes(self, indices: npt.NDArray[np.intp], ready: npt.NDArray[np.int64]) -> None:
        progress, layout = self._progress, self._layout
        here = progress.segment.data.ctypes.data
        ours: list[tuple[int, int]] = []
        theirs: list[tuple[int, int]] = []
        for index, parts in zip(indices.tolist(), ready.tolist(), strict=True):
            block, first = progress.blocks[index], int(progress.parts[index])
            offset, length_bytes = first * layout.part_bytes, (parts - first) * layout.part_bytes
            ours.append((here + block.local_slot * layout.slot_bytes + offset, length_bytes))
            there = self._columns.data + block.remote_slot * layout.slot_bytes + offset
            theirs.append((there, length_bytes))
        self._read(ours, theirs)
        self.reached = True
