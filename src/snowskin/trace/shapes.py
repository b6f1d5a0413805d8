"""The shapes of made-up traces: what is shared, how long, how fast. Numbers with their grounds."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from snowskin.terms.errors import InvalidInput

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Ratio = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Arrivals(StrEnum):
    """How independent work arrives: requests, or whole conversations where turns follow."""

    POISSON = "poisson"
    BURSTY = "bursty"


class Sessions(msgspec.Struct, frozen=True, tag=True):
    """Conversations: each turn's prompt is the last prompt, its answer and a new message."""

    system_tokens: int
    """A prefix that every prompt begins with."""
    first_tokens: _Positive
    """Mean of the first message, and ``first_sigma`` of its logarithm."""
    first_sigma: _Positive
    message_tokens: _Positive
    message_sigma: _Positive
    continue_ratio: _Ratio
    """Chance that a first turn is followed by another; ``again_ratio``: that a later one is."""
    again_ratio: _Ratio
    think_s: _Positive
    """Mean time from one turn's arrival to the next's (exponential)."""


class Documents(msgspec.Struct, frozen=True, tag=True):
    """Questions on shared texts: tools' instructions, long documents."""

    document_tokens: _Positive
    document_sigma: float
    question_tokens: _Positive
    question_sigma: float
    fixed_count: int
    """So many documents from the start, drawn by Zipf's law; 0: new ones keep coming."""
    zipf_exponent: float = 0.0
    again_ratio: _Ratio = 0.0
    """With documents that keep coming: chance that a question is on one that was there before."""
    system_tokens: int = 0


class Shape(msgspec.Struct, frozen=True):
    """Everything that a made-up trace is drawn from."""

    name: str
    requests: _Count
    prompt_tokens: _Positive
    """The mean that the published workload has; the tests hold the drawn one to it."""
    output_tokens: _Positive
    output_sigma: float
    cache_ratio: _Ratio
    """Blocks in the longest cached prefix / all blocks, one cache without limit."""
    rate_per_s: _Positive
    arrivals: Arrivals
    structure: Sessions | Documents
    burstiness: float = 3.0
    """Coefficient of variation of the gaps when arrivals are bursty (the released trace: 3.0)."""
    context_tokens: int = 131_072
    """No prompt with its answer is longer (LLaMA3-70B at 128k)."""
    output_limit_tokens: int = 2_000
    """The longest answer of the released trace."""


SHAPES: dict[str, Shape] = {
    # FAST '25 Table 2, with the sharing of the released conversation trace: two requests in five
    # go on with a conversation, all share one system prompt, arrivals come in bursts.
    "conversation": Shape(
        name="conversation",
        requests=12_031,
        prompt_tokens=12_035,
        output_tokens=343,
        output_sigma=0.75,
        cache_ratio=0.40,
        rate_per_s=3.4,
        arrivals=Arrivals.POISSON,
        structure=Sessions(
            system_tokens=512,
            first_tokens=10_050,
            first_sigma=1.3,
            message_tokens=1_900,
            message_sigma=1.3,
            continue_ratio=0.31,
            again_ratio=0.55,
            think_s=215.0,
        ),
    ),
    # Tools with long instructions, few of them popular (FAST '25 §5.1: "long shared prefixes").
    "tool-agent": Shape(
        name="tool-agent",
        requests=23_608,
        prompt_tokens=8_596,
        output_tokens=182,
        output_sigma=0.9,
        cache_ratio=0.59,
        rate_per_s=6.6,
        arrivals=Arrivals.POISSON,
        structure=Documents(
            document_tokens=5_330,
            document_sigma=0.35,
            question_tokens=3_350,
            question_sigma=1.2,
            fixed_count=200,
            zipf_exponent=1.0,
        ),
    ),
    # Long documents with a few questions each, far apart (FAST '25 §5.1: ShareGPT, L-Eval, LooGLE
    # mixed and shuffled), so few blocks are hot.
    "synthetic": Shape(
        name="synthetic",
        requests=3_993,
        prompt_tokens=15_325,
        output_tokens=149,
        output_sigma=0.8,
        cache_ratio=0.66,
        rate_per_s=2.0,
        arrivals=Arrivals.POISSON,
        structure=Documents(
            document_tokens=14_700,
            document_sigma=0.8,
            question_tokens=700,
            question_sigma=0.8,
            fixed_count=0,
            again_ratio=0.70,
        ),
    ),
    # arXiv 2407.00079 Table 2, L-Eval: 19,019 / 72 tokens, more than 80 % shared.
    "documents": Shape(
        name="documents",
        requests=2_000,
        prompt_tokens=19_019,
        output_tokens=72,
        output_sigma=0.8,
        cache_ratio=0.85,
        rate_per_s=1.0,
        arrivals=Arrivals.POISSON,
        structure=Documents(
            document_tokens=18_500,
            document_sigma=0.6,
            question_tokens=500,
            question_sigma=0.8,
            fixed_count=0,
            again_ratio=0.87,
        ),
    ),
}


def fixed_shape(
    prompt_tokens: int, output_tokens: int, *, cache_ratio: float = 0.0, documents: int = 20
) -> Shape:
    """Prompts and answers of one length, of which ``cache_ratio`` is one of ``documents`` texts.

    Source: the simulated data of arXiv 2407.00079 §8 (16k–128k / 512 tokens, 50 %).
    """
    if prompt_tokens < 2 or output_tokens < 1 or documents < 1 or not 0 <= cache_ratio < 1:
        raise InvalidInput(
            "a fixed shape needs prompt_tokens >= 2, output_tokens >= 1, documents >= 1 and "
            f"0 <= cache_ratio < 1; got {prompt_tokens}, {output_tokens}, {documents}, "
            f"{cache_ratio}",
            parameter="shape",
        )
    shared = max(1, round(prompt_tokens * cache_ratio))
    return Shape(
        name=f"fixed-{prompt_tokens}-{output_tokens}",
        requests=1_000,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_sigma=0.0,
        cache_ratio=cache_ratio,
        rate_per_s=1.0,
        arrivals=Arrivals.POISSON,
        context_tokens=prompt_tokens + output_tokens,
        output_limit_tokens=output_tokens,
        structure=Documents(
            document_tokens=shared,
            document_sigma=0.0,
            question_tokens=max(1, prompt_tokens - shared),
            question_sigma=0.0,
            fixed_count=documents,
        ),
    )


def shape_named(name: str) -> Shape:
    """The published shape of this name.

    Raises:
        InvalidInput: there is none; names those there are.
    """
    try:
        return SHAPES[name]
    except KeyError:
        known = ", ".join(SHAPES)
        raise InvalidInput(f"no shape {name!r}; there are {known}", parameter="shape") from None
