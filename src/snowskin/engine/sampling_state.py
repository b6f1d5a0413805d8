"""What a sequence carries from one sampled token to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snowskin.terms.request import GenerationRequest, Sampling

_GREEDY_BELOW = 1e-30
"""Temperatures below are greedy: dividing ordinary logits by them would overflow fp32."""


class SamplingState:
    """What one sequence carries from token to token: its generator, its counts, its output.

    Args:
        sampling: the request's parameters. Unless greedy, ``seed`` must be set: where the client
            gave none, the front has drawn one.
        prompt_tokens: for the repetition penalty.
        output_tokens: those already generated, here or on another node.
        draws_done: how many draws the sequence's generator has made, here or on another node;
            None: one for each output token, or none if greedy. The generator is made at the first
            draw and burns these, so no generator state travels. A burnt draw costs as much as a
            draw: on a CPU 14 ns for each vocabulary entry (0.7 ms at 49,152 entries), and a
            decode node burns one.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        prompt_tokens: Sequence[int] = (),
        output_tokens: Sequence[int] = (),
        draws_done: int | None = None,
        stop_tokens: Sequence[int] = (),
        min_output_tokens: int = 0,
    ) -> None:
        _assert_ranges(sampling)
        self.sampling = sampling
        self.greedy = sampling.temperature < _GREEDY_BELOW
        assert self.greedy or sampling.seed is not None, "a sequence that draws needs a seed"
        if draws_done is None:
            draws_done = 0 if self.greedy else len(output_tokens)
        self._draws_done = draws_done
        self._output_count = len(output_tokens)
        self._stop_tokens = tuple(stop_tokens)
        self._min_output_tokens = min_output_tokens
        self._repeats = sampling.repetition_penalty != 1.0
        self._counts_output = bool(sampling.frequency_penalty or sampling.presence_penalty)
        self._past_prompt = tuple(prompt_tokens) if self._repeats else ()
        self._past_output = tuple(output_tokens) if self._repeats or self._counts_output else ()
        self._generator: torch.Generator | None = None
        self._tables: _Tables | None = None

    @classmethod
    def of_request(
        cls, request: GenerationRequest, output_tokens: Sequence[int] = ()
    ) -> SamplingState:
        """The state of a request after ``output_tokens``, wherever these were generated."""
        return cls(
            request.sampling,
            prompt_tokens=request.tokens,
            output_tokens=output_tokens,
            stop_tokens=request.stop_tokens,
            min_output_tokens=request.min_output_tokens,
        )

    @property
    def draws_done(self) -> int:
        """How many draws the sequence's generator has made."""
        return self._draws_done

    @property
    def output_count(self) -> int:
        """How many tokens have been generated."""
        return self._output_count

    @property
    def adjusts(self) -> bool:
        """Whether this row's next logits are changed before temperature."""
        return (
            bool(self.sampling.logit_bias)
            or self._repeats
            or self._counts_output
            or self._masks_stop_tokens
        )

    def adjust(self, scores: Tensor) -> None:
        """Apply bias, penalties and the stop mask to this row, ``[vocab]`` fp32, in place."""
        tables = self._tables_for(scores)
        sampling = self.sampling
        if sampling.logit_bias:
            scores[tables.bias_tokens] += tables.bias
        if tables.seen is not None:
            penalty = sampling.repetition_penalty
            penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
            torch.where(tables.seen, penalised, scores, out=scores)
        if tables.counts is not None:
            scores -= sampling.frequency_penalty * tables.counts
            scores -= sampling.presence_penalty * (tables.counts > 0)
        if self._masks_stop_tokens:
            scores[tables.stop_tokens] = -math.inf

    def draw_exponentials(self, out: Tensor) -> None:
        """Fill ``out``, ``[vocab]`` fp32, with the Exp(1) numbers of this row's next draw.

        ``torch.multinomial`` of one sample draws just these and takes the argmax of p/q. The
        burn repeats the whole fill, and not a count of random words, because how many words a
        fill takes depends on its length and on torch's code path for it.
        """
        if self._generator is None:
            assert self.sampling.seed is not None
            self._generator = torch.Generator(out.device).manual_seed(self.sampling.seed)
            for _ in range(self._draws_done):
                out.exponential_(generator=self._generator)
        out.exponential_(generator=self._generator)
        self._draws_done += 1

    def record(self, token: int) -> None:
        """The token was generated: it counts for penalties and the minimum from now on."""
        self._output_count += 1
        if self._tables is None:
            if self._repeats or self._counts_output:
                self._past_output = (*self._past_output, token)
        else:
            self._tables.record(token)

    @property
    def _masks_stop_tokens(self) -> bool:
        return bool(self._stop_tokens) and self._output_count < self._min_output_tokens

    def _tables_for(self, scores: Tensor) -> _Tables:
        if self._tables is None:
            vocab_size, device = scores.shape[-1], scores.device
            bias = self.sampling.logit_bias
            assert all(0 <= token < vocab_size for token in bias), bias
            self._tables = _Tables(
                bias_tokens=torch.tensor(list(bias), dtype=torch.long, device=device),
                bias=torch.tensor(list(bias.values()), dtype=torch.float32, device=device),
                stop_tokens=_indices(self._stop_tokens, vocab_size, device),
                seen=torch.zeros(vocab_size, dtype=torch.bool, device=device)
                if self._repeats
                else None,
                counts=torch.zeros(vocab_size, device=device) if self._counts_output else None,
            )
            self._tables.fill(self._past_prompt, self._past_output)
            self._past_prompt = self._past_output = ()
        return self._tables


@dataclass(frozen=True, slots=True)
class _Tables:
    """A row's adjustments as tensors; the two long ones only where a penalty needs them."""

    bias_tokens: Tensor
    bias: Tensor
    stop_tokens: Tensor
    seen: Tensor | None
    """``[vocab]`` bool: in the prompt or the output."""
    counts: Tensor | None
    """``[vocab]`` fp32: how often in the output."""

    def fill(self, prompt_tokens: Sequence[int], output_tokens: Sequence[int]) -> None:
        if self.seen is not None:
            past = (*prompt_tokens, *output_tokens)
            self.seen[_indices(past, self.seen.shape[0], self.seen.device)] = True
        if self.counts is not None:
            output = _indices(output_tokens, self.counts.shape[0], self.counts.device)
            self.counts.add_(torch.bincount(output, minlength=self.counts.shape[0]))

    def record(self, token: int) -> None:
        if self.seen is not None:
            self.seen[token] = True
        if self.counts is not None:
            self.counts[token] += 1


def _indices(tokens: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Those of ``tokens`` that have a logit: an embedding may be longer than the output."""
    inside = [token for token in tokens if 0 <= token < vocab_size]
    return torch.tensor(inside, dtype=torch.long, device=device)


def _assert_ranges(sampling: Sampling) -> None:
    assert 0.0 <= sampling.temperature < math.inf, sampling
    assert 0.0 <= sampling.top_p <= 1.0, sampling
    assert sampling.top_k is None or sampling.top_k >= 1, sampling
    assert 0.0 <= sampling.min_p <= 1.0, sampling
    assert 0.0 < sampling.repetition_penalty < math.inf, sampling
    assert math.isfinite(sampling.presence_penalty), sampling
    assert math.isfinite(sampling.frequency_penalty), sampling
    assert all(math.isfinite(bias) for bias in sampling.logit_bias.values()), sampling
    assert sampling.top_logprobs is None or sampling.top_logprobs >= 0, sampling
