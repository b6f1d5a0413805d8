"""What a trace is like: lengths, rate and sharing, with each definition stated."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from snowskin.trace.records import Floats, Ints, Trace

DEFINITIONS = {
    "hit_ratio_blocks": "blocks found in the longest cached prefix of each prompt / all blocks, "
    "one shared cache without limit",
    "hit_ratio_tokens": "tokens of that prefix (at most the prompt) / all prompt tokens",
    "hit_ratio_requests": "mean over requests of tokens of that prefix / tokens of the prompt",
    "reusing_ratio": "requests of which at least one block was cached / all requests",
    "rate_per_s": "(requests - 1) / seconds from the first to the last arrival",
    "arrival_cv": "standard deviation of the gaps between arrivals / their mean (Poisson: 1)",
}


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of token counts."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, values: Ints) -> Lengths:
        """The distribution of these counts."""
        p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
        return cls(float(values.mean()), p50, p90, p99, int(values.max()))


class TraceSummary(msgspec.Struct, frozen=True):
    """A trace in numbers. Ratios are 0–1; see DEFINITIONS."""

    name: str
    requests: int
    duration_s: float
    rate_per_s: float
    arrival_cv: float
    prompt_tokens: Lengths
    output_tokens: Lengths
    block_tokens: int
    sharing_known: bool
    blocks: int
    distinct_blocks: int
    hit_ratio_blocks: float | None
    hit_ratio_tokens: float | None
    hit_ratio_requests: float | None
    reusing_ratio: float | None
    definitions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """As plain values for a JSON file."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def prefix_blocks(trace: Trace) -> Ints:
    """For each request, the blocks of its longest prefix that earlier requests had; no limit."""
    count = len(trace)
    lengths = np.diff(trace.block_starts)
    owner = np.repeat(np.arange(count), lengths)
    _, first_use, inverse = np.unique(trace.block_ids, return_index=True, return_inverse=True)
    known = owner[first_use][inverse] < owner
    position = np.arange(len(owner)) - np.repeat(trace.block_starts[:-1], lengths)
    miss_at = np.where(known, np.repeat(lengths, lengths), position)
    prefix = np.zeros(count, dtype=np.int64)
    filled = lengths > 0
    if filled.any():
        prefix[filled] = np.minimum.reduceat(miss_at, trace.block_starts[:-1][filled])
    return prefix


def describe(trace: Trace) -> TraceSummary:
    """The trace in numbers."""
    duration_s = float(trace.arrival_s[-1])
    gaps = np.diff(trace.arrival_s)
    mean_gap = float(gaps.mean()) if len(gaps) else 0.0
    blocks = len(trace.block_ids)
    hit_blocks = hit_tokens = hit_requests = reusing = None
    if trace.sharing_known:
        prefix = prefix_blocks(trace)
        tokens = np.minimum(prefix * trace.block_tokens, trace.prompt_tokens)
        hit_blocks = float(prefix.sum() / blocks) if blocks else 0.0
        hit_tokens = float(tokens.sum() / trace.prompt_tokens.sum())
        hit_requests = float((tokens / trace.prompt_tokens).mean())
        reusing = float((prefix > 0).mean())
    return TraceSummary(
        name=trace.name,
        requests=len(trace),
        duration_s=duration_s,
        rate_per_s=(len(trace) - 1) / duration_s if duration_s else 0.0,
        arrival_cv=float(gaps.std()) / mean_gap if mean_gap else 0.0,
        prompt_tokens=Lengths.of(trace.prompt_tokens),
        output_tokens=Lengths.of(trace.output_tokens),
        block_tokens=trace.block_tokens,
        sharing_known=trace.sharing_known,
        blocks=blocks,
        distinct_blocks=len(np.unique(trace.block_ids)),
        hit_ratio_blocks=hit_blocks,
        hit_ratio_tokens=hit_tokens,
        hit_ratio_requests=hit_requests,
        reusing_ratio=reusing,
        definitions=dict(DEFINITIONS),
    )


def block_uses(trace: Trace) -> Ints:
    """How often each distinct block occurs, most often first."""
    _, counts = np.unique(trace.block_ids, return_counts=True)
    return np.sort(counts)[::-1].astype(np.int64)


def arrivals_per_bin(trace: Trace, *, bins: int = 120) -> tuple[Floats, NDArray[np.float64]]:
    """Bin starts in seconds, and arrivals a second in each."""
    span_s = max(float(trace.arrival_s[-1]), 1e-9)
    counts, edges = np.histogram(trace.arrival_s, bins=bins, range=(0.0, span_s))
    return edges[:-1], counts / (span_s / bins)
