"""What runs together: the chunks of a prefill pass, and the sequences of a decode batch. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from snowskin.terms.ids import RequestId


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How far a prompt is: the KV of its first ``done_tokens`` is held, reused or computed.

    At least one token is left: the last token of a prompt is always computed, for its logits.
    """

    request: RequestId
    prompt_tokens: int
    done_tokens: int

    def __post_init__(self) -> None:
        assert 0 <= self.done_tokens < self.prompt_tokens, self


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens ``[start_token, end_token)`` of a prompt, computed in one pass."""

    request: RequestId
    start_token: int
    end_token: int
    last: bool
    """The chunk ends with the prompt, so the pass yields the first output token."""

    @property
    def tokens(self) -> int:
        """How many tokens the chunk computes."""
        return self.end_token - self.start_token


def plan_prefill_pass(
    jobs: Sequence[PrefillProgress], *, token_budget: int, block_tokens: int
) -> tuple[Chunk, ...]:
    """The chunks of the next pass: at most ``token_budget`` tokens, at most one chunk a job.

    First come, first served: each job takes what it can use of the budget, and what is left goes
    to the next, so short prompts share a pass and a long one is cut. A chunk ends on a block
    boundary unless it ends its prompt: then every pass leaves whole blocks, which can be
    published, transferred and committed at once. A job that could not reach a boundary within
    what is left is passed over in this pass only.

    No prompt starves: the first job gains at least one block in every pass, so a job waits for
    the work that stood before it and for nothing that came later. A long prompt does delay those
    behind it, by its own length; sharing the budget fairly would delay it in turn by everything
    that arrives meanwhile, and T_queue, the sum of the work queued before a request, would no
    longer predict its wait.

    Args:
        jobs: in order of arrival.
        token_budget: at least ``block_tokens``, so that the first job always moves.

    Source: cutting prompts to a token budget is Sarathi-Serve (arXiv 2403.02310, §4); first come,
    first served with the rest handed on is vLLM's chunked prefill; T_queue is FAST '25, Algorithm
    1. Ending on block boundaries is our choice.
    """
    assert 1 <= block_tokens <= token_budget, (block_tokens, token_budget)
    chunks: list[Chunk] = []
    left_tokens = token_budget
    for job in jobs:
        if left_tokens == 0:
            break
        end = min(job.done_tokens + left_tokens, job.prompt_tokens)
        last = end == job.prompt_tokens
        if not last:
            end -= end % block_tokens
        if end <= job.done_tokens:
            continue
        chunks.append(Chunk(job.request, job.done_tokens, end, last))
        left_tokens -= end - job.done_tokens
    return tuple(chunks)


class Submission(StrEnum):
    """What became of a sequence offered to a decode batch."""

    QUEUED = "queued"
    QUEUE_FULL = "queue full"
    NEVER_FITS = "never fits"
    """Its prompt and output limit together exceed the whole KV budget."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The bounds of a decode batch; all at least 1, ``queue_limit`` at least 0."""

    sequence_limit: int
    """Most sequences that are loading or running at once."""
    kv_token_budget: int
    """Most tokens of KV that these may come to hold together."""
    queue_limit: int
    """Most sequences that wait."""

    def __post_init__(self) -> None:
        assert self.sequence_limit >= 1, self
        assert self.kv_token_budget >= 1, self
        assert self.queue_limit >= 0, self


class DecodeBatch:
    """Continuous batching: which sequences wait, load and run on a decode node.

    A sequence passes ``submit`` → waiting → ``admit`` → loading (its KV moves to the device) →
    ``join`` → running → ``leave``. ``leave`` serves as well for one that is cancelled, wherever
    it stands, and frees its place and its reservation at once.

    Admission reserves prompt + output limit in the KV budget. The alternative, to grow into free
    memory and preempt when it runs out (vLLM), fits more sequences when outputs stay short of
    their limits, but a decode node cannot recompute what it preempted: the KV would have to be
    swapped out, or prefilled anew on another node, and either breaks the TBT that admission
    promised. With the reservation a sequence that joined always finishes. The Conductor counts
    room by the same rule (``conductor.decode_choice``), and so does the simulator (``sim.decode``):
    whoever is let in where there is room need not wait for any.

    Waiting sequences are admitted strictly in order: one that does not fit yet holds back those
    behind it, so that a large one is not overtaken for ever. No clock, no threads: the caller
    serialises the calls.

    Source: iteration-level scheduling is Orca (OSDI '22, §3); the reservation is our choice.
    """

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._waiting: OrderedDict[RequestId, int] = OrderedDict()
        self._loading: OrderedDict[RequestId, int] = OrderedDict()
        self._running: OrderedDict[RequestId, int] = OrderedDict()
        self._reserved_tokens = 0

    @property
    def limits(self) -> DecodeLimits:
        """The bounds given at the start."""
        return self._limits

    @property
    def waiting(self) -> tuple[RequestId, ...]:
        """Those not yet admitted, first come first."""
        return tuple(self._waiting)

    @property
    def loading(self) -> tuple[RequestId, ...]:
        """Those admitted whose KV is on its way to the device."""
        return tuple(self._loading)

    @property
    def running(self) -> tuple[RequestId, ...]:
        """Those that take part in the next step, in the order they joined."""
        return tuple(self._running)

    @property
    def reserved_tokens(self) -> int:
        """KV tokens that the loading and running sequences may come to hold."""
        return self._reserved_tokens

    def __contains__(self, request: RequestId) -> bool:
        return request in self._waiting or request in self._loading or request in self._running

    def __len__(self) -> int:
        return len(self._waiting) + len(self._loading) + len(self._running)

    def submit(
        self, request: RequestId, *, prompt_tokens: int, output_limit_tokens: int
    ) -> Submission:
        """Put a sequence at the end of the queue, unless it never fits or the queue is full.

        A sequence that finds room is admitted by the next ``admit``; the queue bound counts it
        until then.
        """
        assert request not in self, request
        assert prompt_tokens >= 1, prompt_tokens
        assert output_limit_tokens >= 1, output_limit_tokens
        reserve_tokens = prompt_tokens + output_limit_tokens
        if reserve_tokens > self._limits.kv_token_budget:
            return Submission.NEVER_FITS
        if len(self._waiting) >= self._limits.queue_limit and not self._has_room(reserve_tokens):
            return Submission.QUEUE_FULL
        self._waiting[request] = reserve_tokens
        return Submission.QUEUED

    def admit(self) -> tuple[RequestId, ...]:
        """Move the waiting sequences that fit to loading, in order; gives those moved."""
        admitted: list[RequestId] = []
        while self._waiting:
            request, reserve_tokens = next(iter(self._waiting.items()))
            if not self._fits(reserve_tokens):
                break
            del self._waiting[request]
            self._loading[request] = reserve_tokens
            self._reserved_tokens += reserve_tokens
            admitted.append(request)
        return tuple(admitted)

    def join(self, request: RequestId) -> None:
        """The KV of a loading sequence is on the device: it runs from the next step on."""
        self._running[request] = self._loading.pop(request)

    def leave(self, request: RequestId) -> bool:
        """Free all that a sequence holds, wherever it stands; False if it is not here."""
        if self._waiting.pop(request, None) is not None:
            return True
        held_tokens = self._loading.pop(request, None)
        if held_tokens is None:
            held_tokens = self._running.pop(request, None)
        if held_tokens is None:
            return False
        self._reserved_tokens -= held_tokens
        return True

    def check(self) -> None:
        """Assert what must always hold; for tests and the simulator's law checks."""
        held = [*self._loading.values(), *self._running.values()]
        assert self._reserved_tokens == sum(held)
        assert self._reserved_tokens <= self._limits.kv_token_budget
        assert len(held) <= self._limits.sequence_limit
        places = (set(self._waiting), set(self._loading), set(self._running))
        assert sum(map(len, places)) == len(set().union(*places)), "a sequence stands in two places"

    def _fits(self, reserve_tokens: int) -> bool:
        held_count = len(self._loading) + len(self._running)
        return (
            held_count < self._limits.sequence_limit
            and self._reserved_tokens + reserve_tokens <= self._limits.kv_token_budget
        )

    def _has_room(self, reserve_tokens: int) -> bool:
        return not self._waiting and self._fits(reserve_tokens)
