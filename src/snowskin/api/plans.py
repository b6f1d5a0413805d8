"""What one HTTP request comes to: prompts, their choices, and how each of these samples."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from snowskin.api.schemas import GenerationBody
from snowskin.terms.ids import RequestId
from snowskin.terms.request import GenerationRequest, Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and its choices."""

    tokens: tuple[int, ...]
    choices: tuple[GenerationRequest, ...]
    context: tuple[int, ...] = ()
    """Tokens that the text goes on from; empty where it is a text of its own."""
    echo: str = ""
    """Put before each choice's text."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one HTTP request asks for."""

    model: str
    prompts: tuple[Prompt, ...]
    stop_strings: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool

    @property
    def request(self) -> RequestId:
        """The id that stands for the whole: its first generation's."""
        return self.prompts[0].choices[0].request

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each once."""
        return sum(len(prompt.tokens) for prompt in self.prompts)


def new_request_id() -> RequestId:
    """A name that cannot be guessed: who knows it may ask for its explanation."""
    return RequestId(f"req-{secrets.token_hex(16)}")


def sampling_of(
    body: GenerationBody, choice: int, bias: dict[int, float], top: int | None
) -> Sampling:
    """How choice number ``choice`` samples; ``top`` is its ``top_logprobs``."""
    return Sampling(
        temperature=0.0 if body.temperature < GREEDY_BELOW else float(body.temperature),
        top_p=float(body.top_p),
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        min_p=float(body.min_p),
        seed=None if body.seed is None else _wrapped(body.seed + choice),
        presence_penalty=float(body.presence_penalty),
        frequency_penalty=float(body.frequency_penalty),
        repetition_penalty=float(body.repetition_penalty),
        logit_bias=bias,
        top_logprobs=top,
    )


def _wrapped(seed: int) -> int:
    """Into 64 signed bits, so that the seeds of later choices never leave the range."""
    return (seed + 2**63) % 2**64 - 2**63
