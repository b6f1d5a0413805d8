"""One request on its way through the live cluster, and the stream of its tokens to the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from snowskin.measure.latency import intervals_s, tbt_s
from snowskin.terms.commands import Decision
from snowskin.terms.errors import SnowskinError
from snowskin.terms.ids import NodeId, RequestId
from snowskin.terms.request import GenerationRequest, SampledToken
from snowskin.terms.serving import Explanation, FinishReason, RequestState, TokensArrived


class Flight:
    """Fulfils the API's ``Generation``. Owned by the front; touched on its event loop only.

    A request may be placed more than once (a node died before any token was out). Each placement
    has a wire id of its own, so a late word of an earlier one is recognised and dropped.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        block_tokens: int,
        now_s: float,
        finish: Callable[[Flight, RequestState], None],
    ) -> None:
        self._request = request
        self._block_tokens = block_tokens
        self._finish = finish
        self.state = RequestState.QUEUED
        self.placements = 0
        self.decision: Decision | None = None
        self.prefill: NodeId | None = None
        self.decode: NodeId | None = None
        self.first: SampledToken | None = None
        self.kv_arrived = False
        self.cached_tokens: int | None = None
        self.fetched_from: NodeId | None = None
        self.fetched_blocks: int | None = None
        self.fetch_s: float | None = None
        self.prefill_s: float | None = None
        self.kv_bytes: int | None = None
        self.kv_transfer_s: float | None = None
        self.failure: SnowskinError | None = None
        self.finish_reason: FinishReason | None = None
        self.arrived_s = now_s
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.token_times_s: list[float] = []
        self._untaken: list[SampledToken] = []
        self._news = asyncio.Event()

    @property
    def request(self) -> GenerationRequest:
        """What was submitted."""
        return self._request

    @property
    def id(self) -> RequestId:
        """As the client knows it."""
        return self._request.request

    @property
    def wire_id(self) -> RequestId:
        """As the nodes know its present placement."""
        return RequestId(f"{self.id}~{self.placements}")

    @property
    def ended(self) -> bool:
        """True once it holds nothing any more."""
        return self.state not in (
            RequestState.QUEUED,
            RequestState.PREFILLING,
            RequestState.DECODING,
        )

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return self.token_times_s[0] - self.arrived_s if self.token_times_s else None

    @property
    def tbt_s(self) -> float | None:
        """Mean of the longest 10 % of the intervals between tokens; None below two tokens."""

        return tbt_s(intervals_s(self.token_times_s))

    def job(self) -> GenerationRequest:
        """The request under its present wire id."""
        return msgspec.structs.replace(self._request, request=self.wire_id)

    def place(self, decision: Decision, prefill: NodeId, decode: NodeId) -> None:
        """A new placement; what an earlier one had reached is void."""
        self.wait(decision)
        self.placements += 1
        self.prefill, self.decode = prefill, decode

    def wait(self, decision: Decision) -> None:
        """It is on no node, for a while; what an earlier placement had reached is void."""
        assert not self.token_times_s, f"{self.id} has tokens out and cannot start again"
        self.decision = decision
        self.prefill = self.decode = None
        self.state = RequestState.QUEUED
        self.kv_arrived = False
        self.first = None

    def add_token(
        self, token: SampledToken, finish_reason: FinishReason | None, *, now_s: float
    ) -> None:
        """One more token, at ``now_s``."""
        self.token_times_s.append(now_s)
        self._untaken.append(token)
        self.finish_reason = finish_reason
        self._news.set()

    def end(
        self, state: RequestState, failure: SnowskinError | None = None, *, now_s: float
    ) -> None:
        """It holds nothing any more; the reader is told."""
        assert not self.ended, f"{self.id} ended twice"
        self.ended_s = now_s
        self.state = state
        self.failure = failure
        self._news.set()

    def complete(self) -> None:
        """The answer is whole by the reader's word (a stop string). Harmless after the end."""
        if not self.ended:
            self.finish_reason = "stop"
            self._finish(self, RequestState.COMPLETED)

    def cancel(self) -> None:
        """Free all that it holds, at once. Harmless after the end, or twice."""
        if not self.ended:
            self._finish(self, RequestState.CANCELLED)

    async def __aiter__(self) -> AsyncIterator[TokensArrived]:
        """The tokens as they come; those that wait are handed over together.

        Untaken tokens are bounded by the request's output limit.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            tokens, self._untaken = tuple(self._untaken), []
            if tokens:
                # The reason to finish is told with the last token, never before it.
                yield TokensArrived(tokens, self.cached_tokens or 0, self.finish_reason)
            if self.failure is not None:
                raise self.failure
            if self.ended and not self._untaken:
                return

    def explanation(self) -> Explanation | None:
        """Why it went where it went, and what it really cost; None before it was placed."""
        if self.decision is None:
            return None
        return Explanation(
            request=self.id,
            state=self.state,
            prompt_tokens=len(self._request.tokens),
            block_tokens=self._block_tokens,
            decision=self.decision,
            output_tokens=len(self.token_times_s),
            prefill=self.prefill,
            decode=self.decode,
            cached_tokens=self.cached_tokens,
            fetched_from=self.fetched_from,
            fetched_blocks=self.fetched_blocks,
            fetch_s=self.fetch_s,
            queue_s=None if self.started_s is None else self.started_s - self.arrived_s,
            prefill_s=self.prefill_s,
            ttft_s=self.ttft_s,
            kv_bytes=self.kv_bytes,
            kv_transfer_s=self.kv_transfer_s,
            tbt_s=self.tbt_s,
            failure=None if self.failure is None else str(self.failure),
        )
