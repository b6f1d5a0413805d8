"""The papers' claims, at a scale that a test can afford."""

from __future__ import annotations

import pytest

from snowskin.reproduce import beyond, gains, hit_rates, overload, paper, pools, schedulers, sweeps
from snowskin.reproduce import parameters as p
from snowskin.reproduce.report import Result
from snowskin.reproduce.workloads import Scale, drawn, is_released, workload
from snowskin.trace.describe import describe

SOME = Scale(1_000)


def ours(result: Result) -> dict[str, float]:
    return {each.name: each.ours for each in result.report.rows if each.ours is not None}


def test_mean_ttft_falls_from_random_to_kvcache_centric_at_the_busy_load() -> None:
    busy = workload("conversation", Scale(2_000)).at_load(p.BUSY_LOAD)
    ttfts = [schedulers.mean_ttft_s(busy, policy) for policy in paper.FAST_TTFT_S]
    assert ttfts == sorted(ttfts, reverse=True)
    assert len(set(ttfts)) == len(ttfts)


def test_the_gain_in_capacity_is_greatest_under_the_tightest_tbt_bound() -> None:
    values = ours(gains.of_workload("fast-fig1", "conversation")(Scale(300)))
    found = [values[f"gain over the best rival, TBT {bound} ms"] for bound in (100, 200, 300)]
    assert found[0] > 1
    assert found[0] > 2 * max(found[1:])


def test_every_rival_spends_more_prefill_time_than_mooncake() -> None:
    values = ours(pools.prefill_time(SOME))
    for name, printed in paper.PREFILL_TIME.items():
        for system in printed:
            assert values[f"{name}, {system}"] > 1


def test_a_cache_over_all_nodes_hits_more_and_computes_less_than_local_ones() -> None:
    values = ours(pools.global_cache(Scale(600)))
    for name in paper.WORKLOADS:
        assert values[f"{name}, hits, global / local at random"] > 1
        assert values[f"{name}, prefill time, global / local at random"] < 1


def test_ttft_falls_with_bandwidth_and_from_100_gbps_on_stays_below_recomputing() -> None:
    values = ours(sweeps.bandwidth_sweep(Scale(2_000)))
    ttfts = [values[f"{gbps} Gbps, mean TTFT, s"] for gbps in paper.BANDWIDTH]
    assert ttfts == sorted(ttfts, reverse=True)
    recompute_s = values["recompute, mean TTFT, s"]
    assert ttfts[0] > recompute_s > values["100 Gbps, mean TTFT, s"]
    assert values["24 Gbps, mean TTFT, sent layer by layer, s"] < ttfts[0]


def test_too_few_prefill_nodes_cost_ttft_and_too_few_decode_nodes_cost_tbt() -> None:
    values = ours(sweeps.split_sweep(SOME))
    ttfts = [values[f"{n}P{16 - n}D, mean TTFT, s"] for n in paper.SPLIT]
    tbts = [values[f"{n}P{16 - n}D, mean TBT, ms"] for n in paper.SPLIT]
    assert ttfts[0] == max(ttfts)
    assert tbts[-1] == max(tbts)


def test_every_admission_rule_serves_more_requests_in_time_than_letting_everybody_in() -> None:
    played = drawn(p.REAL, Scale(3_000))
    none, *rules = [
        overload.replay(played, 4.0, admission, cluster=p.DECODE_BOUND)
        for admission in ("none", *paper.REJECTED)
    ]
    assert none.summary["rejected"] == 0
    for ruled in rules:
        assert ruled.summary["rejected"] > 0
        assert overload.effective_ratio(ruled) > overload.effective_ratio(none)


def test_the_real_workload_has_the_lengths_and_the_sharing_that_the_paper_prints() -> None:
    summary = describe(drawn(p.REAL, Scale()).trace)
    prompt, output, cached = paper.ARXIV_REAL
    assert summary.prompt_tokens.mean == pytest.approx(prompt, rel=0.05)
    assert summary.output_tokens.mean == pytest.approx(output, rel=0.05)
    assert summary.hit_ratio_blocks == pytest.approx(cached, abs=0.03)


@pytest.mark.skipif(not is_released("conversation"), reason="the released trace is not at hand")
def test_hit_ratios_of_the_released_trace_equal_the_reference_to_two_thousandths() -> None:
    rows, _ = hit_rates.released_reference(Scale())
    assert len(rows) == 12
    for each in rows:
        assert each.ours == pytest.approx(each.paper, abs=0.002), each.name


def test_no_scheduler_beats_the_lower_bound_on_mean_ttft() -> None:
    for load in (0.5, 1.0, 2.0):
        trace = workload("conversation", Scale(500)).at_load(load)
        bound_s = beyond.least_mean_ttft_s(trace, p.PREFILL_NODES)
        for policy in paper.FAST_TTFT_S:
            assert schedulers.mean_ttft_s(trace, policy) >= bound_s


def test_no_eviction_policy_beats_beladys_bound() -> None:
    values = ours(beyond.eviction_bound(Scale(2_000)))
    shares = [value for name, value in values.items() if name.endswith("/ bound")]
    assert len(shares) == 15
    assert max(shares) <= 1
