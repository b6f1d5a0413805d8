"""The text of a request is the model's own, however its prefix came to be where it was needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from snowskin.engine.model import inspect_model
from snowskin.terms.ids import Role
from snowskin.terms.request import Sampling
from tests.cluster.live import LiveCluster, live_cluster
from tests.engine import tiny
from tests.engine.pair import Oracle

torch.set_num_threads(1)

BLOCK_TOKENS = 8
POOL_BLOCKS = 128
OUTPUT_TOKENS = 24
SEEDED = Sampling(temperature=0.9, top_p=0.9, top_k=50, seed=11)
SEEDED_IN_TRANSFORMERS = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 50}


@dataclass(frozen=True, slots=True)
class Setup:
    architecture: str
    prefill: int
    decode: int
    transport: str


SETUPS = (
    Setup("llama", 1, 1, "shm"),
    Setup("qwen3", 2, 2, "shm"),
    Setup("gpt2", 2, 2, "tcp"),
)


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: "-".join(map(str, astuple(setup))))
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param  # type: ignore[no-any-return]


def astuple(setup: Setup) -> tuple[object, ...]:
    return (setup.architecture, f"{setup.prefill}P{setup.decode}D", setup.transport)


@pytest.fixture(scope="module")
def model_dir(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(setup.architecture, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


@pytest.fixture(scope="module")
def live(setup: Setup, model_dir: Path) -> Iterator[LiveCluster]:
    token_bytes = inspect_model(model_dir, dtype="fp32", device="cpu").kv_bytes_per_token
    with live_cluster(
        model_dir,
        prefill_nodes=setup.prefill,
        decode_nodes=setup.decode,
        transport=setup.transport,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=64,
        dram_bytes=POOL_BLOCKS * BLOCK_TOKENS * token_bytes,
    ) as live:
        yield live


def greedy(oracle: Oracle, tokens: list[int]) -> tuple[int, ...]:
    return tuple(oracle.generate(tuple(tokens), OUTPUT_TOKENS))


def seeded(oracle: Oracle, tokens: list[int]) -> tuple[int, ...]:
    torch.manual_seed(11)
    return tuple(oracle.generate(tuple(tokens), OUTPUT_TOKENS, **SEEDED_IN_TRANSFORMERS))


def test_a_cold_prompt_and_its_repetition_give_the_same_text(
    live: LiveCluster, oracle: Oracle
) -> None:
    prompt = tiny.prompt_tokens(101, seed=1)
    cold = live.ask(prompt, output_tokens=OUTPUT_TOKENS)
    warm = live.ask(prompt, output_tokens=OUTPUT_TOKENS)
    assert cold.tokens == warm.tokens == greedy(oracle, prompt)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
    assert cold.finish_reason == "length"


def test_seeded_sampling_gives_the_text_of_transformers_cold_and_warm(
    live: LiveCluster, oracle: Oracle
) -> None:
    prompt = tiny.prompt_tokens(77, seed=2)
    answers = [live.ask(prompt, output_tokens=OUTPUT_TOKENS, sampling=SEEDED) for _ in range(2)]
    assert [answer.tokens for answer in answers] == [seeded(oracle, prompt)] * 2


def test_the_next_turn_of_a_conversation_finds_the_answer_of_the_last(
    live: LiveCluster, oracle: Oracle
) -> None:
    history = tiny.prompt_tokens(30, seed=3)
    for turn in range(3):
        answer = live.ask(history, output_tokens=OUTPUT_TOKENS)
        assert answer.tokens == greedy(oracle, history)
        if turn:
            # The last generated token of a turn was never computed on, and blocks are whole.
            known = len(history) - 9 - 1
            assert answer.cached_tokens == known // BLOCK_TOKENS * BLOCK_TOKENS
            told = live.explain(answer.request)
            assert told.fetched_from in {f"{Role.DECODE}-0", f"{Role.DECODE}-1"}
            assert told.fetched_blocks
        history = [*history, *answer.tokens, *tiny.prompt_tokens(9, seed=40 + turn)]


def test_a_prefix_is_fetched_from_a_busy_prefill_node(
    setup: Setup, live: LiveCluster, oracle: Oracle
) -> None:
    if setup.prefill < 2:
        pytest.skip("needs two prefill nodes")
    shared = tiny.prompt_tokens(96, seed=5)
    live.ask(shared, output_tokens=2)
    prompts = [[*shared, *tiny.prompt_tokens(60, seed=50 + i)] for i in range(4)]
    answers = live.ask_all(prompts, output_tokens=OUTPUT_TOKENS)
    assert [answer.tokens for answer in answers] == [greedy(oracle, p) for p in prompts]
    told = [live.explain(answer.request) for answer in answers]
    fetched = [t for t in told if t.fetched_blocks]
    assert fetched, [(t.prefill, t.fetched_from, t.fetched_blocks) for t in told]
    assert all(answer.cached_tokens >= 96 for answer in answers)


def test_seventeen_concurrent_requests_get_the_text_they_would_get_alone(
    live: LiveCluster, oracle: Oracle
) -> None:
    prompts = [tiny.prompt_tokens(5 + 9 * i, seed=60 + i) for i in range(17)]
    answers = live.ask_all(prompts, output_tokens=OUTPUT_TOKENS)
    assert [answer.tokens for answer in answers] == [greedy(oracle, p) for p in prompts]
    sampled = live.ask_all(prompts, output_tokens=OUTPUT_TOKENS, sampling=SEEDED)
    assert [answer.tokens for answer in sampled] == [seeded(oracle, p) for p in prompts]


def test_a_partly_evicted_prefix_is_computed_anew_from_where_it_breaks(
    live: LiveCluster, oracle: Oracle, setup: Setup
) -> None:
    prompt = tiny.prompt_tokens(400, seed=7)
    live.ask(prompt, output_tokens=2)
    for filler in range(40):
        live.ask(tiny.prompt_tokens(100, seed=700 + filler), output_tokens=2)
        cached = live.held_tokens(prompt)
        if cached < 400:
            break
    answer = live.ask(prompt, output_tokens=OUTPUT_TOKENS)
    assert answer.tokens == greedy(oracle, prompt)
    assert answer.cached_tokens <= cached < 400
    # Of two nodes the one that holds nothing may be predicted to be the faster.
    assert answer.cached_tokens > 0 or setup.prefill > 1


def test_tenants_with_different_salts_share_nothing(live: LiveCluster) -> None:
    prompt = tiny.prompt_tokens(64, seed=8)
    assert live.ask(prompt, output_tokens=2, salt="a").cached_tokens == 0
    assert live.ask(prompt, output_tokens=2, salt="b").cached_tokens == 0
    assert live.ask(prompt, output_tokens=2, salt="a").cached_tokens > 0


def test_a_single_token_is_answered_without_a_decode_node(
    live: LiveCluster, oracle: Oracle
) -> None:
    prompt = tiny.prompt_tokens(40, seed=9)
    answer = live.ask(prompt, output_tokens=1)
    assert answer.tokens == greedy(oracle, prompt)[:1]
    assert answer.finish_reason == "length"


def test_a_stop_token_ends_the_answer_and_is_its_last(live: LiveCluster, oracle: Oracle) -> None:
    prompt = tiny.prompt_tokens(33, seed=10)
    expected = greedy(oracle, prompt)
    stop = expected[5]
    answer = live.ask(prompt, output_tokens=OUTPUT_TOKENS, stop_tokens=(stop,))
    assert answer.tokens == expected[: expected.index(stop) + 1]
    assert answer.finish_reason == "stop"
