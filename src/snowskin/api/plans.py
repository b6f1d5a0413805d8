"""What one HTTP request comes to: prompts, their choices, and how each of these samples."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

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
    body: GenerationBody, defaults: Sampling, bias: dict[int, float], top: int | None
) -> Sampling:
    """How the first choice samples; ``top`` is its ``top_logprobs``.

    Args:
        defaults: the model's own; they hold for what the body leaves out.
    """

    def given(name: str) -> Any:
        return getattr(body if name in body.model_fields_set else defaults, name)

    temperature, top_k = float(given("temperature")), given("top_k")
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=float(given("top_p")),
        top_k=top_k if top_k is not None and top_k > 0 else None,
        min_p=float(given("min_p")),
        seed=body.seed,
        presence_penalty=float(body.presence_penalty),
        frequency_penalty=float(body.frequency_penalty),
        repetition_penalty=float(given("repetition_penalty")),
        logit_bias=bias,
        top_logprobs=top,
    )


def of_choice(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of choice number ``choice``: as the first, with a seed of its own."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=_wrapped(sampling.seed + choice))


def _wrapped(seed: int) -> int:
    """Into 64 signed bits, so that the seeds of later choices never leave the range."""
    return (seed + 2**63) % 2**64 - 2**63
