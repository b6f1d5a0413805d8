from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from snowskin.engine import decode as d
from snowskin.engine.model import Model
from snowskin.store.pool import PoolFull
from snowskin.terms.keys import prompt_keys
from snowskin.terms.request import Sampling
from tests.engine import tiny
from tests.engine.pair import Oracle, Pair, load

torch.set_num_threads(1)

MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny.build_all(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llama(models: dict[str, Path]) -> Model:
    return load(models["llama"])


@pytest.fixture(scope="module")
def oracle(models: dict[str, Path]) -> Oracle:
    return Oracle(models["llama"])


@pytest.fixture
def make_pair(llama: Model) -> Iterator[MakePair]:
    made: list[Pair] = []

    def make(model: Model = llama, **options: Any) -> Pair:
        made.append(Pair(model, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.mark.parametrize("name", tiny.SUPPORTED)
def test_prefill_then_decode_gives_the_tokens_of_transformers(
    name: str, models: dict[str, Path], make_pair: MakePair
) -> None:
    oracle, pair = Oracle(models[name]), make_pair(load(models[name]))
    prompts = [tiny.prompt_tokens(count, seed=count) for count in (150, 1, 16, 15, 64, 7)]
    requests = [pair.request(prompt) for prompt in prompts]
    cold = pair.run(*requests)
    assert [done.tokens for done in cold] == [oracle.generate(r.tokens, 24) for r in requests]
    assert [done.reused_tokens for done in cold] == [0] * 6

    warm = pair.run(*[pair.request(prompt) for prompt in prompts])
    assert [done.tokens for done in warm] == [done.tokens for done in cold]
    # Held whole: all but the last token. Held but for a partial block: the whole blocks.
    assert [done.reused_tokens for done in warm] == [144, 0, 15, 0, 63, 0]


def test_sampling_with_a_seed_gives_the_tokens_of_transformers(
    make_pair: MakePair, oracle: Oracle
) -> None:
    pair = make_pair()
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=11, repetition_penalty=1.1)
    requests = [
        pair.request(tiny.prompt_tokens(count, seed=count), sampling=sampling)
        for count in (50, 90, 33)
    ]
    for request, done in zip(requests, pair.run(*requests), strict=True):
        torch.manual_seed(11)
        expected = oracle.generate(
            request.tokens,
            24,
            do_sample=True,
            temperature=0.9,
            top_k=40,
            top_p=0.95,
            repetition_penalty=1.1,
        )
        assert done.tokens == expected


def test_a_conversation_finds_its_own_answers_on_the_decode_node(
    make_pair: MakePair, oracle: Oracle
) -> None:
    pair = make_pair()
    history = tiny.prompt_tokens(10, seed=1)
    expected_prefix = 0
    for turn in range(3):
        request = pair.request(history, limit=45, stop_tokens=())
        pair.fetch_from_decode(request)
        (done,) = pair.run(request)
        assert done.reused_tokens == expected_prefix
        assert done.tokens == oracle.generate(request.tokens, 45, eos_token_id=[-1])
        held_tokens = len(history) + 45 - 1  # The last token's KV was never computed.
        expected_prefix = held_tokens // 16 * 16
        history = [*history, *done.tokens, *tiny.prompt_tokens(20, seed=100 + turn)]
    assert pair.decode.skipped_writebacks == 0


def test_a_conversation_loses_its_end_first_on_the_decode_node(make_pair: MakePair) -> None:
    pair = make_pair(slots=12)
    request = pair.request(tiny.prompt_tokens(40, seed=2), limit=100, stop_tokens=())
    (done,) = pair.run(request)
    chain = prompt_keys(pair.space, [*request.tokens, *done.tokens])
    assert pair.decode_store.match(chain) == 8
    taken = pair.decode_store.reserve([None] * 6)
    assert not isinstance(taken, PoolFull)
    assert pair.decode_store.match(chain) == 6
    pair.decode_store.release([block.slot for block in taken])


def test_the_first_block_of_a_short_prompt_needs_the_root_of_its_keys(
    make_pair: MakePair,
) -> None:
    pair = make_pair()
    request = msgspec.structs.replace(pair.request([1, 2, 3], limit=40, stop_tokens=()), root=None)
    pair.run(request)
    assert pair.decode_store.stat().committed_slots == 0


def test_a_partly_evicted_prefix_is_computed_from_where_it_ends(
    make_pair: MakePair, oracle: Oracle
) -> None:
    pair = make_pair(slots=16)
    prompt = tiny.prompt_tokens(170, seed=4)
    (cold,) = pair.run(pair.request(prompt, limit=8))
    pair.run(pair.request(tiny.prompt_tokens(140, seed=5), limit=8))
    held = pair.prefill_store.match(pair.request(prompt).keys)
    assert 0 < held < 10
    request = pair.request(prompt, limit=8)
    (warm,) = pair.run(request)
    assert warm.reused_tokens == held * 16
    assert warm.tokens == cold.tokens == oracle.generate(request.tokens, 8)


def test_many_at_once_get_what_each_gets_alone(make_pair: MakePair, oracle: Oracle) -> None:
    pair = make_pair(slots=48, decode_slots=192, device_tokens=600, sequence_limit=24)
    shared = tiny.prompt_tokens(48, seed=9)
    requests = [
        pair.request([*shared[: 16 * (index % 4)], *tiny.prompt_tokens(5 + 7 * index, seed=index)])
        for index in range(16)
    ]
    for request, done in zip(requests, pair.run(*requests), strict=True):
        assert done.failure is None
        assert done.tokens == oracle.generate(request.tokens, 24)


def test_stop_tokens_and_limits_end_a_generation(make_pair: MakePair, oracle: Oracle) -> None:
    pair = make_pair()
    prompt = tiny.prompt_tokens(40, seed=6)
    whole = oracle.generate(tuple(prompt), 12, eos_token_id=[-1])
    stop = next(token for index, token in enumerate(whole[1:], 1) if token not in whole[:index])
    cut = whole[: whole.index(stop) + 1]
    by_stop, by_first, by_limit = pair.run(
        pair.request(prompt, limit=12, stop_tokens=(stop,)),
        pair.request(prompt, limit=12, stop_tokens=(whole[0],)),
        pair.request(prompt, limit=1, stop_tokens=()),
    )
    assert (by_stop.tokens, by_stop.finish_reason) == (cut, "stop")
    assert (by_first.tokens, by_first.finish_reason) == (whole[:1], "stop")
    assert (by_limit.tokens, by_limit.finish_reason) == (whole[:1], "length")


def test_what_can_never_fit_fails_with_both_numbers(make_pair: MakePair) -> None:
    pair = make_pair(slots=8, device_tokens=200)
    too_long, no_pool, bad_token, no_device = pair.run(
        pair.request(tiny.prompt_tokens(1000), limit=100),
        pair.request(tiny.prompt_tokens(140), limit=10),
        pair.request([331], limit=10),
        pair.request(tiny.prompt_tokens(100), limit=150),
    )
    assert too_long.failure == "1000 prompt + 100 output tokens exceed the model's context of 1024"
    assert "140 tokens exceed the 128 that fit this node's DRAM pool" in str(no_pool.failure)
    assert "vocabulary of 331" in str(bad_token.failure)
    assert "100 prompt + 150 output tokens exceed the 200" in str(no_device.failure)


def test_a_full_queue_refuses_and_forgets(make_pair: MakePair) -> None:
    pair = make_pair(sequence_limit=2)
    done = pair.run(*[pair.request(tiny.prompt_tokens(20, seed=seed)) for seed in range(5)])
    assert [one.failure is None for one in done] == [True, True, False, False, False]
    assert "2 prompts wait at this node already" in str(done[4].failure)


def test_a_prompt_waits_until_slots_are_free(make_pair: MakePair) -> None:
    pair = make_pair(slots=8)
    taken = pair.prefill_store.reserve([None] * 6)
    assert not isinstance(taken, PoolFull)
    request = pair.request(tiny.prompt_tokens(100), limit=4)
    pair.submit(request)
    for _ in range(3):
        pair.step()
    assert (pair.prefill.waiting_count, pair.prefill.running_count) == (1, 0)
    pair.prefill_store.release([block.slot for block in taken])
    while pair.prefill.has_work or pair.decode.has_work:
        pair.step()
    assert len(pair.done[request.request].tokens) == 4


@pytest.mark.parametrize("steps", range(12))
def test_a_cancelled_request_frees_everything_wherever_it_stands(
    steps: int, make_pair: MakePair, oracle: Oracle
) -> None:
    pair = make_pair()
    other = pair.request(tiny.prompt_tokens(30, seed=2))
    victim = pair.request(tiny.prompt_tokens(200, seed=1), limit=40, stop_tokens=())
    pair.submit(victim, other)
    for _ in range(steps):
        pair.step()
    pair.prefill.cancel(victim.request)
    pair.decode.cancel(victim.request)
    tokens = list(pair.done[victim.request].tokens)
    while pair.prefill.has_work or pair.decode.has_work:
        pair.step()
    assert pair.done[victim.request].tokens == tokens
    assert pair.done[other.request].tokens == oracle.generate(other.tokens, 24)
    pair.assert_nothing_is_held()


def test_a_computed_prompt_keeps_its_blocks_until_it_is_released(make_pair: MakePair) -> None:
    pair = make_pair()
    request = pair.request(tiny.prompt_tokens(70))
    pair.prefill.submit(request)
    while pair.prefill.has_work:
        pair.prefill.step()
    stat = pair.prefill_store.stat()
    assert (stat.committed_slots, stat.evictable_slots, stat.reserved_slots) == (4, 0, 1)
    pair.prefill.release(request.request)
    pair.prefill.release(request.request)
    stat = pair.prefill_store.stat()
    assert (stat.committed_slots, stat.evictable_slots, stat.reserved_slots) == (4, 4, 0)


def test_a_prefix_that_waiting_prompts_share_is_computed_once(
    make_pair: MakePair, oracle: Oracle
) -> None:
    pair = make_pair()
    shared = tiny.prompt_tokens(192, seed=8)
    requests = [pair.request([*shared, *tiny.prompt_tokens(8, seed=seed)]) for seed in range(3)]
    done = pair.run(*requests)
    assert [one.reused_tokens for one in done] == [0, 192, 192]
    assert [one.tokens for one in done] == [oracle.generate(r.tokens, 24) for r in requests]


def test_word_of_a_start_is_out_before_anything_is_computed(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.prefill.submit(pair.request(tiny.prompt_tokens(70)))
    (started,) = pair.prefill.step()
    assert pair.prefill.passes == 0
    assert [int(pair.segments[0].parts_ready[block.slot]) for block in started.blocks] == [0] * 5
    assert pair.prefill.step() == ()
    ready = [int(pair.segments[0].parts_ready[block.slot]) for block in started.blocks]
    assert ready == [3, 3, 3, 3, 0], "a chunk of 64 tokens is whole, in all layers"
    pair.prefill.step()
    assert pair.prefill.passes == 2
    pair.prefill.release(started.request)


def test_a_running_sequence_gets_a_token_in_each_step_while_another_is_loaded(
    make_pair: MakePair,
) -> None:
    pair = make_pair()
    first = pair.request(tiny.prompt_tokens(20), limit=200, stop_tokens=())
    second = pair.request(tiny.prompt_tokens(300), limit=2, stop_tokens=())
    pair.submit(first)
    while not pair.decode.running_count:
        pair.step()
    pair.submit(second)
    while pair.prefill.has_work:
        for output in pair.prefill.step():
            pair.on_prefill(output)
    joined = False
    while not joined:
        outputs = pair.decode.step()
        joined = d.Joined(second.request) in outputs
        tokens = [output.request for output in outputs if isinstance(output, d.Token)]
        assert tokens == [first.request, second.request][: 1 + joined]
        for output in outputs:
            pair.on_decode(output)
    pair.decode.cancel(first.request)


def test_a_full_pool_skips_the_write_back_but_not_the_tokens(
    make_pair: MakePair, oracle: Oracle
) -> None:
    pair = make_pair(slots=6)
    request = pair.request(tiny.prompt_tokens(40, seed=3), limit=60, stop_tokens=())
    pair.submit(request)
    while not pair.decode.running_count:
        pair.step()
    stat = pair.decode_store.stat()
    taken = pair.decode_store.reserve([None] * stat.free_slots)
    assert not isinstance(taken, PoolFull)
    written = prompt_keys(
        pair.space, [*request.tokens, *oracle.generate(request.tokens, 8, eos_token_id=[-1])]
    )
    while pair.decode_store.match(written) < 3:
        pair.step()
    held = pair.decode_store.pin(written)
    while pair.decode.has_work:
        pair.step()
    assert pair.decode.skipped_writebacks == 1, "the chain is broken once; then nothing is tried"
    assert pair.done[request.request].tokens == oracle.generate(
        request.tokens, 60, eos_token_id=[-1]
    )
    pair.decode_store.release([block.slot for block in (*taken, *held)])


def test_logits_that_are_no_numbers_fail_one_request_only(
    make_pair: MakePair, oracle: Oracle
) -> None:
    pair = make_pair()
    good = pair.request(tiny.prompt_tokens(40, seed=3))
    bad = pair.request(tiny.prompt_tokens(40, seed=4))
    pair.run(pair.request(list(bad.tokens), limit=1))
    slots = [block.slot for block in pair.prefill_store.pin(bad.keys)]
    pair.segments[0].data[slots[0]] = 0xFF  # Each number is NaN.
    pair.prefill_store.release(slots)
    failed, done = pair.run(bad, good)
    assert "NaN" in str(failed.failure)
    assert done.tokens == oracle.generate(good.tokens, 24)
