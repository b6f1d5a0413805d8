"""A small real backend: the next token follows from a rule, in real time, with a real cache.

It recites its script, then ends with the stop token. It remembers the block keys of every prompt
it served, so a prompt seen before has cached tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from snowskin.terms.commands import Decision
from snowskin.terms.errors import NodeUnavailable, Overloaded, RequestFailed
from snowskin.terms.ids import BlockKey, NodeId, RequestId, Role, StartId
from snowskin.terms.keys import KeySpace
from snowskin.terms.request import GenerationRequest, SampledToken, TokenLogprob
from snowskin.terms.serving import (
    ClusterStatus,
    Explanation,
    NodeState,
    NodeStatus,
    RequestState,
    ServedPage,
    ServedRequest,
    ServingInfo,
    TokensArrived,
    TransferKind,
    TransferTotals,
)

BLOCK_TOKENS = 4

ANSWER = "The capital 😀 of France is Paris, and that is all."


@dataclass
class RuleMachine:
    """Fulfils ``api.backend.Backend``."""

    script: list[int]
    end: int
    vocab_size: int
    context_tokens: int = 200
    step_s: float = 0.0
    prefill_s: float = 0.0
    capacity: int = 10**6
    ready: bool = True
    fail_after_tokens: int | None = None
    submitted: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    completed_early: list[RequestId] = field(default_factory=list)
    running: set[RequestId] = field(default_factory=set)
    seen: set[BlockKey] = field(default_factory=set)
    bug: Exception | None = None
    given: int = 0

    @property
    def info(self) -> ServingInfo:
        return ServingInfo(
            model="rule-machine",
            model_dir="unused",
            key_space=KeySpace("rule-machine", "main", "float32", BLOCK_TOKENS),
            max_context_tokens=self.context_tokens,
            vocab_size=self.vocab_size,
            stop_tokens=(self.end,),
        )

    async def submit(self, request: GenerationRequest) -> Recital:
        if not self.ready:
            raise NodeUnavailable("No decode node is up.")
        if len(self.running) >= self.capacity:
            raise Overloaded("The TTFT of 40 s would break the SLO.", retry_after_s=2.1)
        if self.bug is not None:
            raise self.bug
        self.submitted.append(request)
        self.running.add(request.request)
        recital = Recital(self, request)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            recital.cancel()
            raise
        return recital

    def explain(self, request_id: RequestId) -> Explanation | None:
        for request in self.submitted:
            if request.request == request_id:
                return Explanation(
                    request=request_id,
                    state=RequestState.COMPLETED,
                    prompt_tokens=len(request.tokens),
                    block_tokens=BLOCK_TOKENS,
                    decision=Decision("rule", "there is one node", 0, (), (), 0.5, float("inf")),
                )
        return None

    def served(self, after: int) -> ServedPage:
        requests = tuple(
            ServedRequest(number, 0.0, len(request.tokens), 1, (number,) * len(request.keys))
            for number, request in enumerate(self.submitted, 1)
            if number > after
        )
        return ServedPage(StartId("one"), "rule-machine", BLOCK_TOKENS, requests[:2])

    def status(self) -> ClusterStatus:
        node = NodeStatus(
            node=NodeId("decode-0"),
            role=Role.DECODE,
            state=NodeState.READY if self.ready else NodeState.STARTING,
            pid=1,
            restarts=2,
            running_sequences=len(self.running),
            evicted_blocks=3,
        )
        return ClusterStatus(
            ready=self.ready,
            uptime_s=1.5,
            requests_in_flight=len(self.running),
            nodes=(node,),
            transfers=(TransferTotals(TransferKind.FETCH, 4, 4096, 0.25, 1),),
            rejections={"ttft": 7},
        )


class Recital:
    """Fulfils ``api.backend.Generation``."""

    def __init__(self, machine: RuleMachine, request: GenerationRequest) -> None:
        self._machine = machine
        self.request = request
        self._cancelled = asyncio.Event()

    def complete(self) -> None:
        if self.request.request in self._machine.running:
            self._machine.running.discard(self.request.request)
            self._machine.completed_early.append(self.request.request)
        self._cancelled.set()

    def cancel(self) -> None:
        if self.request.request in self._machine.running:
            self._machine.running.discard(self.request.request)
            self._machine.cancelled.append(self.request.request)
        self._cancelled.set()

    async def __aiter__(self) -> AsyncIterator[TokensArrived]:
        cached_tokens = self._remember()
        await self._wait(self._machine.prefill_s)
        for position in range(self.request.output_limit_tokens):
            if position:
                await self._wait(self._machine.step_s)
            if self._cancelled.is_set():
                return
            if position == self._machine.fail_after_tokens:
                self._machine.running.discard(self.request.request)
                raise RequestFailed("decode-0 died; its running requests are lost.")
            token = self._next(position)
            self._machine.given += 1
            reason = None
            if token in self.request.stop_tokens:
                reason = "stop"
            elif position + 1 == self.request.output_limit_tokens:
                reason = "length"
            if reason is not None:
                self._machine.running.discard(self.request.request)
            yield TokensArrived((self._sampled(token),), cached_tokens, reason)
            if reason is not None:
                return

    def _remember(self) -> int:
        keys = self.request.keys
        blocks = 0
        while blocks < len(keys) and keys[blocks] in self._machine.seen:
            blocks += 1
        self._machine.seen.update(keys)
        return min(blocks * BLOCK_TOKENS, len(self.request.tokens) - 1)

    def _next(self, position: int) -> int:
        """The script, begun so far in as the seed says; then the end, again and again."""
        script = self._machine.script[self.request.sampling.seed or 0 :]
        if position < len(script):
            return script[position]
        if position < self.request.min_output_tokens:
            return script[-1]
        return self._machine.end

    def _sampled(self, token: int) -> SampledToken:
        count = self.request.sampling.top_logprobs
        if count is None:
            return SampledToken(token)
        top = tuple(TokenLogprob((token + rank) % 256 + 2, -0.5 - rank) for rank in range(count))
        return SampledToken(token, -0.5, top)

    async def _wait(self, duration_s: float) -> None:
        try:
            async with asyncio.timeout(duration_s):
                await self._cancelled.wait()
        except TimeoutError:
            pass
