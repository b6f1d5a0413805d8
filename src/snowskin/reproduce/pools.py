"""Items of the pool of caches: FAST Figure 8 (GPU time), 10 (global or local), 11 (replicas)."""

from __future__ import annotations

from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.observe import ReplicaWatch
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.workloads import Scale, described, profile, workload
from snowskin.sim.config import WorldConfig
from snowskin.sim.coupled import SYSTEMS, CoupledConfig, simulate_coupled
from snowskin.sim.simulate import simulate
from snowskin.sim.world import World
from snowskin.trace.records import Trace


def papers_world(
    *,
    policy: str = "kvcache-centric",
    admission: str = "none",
    prefill: int = p.PREFILL_NODES,
    decode: int = p.DECODE_NODES,
) -> WorldConfig:
    """The papers' cluster. Its first token comes from the decode node.

    FAST counts transfer and load into TTFT: Fig. 14 (reuse cuts prefill by 92 %, but TTFT by 86 %)
    and Fig. 13 (TTFT rises with the transfer of the whole prompt).
    """
    return WorldConfig(
        profile(),
        prefill_nodes=prefill,
        decode_nodes=decode,
        policy=policy,
        admission=admission,
        ttft_slo_s=p.TTFT_SLO_S,
        tbt_slo_s=p.TBT_SLOS_S[0],
        first_token_from_decode=True,
        seed=p.SEED,
    )


def rival(system: str, *, instances: int = p.PREFILL_NODES + p.DECODE_NODES) -> CoupledConfig:
    """A coupled rival on as many nodes."""
    return CoupledConfig(profile(), system=system, instances=instances, seed=p.SEED)


def prefill_time(scale: Scale) -> Result:
    """FAST Figure 8: prefill GPU time of each request, relative to Mooncake."""
    played = [workload(name, scale) for name in paper.WORKLOADS]
    rows: list[Row] = []
    ours: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for each in played:
        busy_s = simulate(each.trace, papers_world()).summary["prefill_busy_s"]
        for system in SYSTEMS:
            summary, _ = simulate_coupled(each.trace, rival(system))
            ratio = summary["prefill_busy_s"] / busy_s
            ours[system].append(ratio)
            rows.append(row(f"{each.name}, {system}", paper.PREFILL_TIME[each.name][system], ratio))
        mean_s = busy_s / len(each.trace)
        rows.append(row(f"{each.name}, mooncake, s a request", None, mean_s))
    curves: list[Curve] = []
    for system in SYSTEMS:
        printed = tuple(paper.PREFILL_TIME[name][system] for name in paper.WORKLOADS)
        curves.append(Curve(f"{system}, paper", paper.WORKLOADS, printed, system, is_paper=True))
        curves.append(Curve(f"{system}, ours", paper.WORKLOADS, tuple(ours[system]), system))
    panel = Panel(
        "Prefill GPU time, relative to Mooncake",
        "workload",
        "times Mooncake's",
        tuple(curves),
        bars=True,
        line_y=1.0,
    )
    report = Report(
        "fast-fig8",
        tuple(rows),
        described(played),
        "time that nodes compute prompts / requests, over Mooncake's; 8P+8D against 16 instances, "
        "each workload at its own speed",
        (
            "with chunked prefill, the whole of every step with a chunk in it counts, sequences "
            "that decode in the same step included",
            "coupled instances cache in device memory (what the weights leave: 1.3 M tokens)",
        ),
    )
    return Result(report, (panel,))


def global_cache(scale: Scale) -> Result:
    """FAST Figure 10: one cache over all prefill nodes against a cache in each."""
    played = [workload(name, scale) for name in paper.WORKLOADS]
    rows: list[Row] = []
    hits: list[float | None] = []
    times: list[float | None] = []
    for each in played:
        runs = {
            policy: simulate(each.trace, _cache_world(policy)).summary
            for policy in ("kvcache-centric", "cache-aware", "random")
        }
        pooled, local = runs["kvcache-centric"], runs["cache-aware"]
        hits.append(_over(pooled["hit_ratio"], local["hit_ratio"]))
        times.append(_over(pooled["prefill_busy_s"], local["prefill_busy_s"]))
        name = each.name
        rows.append(row(f"{name}, hits, global / local", paper.GLOBAL_HITS[name], hits[-1]))
        printed = paper.GLOBAL_PREFILL[name]
        rows.append(row(f"{name}, prefill time, global / local", printed, times[-1]))
        at_random = runs["random"]
        ratio = _over(pooled["hit_ratio"], at_random["hit_ratio"])
        rows.append(row(f"{name}, hits, global / local at random", None, ratio))
        ratio = _over(pooled["prefill_busy_s"], at_random["prefill_busy_s"])
        rows.append(row(f"{name}, prefill time, global / local at random", None, ratio))
        rows += [
            row(f"{name}, hit ratio, {policy}", None, run["hit_ratio"])
            for policy, run in runs.items()
        ]
    panels = (
        _beside("Hits, global / local", "ratio", paper.GLOBAL_HITS, hits),
        _beside("Prefill time, global / local", "ratio", paper.GLOBAL_PREFILL, times),
    )
    report = Report(
        "fast-fig10",
        tuple(rows),
        described(played),
        "10P+10D of 3 M tokens each, at the workload's own speed; global: kvcache-centric (a "
        "prefix may be fetched from any node); local: cache-aware (each node reuses what it "
        "computed itself)",
        (
            "the paper does not name the schedule of its local caches; the cache-aware one is "
            "that of its Fig. 5, the random one is given beside it",
            "in our global cache the decode nodes' DRAM counts too: they hold what they received",
        ),
    )
    return Result(report, panels)


def _over(ours: float, theirs: float) -> float | None:
    """Their ratio; None where a short trace shares nothing."""
    return ours / theirs if theirs else None


def _cache_world(policy: str) -> WorldConfig:
    return papers_world(policy=policy, prefill=p.CACHE_NODES, decode=p.CACHE_NODES)


def _beside(title: str, y_label: str, printed: dict[str, float], ours: list[float | None]) -> Panel:
    curves = (
        Curve("paper", paper.WORKLOADS, tuple(printed.values()), "paper", is_paper=True),
        Curve("ours", paper.WORKLOADS, tuple(ours), "ours"),
    )
    return Panel(title, "workload", y_label, curves, bars=True, line_y=1.0)


def replicas(scale: Scale) -> Result:
    """FAST Figure 11: on how many nodes the hottest blocks lie, over time."""
    played = [workload(name, scale) for name in paper.WORKLOADS]
    rows: list[Row] = []
    panels: list[Panel] = []
    for each in played:
        times_s, counts = _watch(each.trace)
        curves: list[Curve] = []
        for rank, history in zip(p.REPLICA_RANKS, counts, strict=True):
            settled = history[len(history) // 2 :] or [0]
            mean = sum(settled) / len(settled)
            rows.append(row(f"{each.name}, key #{rank:,}, replicas", None, mean))
            x, y = tuple(time_s / 60 for time_s in times_s), tuple(float(n) for n in history)
            curves.append(Curve(f"key #{rank:,}", x, y))
        title, y_label = each.name, "replicas (of 16 nodes)"
        panels.append(Panel(title, "minutes", y_label, tuple(curves), steps=True))
    report = Report(
        "fast-fig11",
        tuple(rows),
        described(played),
        "replicas of a key are counted every 30 s on 8P+8D; keys are ranked by the sum of all "
        "their counts, as in the paper; rows give the mean over the run's second half",
        (
            "the paper draws this without numbers: the hottest keys of conversation and tool & "
            "agent come to lie on almost every instance, those of the synthetic workload on few",
            "every tier counts once for each node, decode nodes too, for they hold what they "
            "received until it is evicted",
        ),
    )
    return Result(report, tuple(panels))


def _watch(trace: Trace) -> tuple[list[float], list[list[int]]]:
    world = World(trace, papers_world())
    watch = ReplicaWatch(world, interval_s=p.REPLICA_SAMPLE_S)
    world.run()
    return watch.times_s, watch.ranked(p.REPLICA_RANKS)
