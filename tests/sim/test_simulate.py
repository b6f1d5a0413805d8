from __future__ import annotations

import pytest

from snowskin.measure.records import Ending
from snowskin.sim.config import LinkSlows, NodeDies
from snowskin.sim.simulate import simulate
from snowskin.sim.timeline import hot_blocks
from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import NodeId
from snowskin.trace.shapes import SHAPES
from snowskin.trace.synthesise import synthesise
from tests.sim.worlds import A800, BLOCK_TOKENS, config, request, trace

PREFIX = tuple(range(40))


def test_an_unloaded_request_takes_its_prefill_and_its_steps() -> None:
    outcome = simulate(trace(request(0.0, PREFIX, output_tokens=11)), config(), check=True)
    (record,) = outcome.records
    tokens = 40 * BLOCK_TOKENS + 100
    prefill_s = A800.prefill.seconds(tokens)
    assert record.ttft_s == pytest.approx(prefill_s)
    last_layer_s = A800.transfer.seconds(A800.kv_bytes(tokens) / 80)
    waits_s = last_layer_s + A800.load.seconds(A800.kv_bytes(tokens))
    steps_s = sum(A800.decode.step_s(1, tokens + 1 + step) for step in range(10))
    assert record.finished_s == pytest.approx(prefill_s + waits_s + steps_s)
    assert record.tbt_s == pytest.approx(waits_s + A800.decode.step_s(1, tokens + 1))


def test_no_request_generates_more_than_the_limit() -> None:
    played = trace(*[request(i / 10, PREFIX, output_tokens=500) for i in range(4)])
    outcome = simulate(played, config(output_limit_tokens=7), check=True)
    assert [record.output_tokens for record in outcome.records] == [7] * 4


def test_a_first_token_from_the_decode_node_comes_when_the_kv_is_there_and_waits_no_longer() -> (
    None
):
    played = trace(request(0.0, tuple(range(10)), output_tokens=3))
    (early,) = simulate(played, config()).records
    late_outcome = simulate(played, config(first_token_from_decode=True))
    (late,) = late_outcome.records
    assert early.ttft_s is not None
    assert late.ttft_s is not None
    assert late.tbt_s == pytest.approx(A800.decode.step_s(1, late.prompt_tokens + 2), rel=1e-3)
    assert late.ttft_s > early.ttft_s
    assert late.finished_s == early.finished_s
    assert "decode node" in late_outcome.summary["definitions"]["ttft"]


def test_a_load_that_stalls_decode_is_one_long_interval_of_those_who_run() -> None:
    running = request(0.0, (101, 102), output_tokens=200)
    joining = request(1.0, PREFIX, output_tokens=10)
    calm = simulate(trace(running, joining), config(decode_nodes=1), check=True).records
    changes = {"decode_nodes": 1, "load_stalls_decode": True, "first_token_from_decode": True}
    stalled = simulate(trace(running, joining), config(**changes), check=True).records
    load_s = A800.load.seconds(A800.kv_bytes(calm[1].prompt_tokens))
    longer_s = stalled[0].finished_s - calm[0].finished_s
    assert longer_s == pytest.approx(load_s, rel=0.01)
    assert stalled[1].tbt_s == pytest.approx(A800.decode.step_s(2, 22_000), rel=0.02)


def test_kv_that_streams_layer_by_layer_lands_sooner_than_after_prefill() -> None:
    requests = trace(request(0.0, PREFIX))
    streamed = simulate(requests, config()).records[0]
    serial = simulate(requests, config(overlap=False)).records[0]
    assert streamed.ttft_s == serial.ttft_s
    moved_s = A800.transfer.seconds(A800.kv_bytes(streamed.prompt_tokens))
    gain_s = serial.finished_s - streamed.finished_s
    assert gain_s == pytest.approx(moved_s * 79 / 80, rel=0.1)


def test_a_second_request_reuses_the_first_ones_prefix_wherever_it_lies() -> None:
    requests = trace(request(0.0, PREFIX), request(30.0, (*PREFIX, 99)))
    for policy in ("kvcache-centric", "cache-aware"):
        first, second = simulate(requests, config(policy=policy), check=True).records
        assert first.cached_tokens == 0
        assert second.cached_tokens == 40 * BLOCK_TOKENS
        assert second.ttft_s is not None
        assert first.ttft_s is not None
        assert second.ttft_s < first.ttft_s / 4


def test_a_busy_holder_has_its_prefix_fetched_by_an_idle_node() -> None:
    warm = request(0.0, tuple(range(100)))
    rush = [request(60.0 + i / 100, (*range(100), 1000 + i)) for i in range(8)]
    outcome = simulate(trace(warm, *rush), config(prefill_nodes=4), check=True)
    assert outcome.summary["fetches"] >= 1
    assert outcome.summary["fetched_bytes"] > 0
    assert all(record.cached_tokens == 100 * BLOCK_TOKENS for record in outcome.records[1:])


def test_a_prompt_that_no_node_can_hold_fails_at_once() -> None:
    outcome = simulate(trace(request(0.0, PREFIX)), config(blocks=30), check=True)
    assert [record.ending for record in outcome.records] == [Ending.FAILED]


def test_a_small_pool_makes_requests_wait_and_loses_none() -> None:
    requests = [request(i / 10, tuple(range(50 * i, 50 * i + 40))) for i in range(20)]
    outcome = simulate(trace(*requests), config(blocks=60), check=True)
    assert outcome.summary["completed"] == 20
    assert outcome.summary["evicted_blocks"] > 0


def test_a_request_of_one_token_ends_with_its_prefill() -> None:
    outcome = simulate(trace(request(0.0, PREFIX, output_tokens=1)), config(), check=True)
    (record,) = outcome.records
    assert record.ending is Ending.COMPLETED
    assert record.finished_s == record.ttft_s
    assert record.tbt_s is None


def test_the_death_of_a_decode_node_fails_its_streams_and_no_others() -> None:
    requests = [request(i / 10, (i,), output_tokens=500) for i in range(10)]
    dies = NodeDies(NodeId("decode-0"), at_s=6.0, restart_s=5.0)
    outcome = simulate(trace(*requests), config(faults=(dies,)), check=True)
    assert 1 <= outcome.summary["failed"] <= 9
    assert outcome.summary["completed"] == 10 - outcome.summary["failed"]


def test_the_death_of_a_prefill_node_only_delays_what_it_had_queued() -> None:
    requests = [request(i / 100, tuple(range(100 * i, 100 * i + 60))) for i in range(10)]
    dies = NodeDies(NodeId("prefill-0"), at_s=2.0, restart_s=30.0)
    healthy = simulate(trace(*requests), config()).summary
    harmed = simulate(trace(*requests), config(faults=(dies,)), check=True).summary
    assert harmed["completed"] == 10
    assert harmed["ttft_mean_s"] > healthy["ttft_mean_s"]


def test_the_death_of_a_fetchs_source_lets_prefill_go_on_without_it() -> None:
    warm = request(0.0, tuple(range(150)))
    rush = [request(60.0 + i / 1000, (*range(150), 1000 + i)) for i in range(12)]
    slow = [
        LinkSlows(NodeId(f"{role}-{index}"), 50.0, 100.0, 0.05)
        for role in ("prefill", "decode")
        for index in range(2)
    ]
    dies = [NodeDies(NodeId(f"{role}-0"), 60.1, 10.0) for role in ("prefill", "decode")]
    outcome = simulate(trace(warm, *rush), config(faults=(*slow, *dies)), check=True)
    assert outcome.summary["completed"] + outcome.summary["failed"] == 13


def test_a_slow_link_delays_decode_but_not_the_first_token() -> None:
    slow = LinkSlows(NodeId("prefill-0"), 0.0, 1000.0, 0.001)
    requests = trace(request(0.0, PREFIX))
    fast = simulate(requests, config(prefill_nodes=1)).records[0]
    late = simulate(requests, config(prefill_nodes=1, faults=(slow,))).records[0]
    assert late.ttft_s == fast.ttft_s
    assert late.finished_s > 2 * fast.finished_s


def test_a_link_stays_as_slow_as_the_worst_that_still_goes_on() -> None:
    node = NodeId("prefill-0")
    slow, less = LinkSlows(node, 0.0, 1000.0, 0.001), LinkSlows(node, 0.0, 0.01, 0.5)
    requests = trace(request(0.0, PREFIX))
    alone = simulate(requests, config(prefill_nodes=1, faults=(slow,))).records
    for faults in ((slow, less), (less, slow)):
        assert simulate(requests, config(prefill_nodes=1, faults=faults)).records == alone


def test_a_count_that_is_no_whole_number_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"decode_nodes must be a whole number \(int\), not 2.0"):
        config(decode_nodes=2.0)


@pytest.mark.parametrize("admission", ["baseline", "early", "predicted"])
def test_overload_is_turned_away_and_counted(admission: str) -> None:
    requests = [request(i / 50, tuple(range(100 * i, 100 * i + 80))) for i in range(60)]
    outcome = simulate(trace(*requests), config(admission=admission, ttft_slo_s=10.0), check=True)
    assert outcome.summary["rejected"] > 10
    assert outcome.summary["rejected"] + outcome.summary["completed"] == 60
    served = [record.ttft_s for record in outcome.records if record.ttft_s is not None]
    assert max(served) < 15.0


def test_no_decision_depends_on_true_output_lengths() -> None:
    long = [request(i / 10, (i,), output_tokens=400) for i in range(8)]
    short = [request(i / 10, (i,), output_tokens=2) for i in range(8)]
    told: list[list[float | None]] = []
    for requests in (long, short):
        limited = config(output_limit_tokens=500)
        told.append([r.ttft_s for r in simulate(trace(*requests), limited).records[:4]])
    assert told[0] == told[1]


def test_policies_order_as_in_the_papers_where_the_cluster_is_busy() -> None:
    drawn = list(synthesise(SHAPES["conversation"], seed=5))[:2500]
    busy = trace(*drawn).sped_up(3.0)
    means = [
        simulate(busy, config(prefill_nodes=8, decode_nodes=8, blocks=5859, policy=policy)).summary[
            "ttft_mean_s"
        ]
        for policy in ("random", "load-balance", "cache-aware", "kvcache-centric")
    ]
    assert means == sorted(means, reverse=True)


def test_wrong_settings_are_refused_with_their_value() -> None:
    for changes in (
        {"prefill_nodes": 0},
        {"policy": "best"},
        {"eviction": "fifo"},
        {"blocks": 0},
        {"faults": (NodeDies(NodeId("prefill-9"), 1.0, 1.0),)},
    ):
        with pytest.raises(InvalidInput):
            config(**changes)


def test_a_hot_chain_is_watched_by_its_first_block_alone() -> None:
    requests = [request(float(i), (0, 1, 2, 10 + i)) for i in range(5)]
    others = [request(10.0 + i, (7, 8)) for i in range(3)]
    assert hot_blocks(trace(*requests, *others)).tolist()[:2] == [0, 7]


def test_a_timeline_samples_loads_hits_and_replicas() -> None:
    requests = [request(float(i), (*range(10), 100 + i)) for i in range(20)]
    timeline = simulate(trace(*requests), config(), samples=10).timeline
    assert timeline is not None
    lengths = {
        len(curve)
        for curve in (
            timeline.times_s,
            timeline.prefill_load,
            timeline.decode_load,
            timeline.hit_ratio,
            timeline.replicas,
        )
    }
    assert len(lengths) == 1
    assert timeline.hit_ratio[-1] > 0.5
    assert max(timeline.replicas[-1]) >= 2
