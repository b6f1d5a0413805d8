"""What the engines say after each step."""

from __future__ import annotations

from dataclasses import dataclass

from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import RequestId
from snowskin.terms.request import GenerationRequest, SampledToken
from snowskin.terms.serving import FinishReason


@dataclass(frozen=True, slots=True)
class Started:
    """A prompt left the queue. Said before its first pass, so that its KV can be followed."""

    request: RequestId
    reused_tokens: int
    """Tokens whose KV was held already and is not computed."""
    blocks: tuple[PlacedBlock, ...]
    """Where the whole prompt's KV is or will be, in order; a last partial block included."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prompt is computed: TTFT ends here. Its blocks stay pinned until ``release``."""

    request: RequestId
    token: SampledToken
    prefill_s: float
    """Since ``Started``."""
    work_s: float
    """What it cost the engine: passes that it shared with others count by its share of tokens."""
    finish_reason: FinishReason | None
    """Not None: this was the only token."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A sequence's KV is on the device and takes part in the steps from now on."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Token:
    """One more token of a running sequence; the last has a ``finish_reason``."""

    request: RequestId
    token: SampledToken
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request cannot be finished here; all that it held is free."""

    request: RequestId
    reason: str


def finish_reason(
    request: GenerationRequest, token: int, output_tokens: int
) -> FinishReason | None:
    """Whether ``token``, the last of ``output_tokens``, ends the generation, and why."""
    if token in request.stop_tokens:
        return "stop"
    return "length" if output_tokens >= request.output_limit_tokens else None
