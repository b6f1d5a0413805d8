"""Builders of small traces and clusters."""

from __future__ import annotations

from snowskin.cost.profile import Profile, load_profile
from snowskin.sim.config import WorldConfig
from snowskin.trace.records import Trace, TraceRequest, trace_of

BLOCK_TOKENS = 512
A800: Profile = load_profile("a800_tp8")


def request(
    at_s: float, blocks: tuple[int, ...], *, extra_tokens: int = 100, output_tokens: int = 20
) -> TraceRequest:
    """A request of these full blocks and some tokens more."""
    return TraceRequest(at_s, len(blocks) * BLOCK_TOKENS + extra_tokens, output_tokens, blocks)


def trace(*requests: TraceRequest) -> Trace:
    return trace_of("small", requests, block_tokens=BLOCK_TOKENS)


def config(**changes: object) -> WorldConfig:
    settings: dict[str, object] = {
        "profile": A800,
        "prefill_nodes": 2,
        "decode_nodes": 2,
        "blocks": 200,
    }
    return WorldConfig(**(settings | changes))  # type: ignore[arg-type]
