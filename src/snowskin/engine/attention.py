"""The one attention function: packed sequences, each with its own KV, no padding, no mask.

A forward pass is a row of tokens ``[1, rows]`` of several sequences, one span after the other. The
models of transformers run unchanged: they find ``attend`` through ``AttentionInterface``, and the
pass's own state travels to it in the keyword arguments that the models hand through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every user of torch knows
from transformers import AttentionInterface

from snowskin.engine.kv import SequenceKv

ATTENTION_NAME = "snowskin"
"""The name under which transformers knows the function below."""

_TILE_ROWS = 128
"""Query rows computed at once: scores stay in the CPU's cache, and what lies in the future of a
whole tile is not computed at all."""


class LayerWatcher(Protocol):
    """Is told how a pass proceeds, so that KV moves layer by layer beside the computation."""

    def before_layer(self, layer: int) -> None:
        """The layer's attention is about to read the KV that the sequences already had."""

    def after_layer(self, layer: int) -> None:
        """The layer's new KV is written to the sequences."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a pass: tokens ``[start, start + rows)`` of it.

    The KV of all tokens before ``start`` is in ``kv`` (at the latest when the watcher's
    ``before_layer`` returns), with room for the rest.
    """

    kv: SequenceKv
    start: int
    rows: int

    @property
    def end(self) -> int:
        """Tokens of the sequence after the pass."""
        return self.start + self.rows


class CausalMasks:
    """Additive masks ``[rows, columns]`` for the last rows of a sequence, cut from one tensor."""

    def __init__(self, *, dtype: Any, device: Any) -> None:
        self._past_columns = 0
        self._wide = torch.zeros((_TILE_ROWS, 0), dtype=dtype, device=device)

    def cut(self, rows: int, columns: int) -> Any:
        """The mask of ``rows`` queries that end with the last of ``columns`` keys."""
        past = columns - rows
        assert past >= 0, (rows, columns)
        assert rows <= _TILE_ROWS, rows
        if past > self._past_columns or not self._wide.shape[1]:
            self._past_columns = max(past, 2 * self._past_columns)
            future = self._wide.new_full((_TILE_ROWS, _TILE_ROWS), float("-inf")).triu_(1)
            seen = self._wide.new_zeros((_TILE_ROWS, self._past_columns))
            self._wide = torch.cat((seen, future), dim=1)
        end = self._past_columns + rows
        return self._wide[:rows, end - columns : end]


class PackedPass:
    """The state of one forward pass: whose rows stand where, and who watches.

    Args:
        spans: in the order of their rows.
        masks: kept by the caller from pass to pass.
    """

    def __init__(
        self, spans: Sequence[Span], masks: CausalMasks, watcher: LayerWatcher | None
    ) -> None:
        self._spans = tuple(spans)
        self._masks = masks
        self._watcher = watcher
        for span in self._spans:
            assert span.end <= span.kv.capacity_tokens, span
        self._decode = _DecodeViews(self._spans) if all(s.rows == 1 for s in spans) else None

    def attend(self, layer: int, query: Any, key: Any, value: Any, scale: float) -> Any:
        """Write the new KV of a layer and compute its attention.

        Args:
            query: ``[1, heads, rows, head_dim]``; key and value: ``[1, kv_heads, rows, head_dim]``.

        Returns:
            ``[1, rows, heads, head_dim]``.
        """
        if self._watcher is not None:
            self._watcher.before_layer(layer)
        if self._decode is not None:
            self._decode.write(layer, key, value)
            if self._watcher is not None:
                self._watcher.after_layer(layer)
            return self._decode.attend(layer, query, scale)
        row = 0
        for span in self._spans:
            rows = slice(row, row + span.rows)
            target = span.kv.data[layer, :, span.start : span.end]
            target[0].copy_(key[0, :, rows].transpose(0, 1))
            target[1].copy_(value[0, :, rows].transpose(0, 1))
            row += span.rows
        if self._watcher is not None:
            self._watcher.after_layer(layer)
        out = query.new_empty((query.shape[2], query.shape[1], query.shape[3]))
        row = 0
        for span in self._spans:
            rows = slice(row, row + span.rows)
            self._attend_span(layer, span, query[0, :, rows], out[rows], scale)
            row += span.rows
        return out[None]

    def _attend_span(self, layer: int, span: Span, query: Any, out: Any, scale: float) -> None:
        keys, values = span.kv.data[layer, :, : span.end].transpose(1, 2).unbind(0)
        kv_heads = keys.shape[0]
        query = query.unflatten(0, (kv_heads, -1))
        out = out.unflatten(1, (kv_heads, -1))
        # PyTorch's fused attention on the CPU gains nothing from bf16 hardware; its matrix
        # products do, so that there three plain steps are two to three times faster.
        plain = query.device.type == "cpu" and query.dtype == torch.bfloat16
        compute = self._tile_plain if plain else self._tile_fused
        for first in range(0, span.rows, _TILE_ROWS):
            last = min(first + _TILE_ROWS, span.rows)
            seen = span.start + last
            tile = compute(query[:, :, first:last], keys[:, :seen], values[:, :seen], scale)
            out[first:last].copy_(tile.permute(2, 0, 1, 3))

    def _tile_fused(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        groups, rows = query.shape[1:3]
        keys = keys[:, None].expand(-1, groups, -1, -1)
        values = values[:, None].expand(-1, groups, -1, -1)
        whole = keys.shape[2] == rows
        mask = None if whole else self._masks.cut(rows, keys.shape[2])
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=whole, scale=scale
        )

    def _tile_plain(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        groups, rows = query.shape[1:3]
        scores = torch.bmm((query * scale).flatten(1, 2), keys.transpose(1, 2))
        scores = scores.unflatten(1, (groups, rows))
        scores[..., -rows:] += self._masks.cut(rows, rows)
        weights = torch.softmax(scores, dim=-1)
        return torch.bmm(weights.flatten(1, 2), values).unflatten(1, (groups, rows))


class _DecodeViews:
    """Views of every layer of every sequence of a decode step, made once for all layers."""

    def __init__(self, spans: Sequence[Span]) -> None:
        targets, keys, values = [], [], []
        for span in spans:
            data = span.kv.data
            targets.append(data[:, :, span.start].unbind(0))
            seen = data[:, :, None, : span.end].transpose(3, 4)
            keys.append(seen[:, 0].unbind(0))
            values.append(seen[:, 1].unbind(0))
        self._targets = tuple(zip(*targets, strict=True))
        self._keys = tuple(zip(*keys, strict=True))
        self._values = tuple(zip(*values, strict=True))

    def write(self, layer: int, key: Any, value: Any) -> None:
        new = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
        for target, source in zip(self._targets[layer], new.unbind(0), strict=True):
            target.copy_(source)

    def attend(self, layer: int, query: Any, scale: float) -> Any:
        # The query heads that share a KV head become rows of one small product.
        kv_heads = self._keys[layer][0].shape[1]
        queries = query.unflatten(1, (kv_heads, -1)).permute(0, 3, 1, 2, 4).unbind(1)
        outs = [
            F.scaled_dot_product_attention(q, k, v, scale=scale)
            for q, k, v in zip(queries, self._keys[layer], self._values[layer], strict=True)
        ]
        return torch.stack(outs, dim=1).flatten(2, 3)


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    **arguments: Any,
) -> tuple[Any, None]:
    """What the models of transformers call in each layer."""
    packed: PackedPass = arguments["packed_pass"]
    assert attention_mask is None, "packed attention is causal by itself"
    scale = arguments.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return packed.attend(module.layer_idx, query, key, value, scale), None


def register() -> None:
    """Make the function known to transformers; without a mask function, no mask is built."""
    AttentionInterface.register(ATTENTION_NAME, attend)
