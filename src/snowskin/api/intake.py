"""What comes in: bodies within bounds, keys, and the threads in which text becomes tokens."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from snowskin.api.config import ApiConfig
from snowskin.api.errors import ApiError

T = TypeVar("T")

DRAIN_TIMEOUT_S = 2.0


class Intake:
    """Bounds what all clients together may have open, and runs text work off the event loop."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._open_requests = 0
        self._pending_body_bytes = 0
        self._threads = ThreadPoolExecutor(config.text_threads, thread_name_prefix="api-text")

    def close(self) -> None:
        """Let the threads end after what they are at."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Count one request as open.

        Raises:
            ApiError: 429, too many are.
        """
        if self._open_requests >= self._config.max_open_requests:
            raise self._full(f"{self._open_requests} requests are open")
        self._open_requests += 1
        try:
            yield
        finally:
            self._open_requests -= 1

    async def work(self, request: Request, job: Callable[[bytes], T]) -> T:
        """Read the body and give it to ``job`` in a thread.

        Raises:
            ApiError: 408, 413, 429, or what the job raises.
            ClientDisconnect: the client left while it sent.
        """
        await self._check_declared(request)
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                await self._read(request, body)
            return await self.run(partial(job, bytes(body)))
        except TimeoutError:
            raise ApiError(
                f"The body did not come within {self._config.body_timeout_s} s.",
                status=408,
                code="body_timeout",
            ) from None
        finally:
            self._pending_body_bytes -= len(body)

    async def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, job)

    def check_key(self, request: Request) -> None:
        """Compare the bearer token in constant time.

        Raises:
            ApiError: 401.
        """
        if self._config.api_key is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip().encode("latin-1")  # as the header's bytes were decoded
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given, self._config.api_key.encode()
        ):
            raise ApiError(
                "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.",
                status=401,
                code="invalid_api_key",
            )

    async def _read(self, request: Request, body: bytearray) -> None:
        """Append the request's body to ``body``, and count it as pending."""
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, more = message.get("body", b""), message.get("more_body", False)
            body += chunk
            self._pending_body_bytes += len(chunk)
            if len(body) > self._config.max_body_bytes:
                if more:
                    await self._drain(request)
                raise self._too_large(f"at least {len(body)}")
            if self._pending_body_bytes > self._config.max_pending_body_bytes:
                raise self._full("too many bodies wait to be read")

    async def _check_declared(self, request: Request) -> None:
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared[:19]) > self._config.max_body_bytes:
            if "expect" not in request.headers:
                await self._drain(request)
            raise self._too_large(declared[:19])

    async def _drain(self, request: Request) -> None:
        """Discard a little more of a body that is too large.

        A client that is still sending when the connection closes may never see the answer.
        """
        left = self._config.max_body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while left > 0:
                    message = await request.receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            f"The body has {size} bytes; at most {self._config.max_body_bytes} are accepted.",
            status=413,
            code="body_too_large",
        )

    def _full(self, why: str) -> ApiError:
        return ApiError(
            f"The server is full: {why}.",
            status=429,
            code="overloaded",
            retry_after_s=self._config.unavailable_retry_s,
        )
