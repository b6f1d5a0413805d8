"""The two kinds of simulated node. They hold state; ``journey`` moves requests through them.

A node that comes back after its death is a new object, so that late news of the old one is known.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from snowskin.sim.decode import DecodeBatch
from snowskin.sim.job import Placement
from snowskin.sim.memory import NodeMemory
from snowskin.terms.ids import NodeId


class SimNode:
    """What both kinds have."""

    __slots__ = ("memory", "name", "up")

    def __init__(self, name: NodeId, memory: NodeMemory) -> None:
        self.name = name
        self.memory = memory
        self.up = True


class PrefillNode(SimNode):
    """Computes one prompt at a time, first come first served."""

    __slots__ = ("busy_s", "queue", "running")

    def __init__(self, name: NodeId, memory: NodeMemory) -> None:
        super().__init__(name, memory)
        self.queue: deque[Placement] = deque()
        self.running: Placement | None = None
        self.busy_s = 0.0


class DecodeNode(SimNode):
    """Receives prompts' KV into DRAM, then device memory, and decodes them in one batch."""

    __slots__ = ("batch", "due_s", "turn", "wanting")

    def __init__(self, name: NodeId, memory: NodeMemory, batch: DecodeBatch[Any]) -> None:
        super().__init__(name, memory)
        self.batch: DecodeBatch[Placement] = batch
        self.wanting: deque[Placement] = deque()
        """Placements whose KV has no slots here yet."""
        self.due_s: float | None = None
        self.turn = 0
        """Counts the batch's entries in the calendar; only the newest is valid."""
