"""Copying from a segment that this process has mapped."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from snowskin.transfer.memory import Segment
from snowskin.transfer.progress import PullProgress
from snowskin.transfer.table import Table

POLL_LEAST_S = 50e-6
POLL_MOST_S = 1e-3
LOOKS_PER_LIFE_SIGN = 8
"""Whether the peer still lives is asked once in so many looks at its table."""
FEW_BLOCKS = 16
ROUND_BYTES = 8 << 20
"""At most about so much is copied between two looks at generations, cancellation and deadline."""


class Copying:
    """One pull by copying.

    Args:
        source: the segment to read.
        is_alive: whether its owner is.
    """

    def __init__(
        self, source: Segment, is_alive: Callable[[], bool], progress: PullProgress
    ) -> None:
        self._source = source
        self._is_alive = is_alive
        self._progress = progress
        part_bytes = progress.segment.layout.part_bytes
        self._round_parts = max(1, ROUND_BYTES // part_bytes)

    def run(self) -> None:
        """Copy what is ready, wait for more, until nothing is open or the pull must stop."""
        progress = self._progress
        if len(progress.blocks) <= FEW_BLOCKS and not progress.must_stop() and self._copy_few():
            return
        in_range = progress.remote_slots < self._source.layout.slot_count
        progress.missed |= ~in_range | (progress.generations % 2 == 0)
        while len(indices := progress.open_indices()) and not progress.must_stop():
            if self._copy_ready(indices) or self._wait_for_change(indices):
                continue
            # Dead. It may have finished something between our last look and its end.
            if not self._copy_ready(indices):
                return

    def _copy_few(self) -> bool:
        """Copy blocks that are whole one by one; whether that settled all of them.

        For a few blocks that costs half of what numpy does to look at them together.
        """
        progress, source = self._progress, self._source
        table, slot_count = Table(source), source.layout.slot_count
        settled = 0
        for index, block in enumerate(progress.blocks):
            slot, generation = block.remote_slot, block.remote_generation
            is_possible = slot < slot_count and generation % 2 == 1
            if not is_possible or table.generation[slot] != generation:
                progress.miss(index)
            elif table.parts_ready[slot] < progress.part_count:
                continue
            else:
                progress.segment.data[block.local_slot] = source.data[slot]
                if table.generation[slot] == generation:
                    progress.land(index, progress.part_count)
                else:
                    progress.miss(index)
            settled += 1
        return settled == len(progress.blocks)

    def _wait_for_change(self, indices: npt.NDArray[np.intp]) -> bool:
        """Sleep until the table shows something new or the pull must stop; False if it is dead.

        A node may wait on several pulls while its engine computes, so a look must cost little:
        two gathers and two comparisons of bytes.
        """
        progress, table = self._progress, self._source
        slots = progress.remote_slots[indices]
        generations = progress.generations[indices].tobytes()
        parts = progress.parts[indices].astype(np.uint32).tobytes()
        pause_s = POLL_LEAST_S
        looks = 0
        with progress.waiting():
            while not progress.must_stop():
                if looks % LOOKS_PER_LIFE_SIGN == 0 and not self._is_alive():
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, POLL_MOST_S)
                looks += 1
                if (
                    table.parts_ready[slots].tobytes() != parts
                    or table.generation[slots].tobytes() != generations
                ):
                    return True
        return True

    def _copy_ready(self, indices: npt.NDArray[np.intp]) -> bool:
        """One look at the peer's table and one round of copies; whether anything moved."""
        source, progress = self._source, self._progress
        slots = progress.remote_slots[indices]
        live = source.generation[slots] == progress.generations[indices]
        ready = np.minimum(source.parts_ready[slots], progress.part_count).astype(np.int64)
        progress.missed[indices[~live]] = True
        moving = live & (ready > progress.parts[indices])
        if not moving.any():
            return not live.all()
        self._copy_round(indices[moving], ready[moving])
        return True

    def _copy_round(self, indices: npt.NDArray[np.intp], ready: npt.NDArray[np.int64]) -> None:
        """Copy runs of neighbouring slots with equal progress, until the round has enough."""
        progress = self._progress
        begun = progress.parts[indices]
        broken = (
            (np.diff(progress.remote_slots[indices]) != 1)
            | (np.diff(progress.local_slots[indices]) != 1)
            | (np.diff(begun) != 0)
            | (np.diff(ready) != 0)
        )
        starts = np.concatenate(([0], np.flatnonzero(broken) + 1, [len(indices)]))
        budget_parts = self._round_parts
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            first, last = int(begun[start]), int(ready[start])
            at = start
            while at < end and budget_parts > 0:
                width = max(1, min(end - at, budget_parts // (last - first)))
                self._copy_run(indices[at : at + width], first, last)
                budget_parts -= width * (last - first)
                at += width
            if budget_parts <= 0:
                return

    def _copy_run(self, run: npt.NDArray[np.intp], first: int, last: int) -> None:
        """Copy parts ``first`` to ``last`` of neighbouring slots; land those that stayed live."""
        progress, source = self._progress, self._source
        here, there = int(progress.local_slots[run[0]]), int(progress.remote_slots[run[0]])
        count = len(run)
        ours = progress.segment.data[here : here + count, first:last]
        ours[:] = source.data[there : there + count, first:last]
        live = source.generation[there : there + count] == progress.generations[run]
        progress.missed[run[~live]] = True
        if live.any():
            progress.land(run[live], last)
