"""Measured times: what a probe of a real model gives, and what costs are fitted to."""

from __future__ import annotations

import msgspec


class PrefillSample(msgspec.Struct, frozen=True):
    """One measured prefill of a prompt whose first ``reused_tokens`` had their KV already."""

    prompt_tokens: int
    reused_tokens: int
    prefill_s: float


class DecodeSample(msgspec.Struct, frozen=True):
    """One measured decode step of ``sequences``, with ``context_tokens`` of KV in all."""

    sequences: int
    context_tokens: int
    step_s: float
