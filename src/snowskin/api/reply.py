"""One generation request from its body to the last byte of its answer.

This is the driver's edge: every error ends here, as an answer or as an error event, and whatever
happens, a client's departure included, nothing of the request is left running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from snowskin.api.backend import Backend
from snowskin.api.choices import ChoiceSet
from snowskin.api.config import ApiConfig
from snowskin.api.errors import ApiError, as_api_error, internal_error
from snowskin.api.formats import Collected, Format
from snowskin.api.intake import Intake
from snowskin.api.metrics import ApiMetrics
from snowskin.api.plans import Plan
from snowskin.api.tokenizer import TextTokenizer

ERROR_SEND_S = 5.0
"""How long a client that reads too slowly is given to take its error event."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Front:
    """What every request needs of the API."""

    backend: Backend
    tokenizer: TextTokenizer
    config: ApiConfig
    intake: Intake
    metrics: ApiMetrics


class GenerationReply(Response):
    """Answers one request for ``/v1/chat/completions`` or ``/v1/completions``.

    Args:
        prepare: makes the plan of the body, in a thread.
        make_format: how the endpoint writes.
    """

    def __init__(
        self,
        front: Front,
        prepare: Callable[[bytes], Plan],
        make_format: Callable[[Plan, TextTokenizer], Format],
    ) -> None:
        super().__init__()
        self._front = front
        self._prepare = prepare
        self._make_format = make_format
        self._arrived_s = time.monotonic()
        self._plan: Plan | None = None
        self._started = False
        self._streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI wants it."""
        try:
            with self._front.intake.visit():
                plan = await self._front.intake.work(Request(scope, receive), self._prepare)
                self._plan = plan
                await self._while_connected(plan, receive, send)
        except ClientDisconnect:
            return
        except Exception as error:
            known = self._known(error)
            if self._plan is None:
                self._front.metrics.refused(known.status)
            await self._send_error(send, known)

    async def _while_connected(self, plan: Plan, receive: Receive, send: Send) -> None:
        """Generate until the answer is sent or the client is gone; then free everything."""
        front = self._front
        choices = ChoiceSet(
            plan, front.backend, front.tokenizer, front.metrics, arrived_s=self._arrived_s
        )
        work = asyncio.create_task(self._answer(plan, choices, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await choices.close()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, plan: Plan, choices: ChoiceSet, send: Send) -> None:
        timeout_s = self._front.config.request_timeout_s
        choices.start()
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                form = self._make_format(plan, self._front.tokenizer)
                if plan.stream:
                    await self._stream(plan, choices, form, send)
                else:
                    await self._send_json(send, 200, await _gather(plan, choices, form))
        except TimeoutError:
            if not deadline.expired():
                raise
            raise ApiError(
                f"The request took longer than {timeout_s} s and was cancelled.",
                status=504,
                code="request_timeout",
            ) from None

    async def _stream(self, plan: Plan, choices: ChoiceSet, form: Format, send: Send) -> None:
        """Server-sent events. An error before the first token still gets a status of its own."""
        delta = await choices.next()
        self._streaming = True
        await self._start(
            send, 200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"}
        )
        await self._send_body(send, b"".join(map(event, form.opening())))
        while delta is not None:
            if data := b"".join(map(event, form.chunks(delta))):
                await self._send_body(send, data)
            delta = await choices.next()
        if plan.include_usage:
            await self._send_body(send, event(form.usage_chunk(choices.usage())))
        await self._send_body(send, b"data: [DONE]\n\n", more=False)

    def _known(self, error: Exception) -> ApiError:
        """An error as clients may see it; our own mistakes go to the log."""
        known = as_api_error(error, unavailable_retry_s=self._front.config.unavailable_retry_s)
        if known is not None:
            return known
        log.error("request %s failed", self._plan and self._plan.request, exc_info=error)
        return internal_error()

    async def _send_error(self, send: Send, error: ApiError) -> None:
        if not self._started:
            await self._send_json(send, error.status, error.body(), dict(error.headers()))
            return
        if not self._streaming:
            return  # an answer in one piece was cut off; the server closes the connection
        with suppress(TimeoutError):
            async with asyncio.timeout(ERROR_SEND_S):
                await self._send_body(send, event(error.body()), more=False)

    async def _send_json(
        self, send: Send, status: int, body: object, headers: dict[str, str] | None = None
    ) -> None:
        data = msgspec.json.encode(body)
        headers = {"content-length": str(len(data)), **(headers or {})}
        await self._start(send, status, "application/json", headers)
        await self._send_body(send, data, more=False)

    async def _start(
        self, send: Send, status: int, media_type: str, headers: dict[str, str]
    ) -> None:
        self._started = True
        named = {"content-type": media_type, **headers}
        if self._plan is not None:
            named["x-request-id"] = self._plan.request
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send_body(self, send: Send, data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _gather(plan: Plan, choices: ChoiceSet, form: Format) -> dict[str, Any]:
    collected = [Collected() for prompt in plan.prompts for _ in prompt.choices]
    while (delta := await choices.next()) is not None:
        collected[delta.index].add(delta)
    return form.whole(collected, choices.usage())


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
