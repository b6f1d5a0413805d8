"""The shapes of made-up traces: what is shared, how long, how fast. Numbers with their grounds.

Means and cache ratios are those that the papers print. What makes up the tool & agent and the
synthetic workload, and how its sharing is spread, is counted from excerpts of the released files:
187 requests in two stretches of 15 seconds from the middle of the hour of ``mooncake_trace.jsonl``,
and 180 from the beginning, the middle and the end of ``synthetic_trace.jsonl``.
"""

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
    questions: float = 0.0
    """Not 0: so many questions on each document, on average (geometric); every question is on one
    drawn evenly from those that have questions left. So sharing is rare at first, and at the end
    there is little else. ``fixed_count`` and ``again_ratio`` then say nothing."""
    again_ratio: _Ratio = 0.0
    """With documents that keep coming: chance that a question is on one that was there before."""
    system_tokens: int = 0


class Part(msgspec.Struct, frozen=True):
    """One kind of work within a mixture."""

    share: _Positive
    """Of the requests; the shares of a mixture add up to 1."""
    structure: Sessions | Documents
    output_tokens: _Positive
    output_sigma: float


class Mixture(msgspec.Struct, frozen=True, tag=True):
    """Several kinds of work side by side, none of which shares with another."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        total = sum(part.share for part in self.parts)
        if abs(total - 1.0) > 1e-9:
            raise InvalidInput(f"the shares of a mixture must add up to 1, not {total}")


class Shape(msgspec.Struct, frozen=True):
    """Everything that a made-up trace is drawn from."""

    name: str
    requests: _Count
    prompt_tokens: _Positive
    """The mean that the published workload has; the tests hold the drawn one to it."""
    output_tokens: _Positive
    """The published mean. It and ``output_sigma`` are what answers are drawn by, save those of a
    mixture, whose parts have laws of their own."""
    output_sigma: float
    cache_ratio: _Ratio
    """Blocks in the longest cached prefix / all blocks, one cache without limit."""
    rate_per_s: _Positive
    arrivals: Arrivals
    structure: Sessions | Documents | Mixture
    burstiness: float = 3.0
    """Coefficient of variation of the gaps when arrivals are bursty."""
    stamp_s: float = 0.0
    """Arrivals are noted to so many seconds, so that those between come together. The released
    traces with timestamps are stamped every 3 s; between the stamps they are nearly Poisson."""
    context_tokens: int = 131_072
    """No prompt with its answer is longer (LLaMA3-70B at 128k)."""
    output_limit_tokens: int = 2_000
    """The longest answer of the released trace."""


RELEASED_STAMP_S = 3.0

CONVERSATIONS = Sessions(
    system_tokens=512,
    first_tokens=10_050,
    first_sigma=1.3,
    message_tokens=1_900,
    message_sigma=1.3,
    continue_ratio=0.31,
    again_ratio=0.55,
    think_s=215.0,
)
"""The sharing of the released conversation trace: two requests in five go on with a conversation,
and all share one system prompt."""


def tools_and_conversations(conversations: Sessions, *, output_tokens: float) -> Mixture:
    """An hour of Kimi's service: 46.5 % conversations, and two tools with instructions of their
    own, of 12 and 5 blocks, which get prompts of 6,640 and 3,210 tokens and answer in 13 and 21.

    Args:
        conversations: as many tokens as leave the published mean to the whole.
        output_tokens: of a conversation, likewise.
    """
    return Mixture(
        (
            Part(0.465, conversations, output_tokens=output_tokens, output_sigma=0.75),
            Part(0.385, _tool(6_144, 496, 1.4), output_tokens=13, output_sigma=1.1),
            Part(0.15, _tool(2_560, 650, 0.5), output_tokens=21, output_sigma=0.2),
        )
    )


def _tool(instruction_tokens: int, question_tokens: int, question_sigma: float) -> Documents:
    return Documents(
        document_tokens=instruction_tokens,
        document_sigma=0.0,
        question_tokens=question_tokens,
        question_sigma=question_sigma,
        fixed_count=1,
    )


SHAPES: dict[str, Shape] = {
    # FAST '25 Table 2, with the sharing of the released conversation trace.
    "conversation": Shape(
        name="conversation",
        requests=12_031,
        prompt_tokens=12_035,
        output_tokens=343,
        output_sigma=0.75,
        cache_ratio=0.40,
        rate_per_s=3.4,
        arrivals=Arrivals.POISSON,
        stamp_s=RELEASED_STAMP_S,
        structure=CONVERSATIONS,
    ),
    # FAST '25 Table 2. With the shares and lengths of the tools as counted, the conversations have
    # 11,950 tokens on average, which is the conversation workload's: so they have its law.
    "tool-agent": Shape(
        name="tool-agent",
        requests=23_608,
        prompt_tokens=8_596,
        output_tokens=182,
        output_sigma=0.9,
        cache_ratio=0.59,
        rate_per_s=6.6,
        arrivals=Arrivals.POISSON,
        stamp_s=RELEASED_STAMP_S,
        structure=tools_and_conversations(CONVERSATIONS, output_tokens=374),
    ),
    # FAST '25 §5.1: ShareGPT, L-Eval and LooGLE, mixed and shuffled. A third are short chats that
    # share nothing, the others questions on long documents, each drawn from all that have any left,
    # so that no document is hot. 3,993 requests in 1,022 s.
    "synthetic": Shape(
        name="synthetic",
        requests=3_993,
        prompt_tokens=15_325,
        output_tokens=149,
        output_sigma=0.8,
        cache_ratio=0.66,
        rate_per_s=3.9,
        arrivals=Arrivals.POISSON,
        structure=Mixture(
            (
                Part(
                    1 / 3,
                    Documents(
                        document_tokens=1,
                        document_sigma=0.0,
                        question_tokens=175,
                        question_sigma=1.7,
                        fixed_count=0,
                    ),
                    output_tokens=273,
                    output_sigma=0.9,
                ),
                Part(
                    2 / 3,
                    Documents(
                        document_tokens=22_500,
                        document_sigma=0.8,
                        question_tokens=300,
                        question_sigma=0.8,
                        fixed_count=0,
                        questions=3.0,
                    ),
                    output_tokens=87,
                    output_sigma=1.3,
                ),
            )
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
