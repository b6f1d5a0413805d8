"""The default model in fp32, on one and on two nodes of each role: the text is its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from snowskin.engine.default_model import resolve_model
from snowskin.engine.model import inspect_model
from snowskin.terms.errors import SnowskinError
from snowskin.terms.request import Sampling
from tests.cluster.live import LiveCluster, live_cluster
from tests.engine.pair import Oracle

torch.set_num_threads(1)

OUTPUT_TOKENS = 12
BLOCK_TOKENS = 16
POOL_BLOCKS = 96
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=5)
STORY = (
    "The lighthouse keeper counted the ships each evening and wrote their names in a book. "
    "One night a ship came that had no name, no flag and no lights, and it anchored in the bay. "
)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        return resolve_model("smollm2")
    except SnowskinError as error:
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


@pytest.fixture(scope="module", params=[(1, "shm"), (2, "tcp")], ids=["1P1D-shm", "2P2D-tcp"])
def live(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[LiveCluster]:
    nodes, transport = request.param
    token_bytes = inspect_model(model_dir, dtype="fp32", device="cpu").kv_bytes_per_token
    with live_cluster(
        model_dir,
        prefill_nodes=nodes,
        decode_nodes=nodes,
        transport=transport,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=64,
        dram_bytes=POOL_BLOCKS * BLOCK_TOKENS * token_bytes,
    ) as live:
        yield live


@pytest.fixture(scope="module")
def story(model_dir: Path) -> list[int]:
    return list(AutoTokenizer.from_pretrained(model_dir)(STORY).input_ids)


def greedy(oracle: Oracle, tokens: list[int]) -> tuple[int, ...]:
    return tuple(oracle.generate(tuple(tokens), OUTPUT_TOKENS))


def seeded(oracle: Oracle, tokens: list[int]) -> tuple[int, ...]:
    torch.manual_seed(5)
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
    return tuple(oracle.generate(tuple(tokens), OUTPUT_TOKENS, **options))


def test_cold_warm_and_seeded_answers_are_those_of_transformers(
    live: LiveCluster, oracle: Oracle, story: list[int]
) -> None:
    cold = live.ask(story, output_tokens=OUTPUT_TOKENS)
    warm = live.ask(story, output_tokens=OUTPUT_TOKENS)
    drawn = live.ask(story, output_tokens=OUTPUT_TOKENS, sampling=SEEDED)
    assert cold.tokens == warm.tokens == greedy(oracle, story)
    assert drawn.tokens == seeded(oracle, story)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == (len(story) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_second_turn_fetches_the_first_answer_from_its_decode_node(
    live: LiveCluster, oracle: Oracle, story: list[int]
) -> None:
    history = story[:20]
    first = live.ask(history, output_tokens=40, stop_tokens=())
    history = [*history, *first.tokens, *story[20:30]]
    second = live.ask(history, output_tokens=OUTPUT_TOKENS)
    assert second.tokens == greedy(oracle, history)
    assert second.cached_tokens == (20 + 40 - 1) // 16 * 16
    told = live.explain(second.request)
    assert told.fetched_from == live.explain(first.request).decode
    assert told.fetched_blocks


def test_seventeen_at_once_on_a_full_pool_share_a_prefix_and_get_the_right_texts(
    live: LiveCluster, oracle: Oracle, story: list[int]
) -> None:
    story = [*story[30:], *story[:30]]
    live.ask(story, output_tokens=2)
    prompts = [[*story, *story[i : i + 25]] for i in range(1, 18)]
    answers = live.ask_all(prompts, output_tokens=OUTPUT_TOKENS)
    assert [answer.tokens for answer in answers] == [greedy(oracle, p) for p in prompts]
    told = [live.explain(answer.request) for answer in answers]
    nodes = {t.prefill for t in told}
    assert len(nodes) == 1 or any(t.fetched_blocks for t in told)


def test_a_partly_evicted_prefix_is_computed_anew_from_where_it_breaks(
    live: LiveCluster, oracle: Oracle, story: list[int]
) -> None:
    if len(live.call(live.cluster.status).nodes) > 2:
        pytest.skip("filling four pools would only take longer")
    prompt = (story * 9)[:300]
    live.ask(prompt, output_tokens=2)
    assert live.held_tokens(prompt) == 288
    for filler in range(80):
        live.ask([100 + filler, *story[: 47 + filler % 3]], output_tokens=2)
        if live.held_tokens(prompt) < 288:
            break
    answer = live.ask(prompt, output_tokens=OUTPUT_TOKENS)
    assert answer.tokens == greedy(oracle, prompt)
    assert answer.cached_tokens < 288
