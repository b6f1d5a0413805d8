"""What a client asks for, after validation and tokenisation."""

from __future__ import annotations

import msgspec

from snowskin.terms.ids import BlockKey, RequestId


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is drawn from the logits.

    Names and defaults are the OpenAI API's, with vLLM's additions (top_k, min_p, repetition
    penalty). ``temperature`` 0 means greedy. ``top_k`` None means no limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    top_logprobs: int | None = None
    """None: no log-probabilities; 0: of the chosen token; k: of the k likeliest as well."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """One generation of one sequence. ``n`` choices are n of these."""

    request: RequestId
    tokens: tuple[int, ...]
    keys: tuple[BlockKey, ...]
    """Keys of the full blocks of ``tokens``."""
    output_limit_tokens: int
    """At most so many tokens are generated; at least 1."""
    sampling: Sampling = Sampling()
    stop_tokens: tuple[int, ...] = ()
    """Generation ends on any of these (the model's end of text, unless ignored)."""
    min_output_tokens: int = 0
    """Stop tokens are not drawn before so many tokens."""
    root: BlockKey | None = None
    """The key before block 0, ``KeySpace.root()`` of the request's tenant. Needed only to name the
    first block of a prompt shorter than one; None: such a block is not shared."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and the natural logarithm of its probability under the model's own logits."""

    token: int
    logprob: float


class SampledToken(msgspec.Struct, frozen=True):
    """One generated token, with log-probabilities where the request asked for them."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
