"""One prefill pass: the prompts in computation, and the KV that moves beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from snowskin.engine.batching import Chunk
from snowskin.engine.kv import BlockSlots, SequenceKv
from snowskin.engine.loader import LoadGate
from snowskin.store.blocks import BlockStore
from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import SlotIndex
from snowskin.terms.request import GenerationRequest


@dataclass(slots=True)
class PrefillJob:
    """A prompt in computation. Only the engine's thread changes it, but for ``cancelled``."""

    request: GenerationRequest
    kv: SequenceKv
    blocks: tuple[PlacedBlock, ...]
    reused_blocks: int
    """Leading blocks that were committed before; they are never written."""
    done_tokens: int
    started_s: float
    work_s: float = 0.0
    """Of the engine's time so far, by its share of each pass."""
    gate: LoadGate | None = None
    cancelled: bool = False
    slots: list[SlotIndex] = field(init=False)
    slot_index: Any = field(init=False)
    """The slots as an ``int64`` tensor."""

    def __post_init__(self) -> None:
        self.slots = [block.slot for block in self.blocks]
        self.slot_index = torch.tensor(self.slots)

    @property
    def failure(self) -> str | None:
        """Why its reused KV could not be loaded; what was computed since is void."""
        return None if self.gate is None else self.gate.failure


class LayerwiseStore:
    """Watches a pass: loads what is reused, and publishes what is new, layer by layer."""

    def __init__(
        self, work: Sequence[tuple[PrefillJob, Chunk]], slots: BlockSlots, store: BlockStore
    ) -> None:
        self._slots = slots
        self._store = store
        self._gates = [job.gate for job, _ in work if job.gate is not None]
        block_tokens = slots.block_tokens
        # A chunk that starts within the reused blocks is the one last token of a prompt that is
        # held whole: its KV is in its block already.
        self._written = [
            (job, chunk)
            for job, chunk in work
            if chunk.start_token >= job.reused_blocks * block_tokens
        ]
        touched = [
            slot
            for job, chunk in self._written
            for slot in job.slots[
                chunk.start_token // block_tokens : -(-chunk.end_token // block_tokens)
            ]
        ]
        self._touched: npt.NDArray[np.intp] = np.array(touched, dtype=np.intp)

    def before_layer(self, layer: int) -> None:
        """Wait for the layer's reused KV."""
        for gate in self._gates:
            gate.wait_for_layer(layer)

    def after_layer(self, layer: int) -> None:
        """Copy the layer's new KV to the segment, and let peers read it."""
        for job, chunk in self._written:
            self._slots.save(layer, job.slot_index, job.kv, chunk.start_token, chunk.end_token)
        self._store.publish(self._touched, layer + 1)
