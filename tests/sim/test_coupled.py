from __future__ import annotations

from typing import Any

import pytest

from snowskin.measure.records import Ending
from snowskin.sim.coupled import SYSTEMS, CoupledConfig, simulate_coupled
from snowskin.terms.errors import InvalidInput
from snowskin.trace.shapes import SHAPES
from snowskin.trace.synthesise import synthesise
from tests.sim.worlds import A800, BLOCK_TOKENS, request, trace

PREFIX = tuple(range(40))
TOKENS = 40 * BLOCK_TOKENS + 100


def coupled(**changes: Any) -> CoupledConfig:
    return CoupledConfig(**({"profile": A800, "instances": 1} | changes))


def test_a_lone_request_takes_its_prefill_and_its_steps() -> None:
    _, (record,) = simulate_coupled(trace(request(0.0, PREFIX, output_tokens=11)), coupled())
    prefill_s = A800.prefill.seconds(TOKENS)
    steps_s = sum(A800.decode.step_s(1, TOKENS + 1 + step) for step in range(10))
    assert record.ttft_s == pytest.approx(prefill_s)
    assert record.finished_s == pytest.approx(prefill_s + steps_s)
    assert record.tbt_s == pytest.approx(A800.decode.step_s(1, TOKENS + 10))


def test_no_request_generates_more_than_the_limit() -> None:
    played = trace(*[request(i / 10, PREFIX, output_tokens=500) for i in range(4)])
    _, records = simulate_coupled(played, coupled(output_limit_tokens=7))
    assert [record.output_tokens for record in records] == [7] * 4


def test_a_prefill_makes_the_running_sequences_wait_and_their_tbt_tells() -> None:
    requests = trace(request(0.0, PREFIX, output_tokens=201), request(4.0, tuple(range(100, 140))))
    _, (first, second) = simulate_coupled(requests, coupled())
    prefill_s = A800.prefill.seconds(TOKENS)
    assert first.tbt_s is not None
    assert second.ttft_s is not None
    # One interval of two hundred holds the whole prefill; the longest tenth are twenty.
    assert first.tbt_s > prefill_s / 20
    assert prefill_s < second.ttft_s < prefill_s + 0.1


def test_chunked_prefill_spreads_the_same_wait_over_many_shorter_ones() -> None:
    requests = trace(request(0.0, PREFIX, output_tokens=201), request(4.0, tuple(range(100, 140))))
    _, plain = simulate_coupled(requests, coupled())
    _, chunked = simulate_coupled(requests, coupled(system="vllm-chunked-prefill"))
    assert chunked[0].tbt_s is not None
    assert plain[0].tbt_s is not None
    assert chunked[0].tbt_s < plain[0].tbt_s
    assert chunked[1].ttft_s is not None
    assert plain[1].ttft_s is not None
    assert chunked[1].ttft_s > plain[1].ttft_s


def test_only_prefix_caching_reuses_and_only_on_the_same_instance() -> None:
    requests = trace(request(0.0, PREFIX), request(30.0, (*PREFIX, 99)))
    for system in SYSTEMS:
        _, (_, second) = simulate_coupled(requests, coupled(system=system))
        reused = 40 * BLOCK_TOKENS if system == "vllm-prefix-caching" else 0
        assert second.cached_tokens == reused


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_request_completes_and_tokens_never_come_before_their_time(system: str) -> None:
    drawn = list(synthesise(SHAPES["conversation"], seed=2))[:800]
    summary, records = simulate_coupled(
        trace(*drawn), coupled(system=system, instances=4, sequence_limit=8)
    )
    assert summary["completed"] == 800
    for record in records:
        assert record.ending is Ending.COMPLETED
        assert record.ttft_s is not None
        least_s = A800.prefill.seconds(record.prompt_tokens, record.cached_tokens)
        least_s -= A800.prefill.reused_token_s * record.cached_tokens
        if system != "vllm-chunked-prefill":
            assert record.ttft_s >= least_s - 1e-9
        if record.tbt_s is not None:
            assert record.tbt_s >= A800.decode.base_s


def test_a_prompt_beyond_device_memory_fails_at_once() -> None:
    summary, _ = simulate_coupled(trace(request(0.0, PREFIX)), coupled(device_tokens=1_000))
    assert summary["failed"] == 1


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(InvalidInput, match="vllm-prefix-caching"):
        coupled(system="oracle")


def test_chunks_compute_what_a_prefill_computes_whatever_their_size() -> None:
    alone = trace(request(0.0, PREFIX, output_tokens=1))
    cost = A800.prefill
    work_s = cost.seconds(TOKENS) - cost.base_s
    for chunk_tokens in (512, 2_048, 100_000):
        config = coupled(system="vllm-chunked-prefill", chunk_tokens=chunk_tokens)
        _, (record,) = simulate_coupled(alone, config)
        steps = -(-TOKENS // chunk_tokens)
        assert record.ttft_s == pytest.approx(work_s + steps * A800.decode.base_s)
