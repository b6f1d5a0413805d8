"""KV in device memory, and its way to and from the blocks of a node's segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of one token: ``[layers, 2, kv_heads, head_dim]`` elements of ``dtype``."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: Any
    """A ``torch.dtype``."""

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token over all layers."""
        elements = self.layers * 2 * self.kv_heads * self.head_dim
        return elements * int(self.dtype.itemsize)


class SequenceKv:
    """The KV of one sequence on the device: ``data[layers, 2, capacity, kv_heads, head_dim]``.

    It grows by doubling, up to ``limit_tokens``. Growing moves the bytes: views of ``data`` are
    good for one forward pass only.
    """

    __slots__ = ("_limit_tokens", "data", "tokens")

    def __init__(
        self, shape: KvShape, *, device: Any, capacity_tokens: int, limit_tokens: int | None = None
    ) -> None:
        self._limit_tokens = capacity_tokens if limit_tokens is None else limit_tokens
        assert 1 <= capacity_tokens <= self._limit_tokens, (capacity_tokens, limit_tokens)
        self.data = torch.empty(
            (shape.layers, 2, capacity_tokens, shape.kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        self.tokens = 0
        """How many tokens are held, in all layers."""

    @property
    def capacity_tokens(self) -> int:
        """How many tokens fit before it must grow."""
        return int(self.data.shape[2])

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in all."""
        assert tokens <= self._limit_tokens, (tokens, self._limit_tokens)
        capacity = self.capacity_tokens
        if tokens <= capacity:
            return
        capacity = min(max(tokens, 2 * capacity), self._limit_tokens)
        grown = self.data.new_empty((*self.data.shape[:2], capacity, *self.data.shape[3:]))
        grown[:, :, : self.tokens].copy_(self.data[:, :, : self.tokens])
        self.data = grown


class BlockSlots:
    """A segment's slots, seen as KV: ``[slots, layers, 2, block_tokens, kv_heads, head_dim]``.

    Copies go by layer and over many blocks at once; no loop runs over blocks.
    """

    def __init__(
        self, segment_data: npt.NDArray[np.uint8], shape: KvShape, *, block_tokens: int
    ) -> None:
        slots, parts, part_bytes = segment_data.shape
        expected_bytes = shape.token_bytes // shape.layers * block_tokens
        assert (parts, part_bytes) == (shape.layers, expected_bytes), (
            f"segment slots of {parts} x {part_bytes} bytes do not fit blocks of "
            f"{shape.layers} x {expected_bytes}"
        )
        layout = (slots, parts, 2, block_tokens, shape.kv_heads, shape.head_dim)
        self._data = torch.from_numpy(segment_data).view(shape.dtype).view(layout)
        self._block_tokens = block_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self._block_tokens

    def load(self, layer: int, slots: Any, kv: SequenceKv, tokens: int) -> None:
        """Copy one layer of the first ``tokens`` tokens from the slots to the device.

        Args:
            slots: ``int64`` tensor of the slots of the sequence's blocks, in order.
        """
        whole, rest = divmod(tokens, self._block_tokens)
        target = kv.data[layer]
        if whole:
            blocks = self._data[:, layer].index_select(0, slots[:whole])
            aligned = target[:, : whole * self._block_tokens]
            aligned.unflatten(1, (whole, self._block_tokens)).copy_(
                blocks.transpose(0, 1), non_blocking=True
            )
        if rest:
            last = self._data[int(slots[whole]), layer, :, :rest]
            target[:, whole * self._block_tokens : tokens].copy_(last, non_blocking=True)

    def save(self, layer: int, slots: Any, kv: SequenceKv, start: int, end: int) -> None:
        """Copy one layer of the tokens ``[start, end)`` from the device to the slots.

        Args:
            slots: ``int64`` tensor of the slots of the sequence's blocks, in order.
            start: on a block boundary.
        """
        assert start % self._block_tokens == 0, start
        first, whole_end = start // self._block_tokens, end // self._block_tokens
        source = kv.data[layer]
        if whole_end > first:
            run = source[:, start : whole_end * self._block_tokens]
            blocks = run.unflatten(1, (whole_end - first, self._block_tokens)).transpose(0, 1)
            self._data[:, layer].index_copy_(
                0, slots[first:whole_end], blocks.to(self._data.device)
            )
        rest = end % self._block_tokens
        if rest:
            tail = source[:, end - rest : end]
            self._data[int(slots[whole_end]), layer, :, :rest].copy_(tail)

    def save_block(self, slot: int, kv: SequenceKv, block_index: int) -> None:
        """Copy all layers of one whole block from the device to a slot."""
        start = block_index * self._block_tokens
        self._data[slot].copy_(kv.data[:, :, start : start + self._block_tokens])
