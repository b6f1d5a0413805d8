"""What reports note of a simulated world on its way: landings, replicas over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from snowskin.sim.calendar import Rank
from snowskin.sim.world import World, block_keys
from snowskin.terms.events import Event, KvLanded


class TransferLog:
    """What a world's Conductor is told of transfers: give its ``note`` to the world."""

    def __init__(self) -> None:
        self.landed_s: list[float] = []
        """When each prompt's KV was whole at its decode node."""
        self.sent_s: list[float] = []
        """How long each prompt's KV was on its way there."""
        self.sent_bytes: list[int] = []

    def note(self, event: Event, now_s: float) -> None:
        """The Conductor is told this now."""
        if isinstance(event, KvLanded):
            self.landed_s.append(now_s)
            self.sent_s.append(event.transfer_s)
            self.sent_bytes.append(event.kv_bytes)


class ReplicaWatch:
    """Counts the replicas of every block at regular times (FAST Fig. 11).

    Args:
        interval_s: simulated time between samples.
    """

    def __init__(self, world: World, *, interval_s: float) -> None:
        self._world = world
        self._interval_s = interval_s
        ids = np.unique(world.trace.block_ids)
        self._keys = block_keys(ids)
        self.times_s: list[float] = []
        self._counts: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        world.calendar.at(interval_s, Rank.CONDUCTOR, self._sample, None)

    def _sample(self, _: None) -> None:
        world = self._world
        count = world.conductor.directory.replica_count
        self.times_s.append(world.calendar.now_s)
        self._counts.append(
            np.fromiter((count(key) for key in self._keys), np.uint8, len(self._keys))
        )
        if not world.is_over:
            due_s = world.calendar.now_s + self._interval_s
            world.calendar.at(due_s, Rank.CONDUCTOR, self._sample, None)

    def ranked(self, ranks: Sequence[int]) -> list[list[int]]:
        """Replicas over time of the keys at these ranks (from 1) by their sum over all samples.

        A rank beyond the last key gives the last key.
        """
        counts = np.array(self._counts)
        order = np.argsort(-counts.sum(axis=0, dtype=np.int64), kind="stable")
        picked = [order[min(rank, len(order)) - 1] for rank in ranks]
        return [counts[:, key].tolist() for key in picked]
