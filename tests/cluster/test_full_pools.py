"""Pools with no room to spare: requests wait for each other's slots, and all are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from snowskin.engine.model import inspect_model
from tests.cluster.live import Answer, LiveCluster, collect, live_cluster
from tests.engine import tiny
from tests.engine.pair import Oracle

torch.set_num_threads(1)

BLOCK_TOKENS = 8
POOL_BLOCKS = 100
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def live(model_dir: Path) -> Iterator[LiveCluster]:
    token_bytes = inspect_model(model_dir, dtype="fp32", device="cpu").kv_bytes_per_token
    with live_cluster(
        model_dir,
        prefill_nodes=2,
        policy="load-balance",
        sequence_limit=1,
        block_tokens=BLOCK_TOKENS,
        dram_bytes=POOL_BLOCKS * BLOCK_TOKENS * token_bytes,
    ) as live:
        yield live


def test_second_turns_that_fill_the_decode_pool_together_do_not_wait_for_each_other(
    live: LiveCluster, model_dir: Path
) -> None:
    """30 blocks of each are held; both find 32 more in use, and each needs 50 for itself."""
    first = [tiny.prompt_tokens(30 * BLOCK_TOKENS, seed=seed) for seed in (1, 2)]
    second = [tokens + tiny.prompt_tokens(50 * BLOCK_TOKENS, seed=3) for tokens in first]
    for tokens in first:
        live.ask(tokens, output_tokens=2)

    async def ask_while_the_pool_is_in_use() -> list[Answer]:
        running = await live.submit([1, 2, 3], output_tokens=900, stop_tokens=())
        await anext(aiter(running))
        waiting = await live.submit(tiny.prompt_tokens(32 * BLOCK_TOKENS, seed=4), output_tokens=2)
        # Then its prefill node is free, and it waits for the one place in the batch.
        while waiting.first is None or not waiting.kv_arrived:
            await asyncio.sleep(0.005)
        flights = [await live.submit(tokens, output_tokens=2) for tokens in second]
        while any(flight.first is None for flight in flights):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)  # Both look for room.
        running.cancel()
        async with asyncio.timeout(PATIENCE_S):
            return [await collect(flight) for flight in flights]

    answers = live.run(ask_while_the_pool_is_in_use(), 2 * PATIENCE_S)
    oracle = Oracle(model_dir)
    for tokens, answer in zip(second, answers, strict=True):
        assert answer.tokens == tuple(oracle.generate(tuple(tokens), 2))
