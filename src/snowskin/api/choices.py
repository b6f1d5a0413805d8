"""Runs all choices of one plan and merges their tokens into one stream."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass

from snowskin.api.backend import Backend, Generation
from snowskin.api.choice_text import ChoiceDelta, ChoiceText
from snowskin.api.metrics import ApiMetrics
from snowskin.api.plans import Plan, Prompt
from snowskin.api.tokenizer import TextTokenizer
from snowskin.measure.latency import tbt_s
from snowskin.measure.records import Ending, RequestRecord
from snowskin.terms.errors import Overloaded, RequestFailed
from snowskin.terms.request import GenerationRequest
from snowskin.terms.serving import TokensArrived

MERGED_DELTAS = 32
"""Deltas that wait for the client; beyond, its generations wait in their own bounded queues."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that one HTTP request used."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class ChoiceSet:
    """The choices of one plan, under way.

    Of each prompt, choice 0 is submitted first and the others after its first token, so that they
    find its prefix cached. Where the backend has no room for all at once, the later ones take the
    places of the earlier. ``next`` raises the first error of any choice; whoever calls it must
    call ``close`` in the end, which cancels all that still runs.

    Args:
        arrived_s: when the HTTP request came, by ``time.monotonic``: TTFT counts from there.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        tokenizer: TextTokenizer,
        metrics: ApiMetrics,
        *,
        arrived_s: float,
    ) -> None:
        self._plan = plan
        self._backend = backend
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(MERGED_DELTAS)
        self._placing = asyncio.Lock()
        self._under_way = 0
        self._left = asyncio.Event()
        self._groups = _texts(plan, tokenizer)
        self._unfinished = sum(len(group) for group in self._groups)

    def start(self) -> None:
        """Submit choice 0 of every prompt."""
        for group in self._groups:
            self._spawn(group[0], tuple(group[1:]), self._arrived_s)

    async def next(self) -> ChoiceDelta | None:
        """The next tokens of any choice; None when all have finished.

        Raises:
            Overloaded, NodeUnavailable, RequestFailed: as the backend does.
        """
        if not self._unfinished:
            return None
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        if item.finish_reason is not None:
            self._unfinished -= 1
        return item

    async def close(self) -> None:
        """Cancel what still runs. Harmless after the end, or twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def usage(self) -> Usage:
        """Tokens so far; each prompt counts once, however many choices it has."""
        return Usage(
            prompt_tokens=self._plan.prompt_tokens,
            cached_tokens=sum(group[0].cached_tokens for group in self._groups),
            output_tokens=sum(text.output_tokens for group in self._groups for text in group),
        )

    def _spawn(self, text: ChoiceText, followers: tuple[ChoiceText, ...], from_s: float) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(text, followers, from_s)))

    async def _guarded(
        self, text: ChoiceText, followers: tuple[ChoiceText, ...], from_s: float
    ) -> None:
        try:
            await self._run(text, followers, from_s)
        except Exception as error:  # handed to the reader, which answers the client
            await self._queue.put(error)

    async def _run(
        self, text: ChoiceText, followers: tuple[ChoiceText, ...], from_s: float
    ) -> None:
        timing = _Timing(self._metrics, from_s)
        ending = Ending.CANCELLED
        generation = None
        try:
            generation = await self._place(text.request)
            async for arrived in generation:
                timing.count(arrived)
                delta = text.take(arrived)
                for follower in followers:
                    self._spawn(follower, (), time.monotonic())
                followers = ()
                if text.finished:
                    ending = Ending.COMPLETED
                    generation.complete()  # at once: a stop string may have ended it early
                if text.finished or delta.text or delta.tokens:
                    await self._queue.put(delta)
                if text.finished:
                    return
            raise RequestFailed("The generation ended without a reason.")
        except Overloaded:
            ending = Ending.REJECTED
            raise
        except Exception:
            ending = Ending.FAILED
            raise
        finally:
            if generation is not None:
                generation.cancel()
                self._under_way -= 1
                self._left.set()
            self._metrics.finished(timing.record(text, ending))

    async def _place(self, request: GenerationRequest) -> Generation:
        """Submit a choice. One that is turned away waits for another of this plan to end.

        It holds back those behind it, so that an end is followed by one more try, not by many.

        Raises:
            Overloaded: no choice of this plan is under way, so it is not these that fill the place.
        """
        async with self._placing:
            while True:
                self._left.clear()
                try:
                    generation = await self._backend.submit(request)
                except Overloaded:
                    if not self._under_way:
                        raise
                    await self._left.wait()
                else:
                    self._under_way += 1
                    return generation


class _Timing:
    """The times of one choice."""

    def __init__(self, metrics: ApiMetrics, from_s: float) -> None:
        self._metrics = metrics
        self._from_s = from_s
        self._first_s: float | None = None
        self._last_s = from_s
        self._intervals = array("d")

    def count(self, arrived: TokensArrived) -> None:
        """Tokens of one message came together: the first waited, the others did not."""
        now_s = time.monotonic()
        for position in range(len(arrived.tokens)):
            if self._first_s is None:
                self._first_s = now_s
            else:
                interval_s = 0.0 if position else now_s - self._last_s
                self._intervals.append(interval_s)
                self._metrics.token_interval(interval_s)
            self._last_s = now_s

    def record(self, text: ChoiceText, ending: Ending) -> RequestRecord:
        return RequestRecord(
            request=text.request.request,
            ending=ending,
            arrived_s=self._from_s,
            finished_s=time.monotonic(),
            prompt_tokens=len(text.request.tokens),
            output_tokens=text.output_tokens,
            cached_tokens=text.cached_tokens,
            ttft_s=None if self._first_s is None else self._first_s - self._from_s,
            tbt_s=tbt_s(self._intervals),
        )


def _texts(plan: Plan, tokenizer: TextTokenizer) -> list[list[ChoiceText]]:
    """The choices' texts by prompt, numbered as OpenAI does: all of prompt 0, then of prompt 1."""
    groups = []
    index = 0
    for prompt in plan.prompts:
        groups.append(_prompt_texts(index, prompt, plan, tokenizer))
        index += len(prompt.choices)
    return groups


def _prompt_texts(
    index: int, prompt: Prompt, plan: Plan, tokenizer: TextTokenizer
) -> list[ChoiceText]:
    return [
        ChoiceText(
            index + offset,
            request,
            tokenizer,
            stop_strings=plan.stop_strings,
            context=prompt.context,
        )
        for offset, request in enumerate(prompt.choices)
    ]
