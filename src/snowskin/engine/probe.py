"""How long prefill and decode take here: a loaded model, timed within a budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from snowskin.engine.attention import Span
from snowskin.engine.batching import PrefillProgress, plan_prefill_pass
from snowskin.engine.kv import SequenceKv
from snowskin.engine.model import Model
from snowskin.engine.sampling import SamplingState, sample
from snowskin.terms.ids import RequestId
from snowskin.terms.request import Sampling
from snowskin.terms.samples import DecodeSample, PrefillSample

_PREFILL_SHARE = 0.6
"""Of the budget; the rest goes to decode."""
_REPEATS = 3
_REPEAT_SHARE = 0.1
"""A point is timed again only if all it takes stays below this share of its half's budget."""
_ALWAYS_PREFILL = 6
_ALWAYS_DECODE = 4
"""So many points are timed even if the budget is spent: fewer do not determine the costs."""
_STREAM = RequestId("probe")


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """How far a probe goes."""

    budget_s: float = 10.0
    """Aimed at, not guaranteed: a slow machine takes as long as the few smallest points need."""
    chunk_tokens: int = 512
    """Tokens of one prefill pass, as the prefill engine will have it."""
    block_tokens: int = 32
    prompt_tokens: int = 32_768
    """The longest prompt to be tried, within the model's context."""
    sequences: int = 64
    """The largest decode batch to be tried."""
    kv_bytes: int = 1 << 30
    """The most device memory that a decode batch may fill."""

    def __post_init__(self) -> None:
        assert self.budget_s >= 0, self
        assert 1 <= self.block_tokens <= self.chunk_tokens, self
        assert self.prompt_tokens >= 2, self
        assert self.sequences >= 1, self
        assert self.kv_bytes >= 1, self


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was measured, each point the median of its runs."""

    prefill: tuple[PrefillSample, ...]
    decode: tuple[DecodeSample, ...]
    wall_s: float


def probe(
    model: Model,
    limits: ProbeLimits | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> ProbeResult:
    """Time prefills and decode steps of growing size until the budget is spent.

    A prefill runs in chunks as the prefill engine runs them, copies its reused prefix from host
    memory first, and draws a token at its end; a decode step draws a token for each sequence. The
    caller sets torch's threads to what a node will have; other work on the machine shows in the
    times.
    """
    limits = ProbeLimits() if limits is None else limits
    bench = _Bench(model, limits, clock)
    begin = clock()
    bench.prefill(_Prefill(min(2, model.info.max_context_tokens), 0))  # warms up
    prefills = _measure(
        list(_prefill_points(model, limits)),
        bench.prefill,
        budget_s=_PREFILL_SHARE * limits.budget_s,
        always=_ALWAYS_PREFILL,
        clock=clock,
    )
    decodes = _measure(
        list(_decode_points(model, limits)),
        bench.decode,
        budget_s=limits.budget_s - (clock() - begin),
        always=_ALWAYS_DECODE,
        clock=clock,
    )
    return ProbeResult(
        prefill=tuple(PrefillSample(p.prompt_tokens, p.reused_tokens, s) for p, s in prefills),
        decode=tuple(DecodeSample(p.sequences, p.sequences * p.each_tokens, s) for p, s in decodes),
        wall_s=clock() - begin,
    )


@dataclass(frozen=True, slots=True)
class _Prefill:
    prompt_tokens: int
    reused_tokens: int

    @property
    def work(self) -> float:
        """Proportional to the time it may take, at worst; only steers the budget."""
        new_tokens = self.prompt_tokens - self.reused_tokens
        return 16 + self.reused_tokens / 64 + new_tokens * (1 + self.prompt_tokens / 4096)


@dataclass(frozen=True, slots=True)
class _Decode:
    sequences: int
    each_tokens: int

    @property
    def work(self) -> float:
        """As above; the prefill that fills its KV counts in."""
        return 4 + self.sequences * (1 + self.each_tokens / 256) + self.each_tokens / 16


_Point = TypeVar("_Point", _Prefill, _Decode)


def _prefill_points(model: Model, limits: ProbeLimits) -> Iterator[_Prefill]:
    longest = min(limits.prompt_tokens, model.info.max_context_tokens)
    prompt = min(64, longest)
    while prompt <= longest:
        # The whole prompt comes first: it fills the KV that the others reuse.
        for reused in dict.fromkeys((0, prompt // 2, prompt - max(1, prompt // 8))):
            yield _Prefill(prompt, reused)
        prompt *= 2


def _decode_points(model: Model, limits: ProbeLimits) -> Iterator[_Decode]:
    longest = max(1, min(limits.prompt_tokens, model.info.max_context_tokens) - 1)
    most_tokens = limits.kv_bytes // model.info.kv_bytes_per_token
    # Batches and contexts vary independently from the first points on.
    first = [_Decode(sequences, each) for sequences in (1, 4) for each in (32, 256)]
    rest = [
        _Decode(sequences, each)
        for sequences in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for each in (32, 256, 1024, 4096)
    ]
    rest.sort(key=lambda point: point.work)
    within = [_Decode(point.sequences, min(point.each_tokens, longest)) for point in first + rest]
    for point in dict.fromkeys(within):
        fits = point.sequences * (point.each_tokens + 1) <= most_tokens
        if point == within[0] or (fits and point.sequences <= limits.sequences):
            yield point


def _measure(
    points: Sequence[_Point],
    run: Callable[[_Point], float],
    *,
    budget_s: float,
    always: int,
    clock: Callable[[], float],
) -> list[tuple[_Point, float]]:
    """Each point with the median of its times, until the next would exceed the budget."""
    begin = clock()
    measured: list[tuple[_Point, float]] = []
    spent_s = 0.0
    for point in points:
        if len(measured) >= always:
            last, last_s = measured[-1]
            expected_s = last_s * max(1.0, point.work / last.work)
            if spent_s + expected_s > budget_s:
                break
        times_s = [run(point)]
        while len(times_s) < _REPEATS and sum(times_s) + times_s[-1] < _REPEAT_SHARE * budget_s:
            times_s.append(run(point))
        measured.append((point, statistics.median(times_s)))
        spent_s = clock() - begin
    return measured


class _Bench:
    """Runs single points. One stream of tokens serves all, so KV once computed serves again."""

    def __init__(self, model: Model, limits: ProbeLimits, clock: Callable[[], float]) -> None:
        self._model = model
        self._limits = limits
        self._clock = clock
        longest = min(limits.prompt_tokens, model.info.max_context_tokens)
        generator = torch.Generator().manual_seed(0)
        self._tokens: list[int] = torch.randint(
            model.info.vocab_size, (longest,), generator=generator
        ).tolist()
        self._kv = SequenceKv(
            model.kv_shape, device=model.device, capacity_tokens=1, limit_tokens=longest
        )

    def prefill(self, point: _Prefill) -> float:
        """Seconds of one prefill."""
        reused = point.reused_tokens
        self._hold(reused)
        self._kv.reserve(point.prompt_tokens)
        host = self._kv.data[:, :, :reused].to("cpu", copy=True)
        begin = self._now()
        self._kv.data[:, :, :reused].copy_(host)
        logits = self._compute(reused, point.prompt_tokens)
        sample(logits, [SamplingState(Sampling(seed=0))])
        return self._now() - begin

    def decode(self, point: _Decode) -> float:
        """Seconds of one decode step."""
        each = point.each_tokens
        self._hold(each)
        spans = []
        for _ in range(point.sequences):
            kv = SequenceKv(
                self._model.kv_shape, device=self._model.device, capacity_tokens=each + 1
            )
            kv.data[:, :, :each].copy_(self._kv.data[:, :, :each])
            kv.tokens = each
            spans.append(Span(kv, each, 1))
        states = [SamplingState(Sampling(seed=row)) for row in range(point.sequences)]
        rows = range(point.sequences)
        begin = self._now()
        logits = self._model.forward([self._tokens[each]] * len(rows), spans, logit_rows=rows)
        sample(logits, states)
        return self._now() - begin

    def _hold(self, tokens: int) -> None:
        """Have the KV of the first ``tokens`` of the stream."""
        if self._kv.tokens < tokens:
            self._kv.reserve(tokens)
            self._compute(self._kv.tokens, tokens)

    def _compute(self, start: int, end: int) -> torch.Tensor:
        """Prefill ``[start, end)`` chunk by chunk; the logits after the last token."""
        done, held = start, self._kv.tokens
        while True:
            (chunk,) = plan_prefill_pass(
                [PrefillProgress(_STREAM, end, done)],
                token_budget=self._limits.chunk_tokens,
                block_tokens=self._limits.block_tokens,
            )
            logits: torch.Tensor = self._model.forward(
                self._tokens[done : chunk.end_token],
                [Span(self._kv, done, chunk.tokens)],
                logit_rows=[chunk.tokens - 1] if chunk.last else [],
            )
            done = chunk.end_token
            if chunk.last:
                # A shorter run over the same tokens leaves what lies beyond it valid.
                self._kv.tokens = max(held, end)
                return logits

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return self._clock()
