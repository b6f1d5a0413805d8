"""Items that sweep one setting on the synthetic workload: FAST Figures 13 and 15."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from snowskin.cost.costs import LinkCost
from snowskin.measure.latency import mean
from snowskin.measure.records import Slo, is_effective
from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.observe import TransferLog
from snowskin.reproduce.pools import papers_world
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.workloads import Scale, described, profile, workload
from snowskin.sim.outcome import request_records
from snowskin.sim.simulate import simulate
from snowskin.sim.world import World
from snowskin.trace.records import Trace

GB = 1e9


def bandwidth_sweep(scale: Scale) -> Result:
    """FAST Figure 13: TTFT and transfer time by the bandwidth between nodes."""
    played = workload("synthetic", scale)
    rows: list[Row] = []
    ours: list[tuple[float | None, float | None, float | None]] = []
    names = ("mean TTFT", "transfer in theory", "transfer in truth")
    for gbps, printed in paper.BANDWIDTH.items():
        values = _at_bandwidth(played.trace, gbps)
        ours.append(values[:3])
        rows += [
            row(f"{gbps} Gbps, {name}, s", theirs, own)
            for name, theirs, own in zip(names, printed, values[:3], strict=True)
        ]
        rows.append(row(f"{gbps} Gbps, requests that fetch, ratio", None, values[3]))
    recompute_s = simulate(_without_sharing(played.trace), papers_world()).summary["ttft_mean_s"]
    rows.append(row("recompute, mean TTFT, s", paper.RECOMPUTE_TTFT_S, recompute_s))
    report = Report(
        "fast-fig13",
        tuple(rows),
        described([played]),
        "mean TTFT at the workload's own speed on 8P+8D; transfer: mean time of those fetches of a "
        "prefix that take place, in theory its bytes over the nominal rate; recompute: the same "
        "prompts with nothing shared",
        (
            "a link carries 89.5 % of its nominal rate, as measured on 4×200 Gbps (Fig. 12)",
            "our Conductor fetches only where it expects to gain by it, while in the paper's "
            "figure TTFT rises by the whole transfer: at low bandwidth ours computes instead",
        ),
    )
    x = tuple(float(gbps) for gbps in paper.BANDWIDTH)
    base = len(x) * (recompute_s,), len(x) * (paper.RECOMPUTE_TTFT_S,)
    ttft = (
        Curve("paper", x, tuple(values[0] for values in paper.BANDWIDTH.values()), "ttft", True),
        Curve("ours", x, tuple(values[0] for values in ours), "ttft"),
        Curve("recompute, paper", x, base[1], "recompute", is_paper=True),
        Curve("recompute, ours", x, base[0], "recompute"),
    )
    moved: list[Curve] = []
    for index, name in ((1, "in theory"), (2, "in truth")):
        printed_s = tuple(values[index] for values in paper.BANDWIDTH.values())
        moved.append(Curve(f"{name}, paper", x, printed_s, name, is_paper=True))
        moved.append(Curve(f"{name}, ours", x, tuple(values[index] for values in ours), name))
    panels = (
        Panel("Mean TTFT", "Gbps", "seconds", ttft, log_x=True),
        Panel("Transfer of KV", "Gbps", "seconds", tuple(moved), log_x=True, log_y=True),
    )
    return Result(report, panels)


def scaled_link(link: LinkCost, gbps: float) -> LinkCost:
    """The link of a node whose NICs are nominally so fast together."""
    return msgspec.structs.replace(link, bytes_per_s=gbps / 8 * GB * p.LINK_EFFICIENCY)


def _at_bandwidth(
    trace: Trace, gbps: float
) -> tuple[float | None, float | None, float | None, float]:
    """Mean TTFT, mean fetch in theory and in truth, and the share of requests that fetch."""
    costs = profile()
    slowed = msgspec.structs.replace(costs, transfer=scaled_link(costs.transfer, gbps))
    log = TransferLog()
    config = msgspec.structs.replace(papers_world(), profile=slowed)
    world = World(trace, config, on_event=log.note)
    world.run()
    ttfts = [each.ttft_s for each in request_records(world.jobs) if each.ttft_s is not None]
    fetched_bytes = mean(log.fetch_bytes)
    in_theory_s = fetched_bytes / (gbps / 8 * GB) if fetched_bytes is not None else None
    return mean(ttfts), in_theory_s, mean(log.fetch_s), len(log.fetch_s) / len(trace)


def _without_sharing(trace: Trace) -> Trace:
    return replace(trace, block_ids=np.arange(len(trace.block_ids), dtype=np.int64))


def split_sweep(scale: Scale) -> Result:
    """FAST Figure 15: 16 nodes divided into prefill and decode."""
    played = workload("synthetic", scale)
    busy = played.at_load(p.BUSY_LOAD)
    slo = Slo(p.SPLIT_TTFT_SLO_S, p.TBT_SLOS_S[0])
    names = ("mean TTFT, s", "effective, ratio", "mean TBT, ms")
    rows: list[Row] = []
    ours: list[tuple[float, float, float]] = []
    nodes = p.PREFILL_NODES + p.DECODE_NODES
    labels = tuple(f"{prefill}P{nodes - prefill}D" for prefill in paper.SPLIT)
    for label, (prefill, (ttft_s, ratio, tbt_s)) in zip(labels, paper.SPLIT.items(), strict=True):
        outcome = simulate(busy, papers_world(prefill=prefill, decode=nodes - prefill))
        effective = sum(is_effective(each, slo) for each in outcome.records)
        summary = outcome.summary
        values = (
            summary["ttft_mean_s"],
            effective / len(outcome.records),
            summary["tbt_mean_s"] * 1e3,
        )
        ours.append(values)
        rows += [
            row(f"{label}, {name}", theirs, own)
            for name, theirs, own in zip(names, (ttft_s, ratio, tbt_s * 1e3), values, strict=True)
        ]
        rows.append(row(f"{label}, mean batch", None, summary["mean_batch"]))
    report = Report(
        "fast-fig15",
        tuple(rows),
        f"{described([played])}; replayed at load {p.BUSY_LOAD:g}",
        "effective: TTFT below 10 s and TBT (mean of the longest 10 %) below 100 ms; TBT: the mean "
        "over requests; load 1: prefill work without reuse would just fill 8 prefill nodes",
        ("the paper does not state its rate; ours is the busy load that all items share",),
    )
    panels = tuple(
        Panel(
            name.partition(",")[0],
            "split of 16 nodes",
            unit,
            (
                Curve("paper", labels, _printed_split(index), "paper", is_paper=True),
                Curve("ours", labels, tuple(values[index] for values in ours), "ours"),
            ),
        )
        for index, (name, unit) in enumerate(
            zip(names, ("seconds", "share of requests", "ms"), strict=True)
        )
    )
    return Result(report, panels)


def _printed_split(index: int) -> tuple[float, ...]:
    factor = 1e3 if index == 2 else 1.0
    return tuple(values[index] * factor for values in paper.SPLIT.values())
