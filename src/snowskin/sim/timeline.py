"""The state of the simulated cluster at regular times, for pictures over time."""

from __future__ import annotations

import numpy as np

from snowskin.sim.calendar import Rank
from snowskin.sim.nodes import DecodeNode, PrefillNode
from snowskin.sim.world import World, block_keys
from snowskin.trace.records import Ints, Trace

HOT_BLOCKS = 8
"""So many of the trace's most used chains of blocks are watched."""


class Timeline:
    """Samples of a world; one list for each curve, all of one length.

    Args:
        interval_s: simulated time between samples.
    """

    def __init__(self, world: World, *, interval_s: float) -> None:
        self._world = world
        self._interval_s = interval_s
        self._hot = block_keys(hot_blocks(world.trace))
        self.times_s: list[float] = []
        self.prefill_load: list[float] = []
        """Requests in prefill or in its queues, for each prefill node."""
        self.decode_load: list[float] = []
        """Requests in decode or waiting for it, for each decode node."""
        self.hit_ratio: list[float] = []
        """Reused / prompt tokens of the prefills started so far."""
        self.replicas: list[list[int]] = []
        """Nodes that hold each of the hot blocks, the most used first."""
        world.calendar.at(0.0, Rank.CONDUCTOR, self._sample, None)

    def _sample(self, _: None) -> None:
        world = self._world
        prefill = [node for node in world.nodes.values() if isinstance(node, PrefillNode)]
        decode = [node for node in world.nodes.values() if isinstance(node, DecodeNode)]
        in_prefill = sum(len(node.queue) + (node.running is not None) for node in prefill)
        in_decode = sum(node.batch.running_count + node.batch.waiting_count for node in decode)
        started, reused = world.journey.started_tokens, world.journey.reused_tokens
        self.times_s.append(world.calendar.now_s)
        self.prefill_load.append(in_prefill / max(1, len(prefill)))
        self.decode_load.append(in_decode / max(1, len(decode)))
        self.hit_ratio.append(reused / started if started else 0.0)
        directory = world.conductor.directory
        self.replicas.append([directory.replica_count(key) for key in self._hot])
        if not world.is_over:
            due_s = world.calendar.now_s + self._interval_s
            world.calendar.at(due_s, Rank.CONDUCTOR, self._sample, None)


def hot_blocks(trace: Trace) -> Ints:
    """Ids of the trace's most used blocks, the most used first; equals by their first use.

    Blocks that are used equally often and came with the same request are one chain, of which the
    first block stands for all.
    """
    ids, first_use, counts = np.unique(trace.block_ids, return_index=True, return_counts=True)
    first_request = np.searchsorted(trace.block_starts, first_use, side="right")
    chosen: dict[tuple[int, int], int] = {}
    for at in np.lexsort((first_use, -counts)):
        chosen.setdefault((int(counts[at]), int(first_request[at])), int(ids[at]))
        if len(chosen) == HOT_BLOCKS:
            break
    return np.array(list(chosen.values()), dtype=np.int64)
