from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snowskin.engine.model import Model, inspect_model
from snowskin.terms.ids import RequestId
from snowskin.terms.request import GenerationRequest
from tests.engine import tiny
from tests.engine.pair import Oracle, Pair, load

torch.set_num_threads(1)

LIMIT = 9


class Scripts:
    """Prompts that share beginnings, with the outputs that they must get."""

    def __init__(self, model_dir: Path) -> None:
        self.model = load(model_dir)
        oracle = Oracle(model_dir)
        stem = tiny.prompt_tokens(90, seed=77)
        self.prompts = [
            [*stem[:cut], *tiny.prompt_tokens(length, seed=length)]
            for cut, length in ((0, 1), (16, 40), (40, 3), (64, 70), (90, 25), (90, 6), (0, 32))
        ]
        self.outputs = [oracle.generate(tuple(prompt), LIMIT) for prompt in self.prompts]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def scripts(model_dir: Path) -> Scripts:
    return Scripts(model_dir)


def check(pair: Pair, scripts: Scripts, asked: dict[RequestId, int], gone: set[RequestId]) -> None:
    for request, index in asked.items():
        done = pair.done[request]
        if request in gone:
            assert done.tokens == scripts.outputs[index][: len(done.tokens)]
        else:
            assert done.failure is None
            assert done.tokens == scripts.outputs[index]


@settings(deadline=None, max_examples=50)
@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(0, 6)),
            st.tuples(st.just("cancel"), st.integers(0, 12)),
            st.tuples(st.just("prefill"), st.integers(1, 3)),
            st.tuples(st.just("decode"), st.integers(1, 6)),
        ),
        max_size=40,
    ),
    slots=st.integers(12, 24),
    chunk_blocks=st.integers(1, 6),
)
def test_any_order_of_submits_cancels_and_steps_gives_right_tokens_and_leaves_nothing(
    scripts: Scripts, operations: list[tuple[str, int]], slots: int, chunk_blocks: int
) -> None:
    pair = Pair(
        scripts.model,
        slots=slots,
        decode_slots=400,
        chunk_tokens=16 * chunk_blocks,
        device_tokens=400,
        sequence_limit=64,
    )
    asked: dict[RequestId, int] = {}
    gone: set[RequestId] = set()
    for name, value in operations:
        if name == "submit":
            request = pair.request(scripts.prompts[value], limit=LIMIT)
            asked[request.request] = value
            pair.submit(request)
        elif name == "cancel" and value < len(asked):
            victim = list(asked)[value]
            gone.add(victim)
            pair.prefill.cancel(victim)
            pair.decode.cancel(victim)
        for _ in range(value if name == "prefill" else 0):
            for output in pair.prefill.step():
                pair.on_prefill(output)
        for _ in range(value if name == "decode" else 0):
            for output in pair.decode.step():
                pair.on_decode(output)
    while pair.prefill.has_work or pair.decode.has_work:
        pair.step()
    check(pair, scripts, asked, gone)
    pair.close()


@pytest.fixture
def running(scripts: Scripts) -> Iterator[Pair]:
    """A pair with a thread that steps it."""
    pair = Pair(scripts.model, slots=40, decode_slots=400, device_tokens=600, sequence_limit=64)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            if pair.prefill.has_work or pair.decode.has_work:
                pair.step()
            else:
                time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    yield pair
    stop.set()
    thread.join()
    pair.close()


def test_other_threads_may_submit_and_cancel_while_the_engine_steps(
    scripts: Scripts, running: Pair
) -> None:
    asked: dict[RequestId, int] = {}
    gone: set[RequestId] = set()
    lock = threading.Lock()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            with lock:
                index = rng.randrange(len(scripts.prompts))
                request: GenerationRequest = running.request(scripts.prompts[index], limit=LIMIT)
                asked[request.request] = index
            running.submit(request)
            time.sleep(rng.random() * 0.02)
            if rng.random() < 0.4:
                with lock:
                    gone.add(request.request)
                running.prefill.cancel(request.request)
                running.decode.cancel(request.request)

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    deadline_s = time.monotonic() + 60
    while running.prefill.has_work or running.decode.has_work:
        assert time.monotonic() < deadline_s, "the engines do not come to an end"
        time.sleep(0.01)
    time.sleep(0.05)  # The last step's outputs are noted after it has no more work.
    check(running, scripts, asked, gone)


def test_a_long_answer_outgrows_its_first_room(scripts: Scripts, model_dir: Path) -> None:
    pair, oracle = Pair(scripts.model), Oracle(model_dir)
    request = pair.request(scripts.prompts[4], limit=400, stop_tokens=())
    (done,) = pair.run(request)
    assert done.tokens == oracle.generate(request.tokens, 400, eos_token_id=[-1])
    pair.close()


def test_bf16_runs_the_same_journey(model_dir: Path) -> None:
    pair = Pair(Model.load(inspect_model(model_dir, dtype="bf16", device="cpu")))
    prompt = tiny.prompt_tokens(200, seed=5)
    cold = pair.run(pair.request(prompt, limit=30, stop_tokens=()))[0]
    warm = pair.run(pair.request(prompt, limit=30, stop_tokens=()))[0]
    assert (len(cold.tokens), len(warm.tokens), warm.reused_tokens) == (30, 30, 192)
    pair.close()
