"""A real cluster under test: real node processes, real sockets, driven from ordinary test code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from snowskin.cluster.config import ServeConfig
from snowskin.cluster.flight import Flight
from snowskin.cluster.front import Cluster
from snowskin.cluster.prepare import serving_info
from snowskin.cost.costs import DecodeCost, LinkCost, PrefillCost
from snowskin.cost.profile import Profile
from snowskin.engine.model import inspect_model
from snowskin.terms.ids import RequestId
from snowskin.terms.keys import prompt_keys
from snowskin.terms.request import GenerationRequest, Sampling
from snowskin.terms.serving import Explanation, FinishReason

_T = TypeVar("_T")
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
GREEDY = Sampling(temperature=0.0)

# Slow to compute and fast to fetch: any longer prefix elsewhere is worth its fetch.
PROFILE = Profile(
    name="test",
    model="test",
    hardware="test",
    source="chosen so that fetching pays",
    kv_bytes_per_token=1,
    prefill=PrefillCost(base_s=0.01, token_s=0.01, token_pair_s=0.0),
    decode=DecodeCost(base_s=0.01, sequence_s=0.001, context_token_s=0.0),
    transfer=LinkCost(latency_s=0.0001, bytes_per_s=1e9),
    load=LinkCost(latency_s=0.0001, bytes_per_s=1e9),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request."""

    request: RequestId
    tokens: tuple[int, ...]
    cached_tokens: int
    finish_reason: FinishReason | None


class LiveCluster:
    """A cluster on an event loop of its own thread."""

    def __init__(self, config: ServeConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._numbers = count()
        model = inspect_model(Path(config.model), dtype=config.dtype, device="cpu")
        self.cluster = Cluster(config, serving_info(config, model), PROFILE)

    def run(self, work: Coroutine[Any, Any, _T], timeout_s: float = ANSWER_TIMEOUT_S) -> _T:
        """Run a coroutine on the cluster's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function on the cluster's loop."""

        async def calling() -> _T:
            return function()

        return self.run(calling())

    async def submit(
        self,
        tokens: Sequence[int],
        *,
        output_tokens: int,
        sampling: Sampling = GREEDY,
        salt: str = "",
        stop_tokens: tuple[int, ...] | None = None,
    ) -> Flight:
        """Place a request."""
        space = self.cluster.info.key_space
        if salt:
            space = msgspec.structs.replace(space, tenant_salt=salt)
        request = GenerationRequest(
            request=RequestId(f"test-{next(self._numbers)}"),
            tokens=tuple(tokens),
            keys=prompt_keys(space, tokens),
            output_limit_tokens=output_tokens,
            sampling=sampling,
            stop_tokens=self.cluster.info.stop_tokens if stop_tokens is None else stop_tokens,
        )
        return await self.cluster.submit(request)

    async def answer(self, tokens: Sequence[int], **options: Any) -> Answer:
        """Place a request and wait for its whole answer."""
        return await collect(await self.submit(tokens, **options))

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        """The same, from the test's thread."""
        return self.run(self.answer(tokens, **options))

    def ask_all(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        """All at the same time."""

        async def asking() -> list[Answer]:
            return list(await asyncio.gather(*(self.answer(p, **options) for p in prompts)))

        return self.run(asking())

    def held_tokens(self, prompt: Sequence[int]) -> int:
        """The longest prefix of a prompt that any node holds."""
        space = self.cluster.info.key_space
        keys = prompt_keys(space, prompt)
        found = self.call(lambda: self.cluster.directory.longest_prefix(keys))
        return space.block_tokens * max(found.values(), default=0)

    def explain(self, request: RequestId) -> Explanation:
        """Why it went where it went."""
        explanation = self.call(lambda: self.cluster.explain(request))
        assert explanation is not None
        return explanation


async def collect(flight: Flight) -> Answer:
    """All of a generation."""
    tokens: list[int] = []
    cached, reason = 0, None
    async for arrived in flight:
        tokens += [sampled.token for sampled in arrived.tokens]
        cached, reason = arrived.cached_tokens, arrived.finish_reason
    return Answer(flight.id, tuple(tokens), cached, reason)


@contextmanager
def live_cluster(model_dir: Path, **options: Any) -> Iterator[LiveCluster]:
    """A cluster that is ready, and ends with the block."""
    settings = {"dtype": "fp32", "threads": 1, "dram_bytes": 1 << 24, "block_tokens": 8}
    config = ServeConfig(model=str(model_dir), **{**settings, **options})
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="front", daemon=True)
    thread.start()
    live = LiveCluster(config, loop)
    try:
        live.call(live.cluster.launch)
        live.run(live.cluster.wait_ready(), START_TIMEOUT_S)
        yield live
    finally:
        live.run(live.cluster.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
