"""Beyond the papers: how far the policies are from what any could reach, and how firm the lead is.

No row has a value of the papers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.pools import papers_world
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.schedulers import mean_ttft_s
from snowskin.reproduce.workloads import Scale, described, profile, workload
from snowskin.sim.cache_curve import BELADY, DEFINITION, cache_curve
from snowskin.sim.simulate import simulate
from snowskin.trace.describe import prefix_blocks
from snowskin.trace.records import Trace


def eviction_bound(scale: Scale) -> Result:
    """Hit ratio of each eviction policy against Belady's bound, which knows the future."""
    played = workload("conversation", scale)
    policies = [*paper.POLICY_HITS, BELADY]
    sizes = p.BOUND_BLOCKS
    points = cache_curve(played.trace, policies, list(sizes))
    hits = {
        policy: tuple(point.hit_ratio for point in points[index * len(sizes) :][: len(sizes)])
        for index, policy in enumerate(policies)
    }
    rows: list[Row] = []
    for place, size in enumerate(sizes):
        bound = hits[BELADY][place]
        rows.append(row(f"{size:,} blocks, bound", None, bound))
        for policy in paper.POLICY_HITS:
            share = hits[policy][place] / bound if bound else None
            rows.append(row(f"{size:,} blocks, {policy} / bound", None, share))
    x = tuple(float(size) for size in sizes)
    curves = tuple(Curve(policy, x, values) for policy, values in hits.items())
    report = Report(
        "beyond-eviction",
        tuple(rows),
        described([played]),
        DEFINITION,
        (
            "the bound counts every held block of a prompt, even behind a missing one, and evicts "
            "what is needed last: no policy has more hits",
        ),
    )
    title = "Eviction against Belady's bound"
    return Result(report, (Panel(title, "blocks", "hit ratio", curves, log_x=True),))


def least_mean_ttft_s(trace: Trace, nodes: int) -> float:
    """A mean TTFT that no schedule on so many prefill nodes can beat, if requests reuse only what
    came before them.

    Two relaxations, of which the greater counts. First: every request is alone and reuses all that
    any request before it had. Second: the nodes are one node so many times faster, the cache is
    again perfect and free, and the shortest remaining work goes first, which has the least mean
    time in system of all orders on one machine (Schrage 1968).
    """
    reused = np.minimum(prefix_blocks(trace) * trace.block_tokens, trace.prompt_tokens - 1)
    cost = profile().prefill
    work_s = [
        cost.seconds(prompt, cached)
        for prompt, cached in zip(trace.prompt_tokens.tolist(), reused.tolist(), strict=True)
    ]
    alone_s = sum(work_s) / len(work_s)
    return max(alone_s, _shortest_first_s(trace.arrival_s.tolist(), work_s, nodes))


def _shortest_first_s(arrival_s: Sequence[float], work_s: Sequence[float], speed: float) -> float:
    waiting: list[tuple[float, float]] = []
    now_s = total_s = 0.0
    for index, (arrived_s, work) in enumerate(zip(arrival_s, work_s, strict=True)):
        now_s = max(now_s, arrived_s)
        heapq.heappush(waiting, (work / speed, arrived_s))
        until_s = arrival_s[index + 1] if index + 1 < len(arrival_s) else float("inf")
        while waiting and now_s < until_s:
            left_s, came_s = heapq.heappop(waiting)
            if now_s + left_s > until_s:
                heapq.heappush(waiting, (left_s - (until_s - now_s), came_s))
                now_s = until_s
            else:
                now_s += left_s
                total_s += now_s - came_s
    return total_s / len(arrival_s)


def schedule_bound(scale: Scale) -> Result:
    """Mean TTFT of each scheduler against a bound that no schedule can beat."""
    played = workload("conversation", scale.swept())
    policies = tuple(paper.FAST_TTFT_S)
    rows: list[Row] = []
    values: dict[str, list[float]] = {name: [] for name in (*policies, "bound")}
    for load in p.BOUND_LOADS:
        trace = played.at_load(load)
        bound_s = least_mean_ttft_s(trace, p.PREFILL_NODES)
        values["bound"].append(bound_s)
        rows.append(row(f"load {load:g}, bound, s", None, bound_s))
        for policy in policies:
            ttft_s = mean_ttft_s(trace, policy)
            values[policy].append(ttft_s)
            rows.append(row(f"load {load:g}, {policy} / bound", None, ttft_s / bound_s))
    curves = tuple(Curve(name, p.BOUND_LOADS, tuple(ttfts)) for name, ttfts in values.items())
    report = Report(
        "beyond-schedule",
        tuple(rows),
        described([played]),
        "mean TTFT on 8P+8D over the greater of two lower bounds: every request alone with all "
        "that any before it had in cache; one node 8 times faster with that same cache, shortest "
        "remaining work first",
        (
            "the bound need not be reachable: eight nodes cannot work on one prompt together",
            "a request is taken to reuse only what requests that arrived before it had; a schedule "
            "that turns the order of two requests with one prefix round is not covered",
        ),
    )
    title = "Mean TTFT against a lower bound"
    return Result(report, (Panel(title, "load", "seconds", curves, log_y=True),))


def threshold_sensitivity(scale: Scale) -> Result:
    """How Algorithm 1 depends on its kvcache_balancing_threshold."""
    played = workload("conversation", scale.swept())
    trace = played.at_load(p.BUSY_LOAD)
    names = ("ttft_mean_s", "hit_ratio", "fetches", "fetched_bytes")
    runs: list[dict[str, Any]] = []
    rows: list[Row] = []
    for threshold in p.THRESHOLDS:
        config = msgspec.structs.replace(papers_world(), balancing_threshold=threshold)
        runs.append(simulate(trace, config).summary)
        rows += [row(f"threshold {threshold:g}, {name}", None, runs[-1][name]) for name in names]
    report = Report(
        "beyond-threshold",
        tuple(rows),
        f"{described([played])}; replayed at load {p.BUSY_LOAD:g}",
        "8P+8D, kvcache-centric; a node whose own prefix is shorter than the best by less than the "
        "threshold's factor computes locally",
        ("the paper prints no value; the Conductor's default is 1.25",),
    )
    panels = tuple(
        Panel(
            title,
            "kvcache_balancing_threshold",
            unit,
            (Curve("kvcache-centric", p.THRESHOLDS, tuple(run[name] * factor for run in runs)),),
            log_x=True,
        )
        for name, title, unit, factor in (
            ("ttft_mean_s", "Mean TTFT", "seconds", 1.0),
            ("hit_ratio", "Hit ratio", "ratio of tokens", 1.0),
            ("fetched_bytes", "Fetched", "TB", 1e-12),
        )
    )
    return Result(report, panels)


def overload_sweep(scale: Scale) -> Result:
    """Effective requests by admission when far too many come."""
    played = workload("conversation", scale.swept())
    admissions = ("none", *paper.REJECTED)
    rows: list[Row] = []
    ratios: dict[str, list[float]] = {admission: [] for admission in admissions}
    for speed in p.OVERLOAD_SWEEP:
        trace = played.trace.sped_up(speed)
        for admission in admissions:
            summary = simulate(trace, papers_world(admission=admission)).summary
            ratios[admission].append(summary["effective_ratio"])
            rows.append(
                row(f"{speed:g}×, {admission}, effective, ratio", None, ratios[admission][-1])
            )
            rejected = summary["rejected"] / summary["requests"]
            rows.append(row(f"{speed:g}×, {admission}, rejected, ratio", None, rejected))
    curves = tuple(Curve(name, p.OVERLOAD_SWEEP, tuple(found)) for name, found in ratios.items())
    report = Report(
        "beyond-overload",
        tuple(rows),
        described([played]),
        "requests that completed within TTFT 30 s and TBT 0.1 s / requests, 8P+8D",
        ("speeds are multiples of the trace's own",),
    )
    panel = Panel("Effective requests", "replay speed", "share of requests", curves)
    return Result(report, (panel,))
