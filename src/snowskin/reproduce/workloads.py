"""The papers' workloads: the released trace where it is at hand, drawn from its shape where not."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from snowskin.cost.profile import Profile, load_profile
from snowskin.reproduce import parameters as p
from snowskin.trace.formats import read_trace
from snowskin.trace.records import Trace, trace_of
from snowskin.trace.released import released_trace
from snowskin.trace.shapes import SHAPES, Shape
from snowskin.trace.synthesise import synthesise

RELEASED_FILES = {
    "conversation": "conversation_trace.jsonl",
    "tool-agent": "toolagent_trace.jsonl",
    "synthetic": "synthetic_trace.jsonl",
}
"""As they are called where FAST's authors published them."""


class Scale(msgspec.Struct, frozen=True):
    """How much of each workload is played."""

    requests: int | None = None
    """Only the first so many requests of each; None: all."""

    def swept(self) -> Scale:
        """For items that play a workload at many speeds."""
        most = p.SWEEP_REQUESTS
        return Scale(most if self.requests is None else min(most, self.requests))


class Workload(msgspec.Struct, frozen=True):
    """A trace and what a report must say of it."""

    name: str
    trace: Trace
    origin: str

    def at_load(self, load: float) -> Trace:
        """The trace sped up so that its prefills without reuse load the 8 nodes so much."""
        return self.trace.sped_up(load / self.own_load())

    def own_load(self) -> float:
        """Prefill work without reuse / time of the papers' prefill nodes, as the trace stands."""
        cost = profile().prefill
        work_s = sum(cost.seconds(tokens) for tokens in self.trace.prompt_tokens.tolist())
        return work_s / (p.PREFILL_NODES * self.trace_s())

    def rate_per_s(self) -> float:
        """Requests a second as the trace stands."""
        return (len(self.trace) - 1) / self.trace_s()

    def trace_s(self) -> float:
        """From the first to the last arrival; at least a nanosecond."""
        return max(float(self.trace.arrival_s[-1]), 1e-9)


@lru_cache(maxsize=1)
def profile() -> Profile:
    """The one cost profile."""
    return load_profile(p.HARDWARE)


def is_released(name: str) -> bool:
    """Whether the paper's own trace of this workload is at hand."""
    return released_trace(RELEASED_FILES[name]) is not None


@lru_cache(maxsize=4)
def workload(name: str, scale: Scale) -> Workload:
    """One of FAST's three workloads."""
    path = released_trace(RELEASED_FILES[name])
    if path is not None:
        return _cut(name, read_trace(path), "the released trace", scale)
    return drawn(SHAPES[name], scale)


@lru_cache(maxsize=4)
def drawn(shape: Shape, scale: Scale) -> Workload:
    """A workload synthesised from a shape."""
    trace = trace_of(
        shape.name, synthesise(shape, seed=p.SEED, block_tokens=p.BLOCK_TOKENS),
        block_tokens=p.BLOCK_TOKENS,
    )  # fmt: skip
    return _cut(shape.name, trace, f"synthesised, seed {p.SEED}", scale)


def _cut(name: str, trace: Trace, origin: str, scale: Scale) -> Workload:
    if scale.requests is None or scale.requests >= len(trace):
        return Workload(name, trace, f"{name}: {origin}, {len(trace):,} requests")
    origin = f"{name}: {origin}, the first {scale.requests:,} of {len(trace):,} requests"
    return Workload(name, trace.head(scale.requests), origin)


def described(workloads: list[Workload]) -> str:
    """One line for a report."""
    return "; ".join(each.origin for each in workloads)
