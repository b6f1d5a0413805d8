"""Items of the choice of a prefill node: FAST Figure 5 and arXiv Figure 8."""

from __future__ import annotations

from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.pools import papers_world
from snowskin.reproduce.report import Curve, Panel, Report, Result, row
from snowskin.reproduce.workloads import Scale, Workload, described, drawn, workload
from snowskin.sim.simulate import simulate
from snowskin.trace.records import Trace


def fast_schedulers(scale: Scale) -> Result:
    """FAST Figure 5: mean TTFT by scheduler, 16 nodes, conversation."""
    return _compare("fast-fig5", workload("conversation", scale.swept()), paper.FAST_TTFT_S)


def arxiv_schedulers(scale: Scale) -> Result:
    """arXiv Figure 8: mean TTFT by scheduler, 8P+8D, real workload."""
    return _compare("arxiv-fig8", drawn(p.REAL, scale.swept()), paper.ARXIV_TTFT_S)


def _compare(item: str, played: Workload, printed: dict[str, float]) -> Result:
    policies = tuple(printed)
    own = {policy: mean_ttft_s(played.trace, policy) for policy in policies}
    by_load = {
        load: {policy: mean_ttft_s(played.at_load(load), policy) for policy in policies}
        for load in p.LOADS
    }
    busy = by_load[p.BUSY_LOAD]
    rows = [row(f"{policy}, own speed, s", printed[policy], own[policy]) for policy in policies]
    rows += [row(f"{policy}, load {p.BUSY_LOAD:g}, s", None, busy[policy]) for policy in policies]
    first, last = policies[0], policies[-1]
    ratio = printed[first] / printed[last]
    rows.append(row("random / kvcache-centric, own speed", ratio, own[first] / own[last]))
    rows.append(
        row(f"random / kvcache-centric, load {p.BUSY_LOAD:g}", None, busy[first] / busy[last])
    )
    rows.append(row("load at the workload's own speed", None, played.own_load()))
    report = Report(
        item,
        tuple(rows),
        described([played]),
        "mean time from arrival to first token over all requests, 8P+8D, no admission; load 1: "
        "prefill work without reuse would just fill the 8 prefill nodes",
        (
            "the paper does not state the speed of its replay; beside the workload's own we give "
            "the busy load that all items share",
            "near saturation a small error in capacity becomes a great one in TTFT: compare the "
            "order and the curves",
        ),
    )
    bars = (
        Curve("paper", policies, tuple(printed.values()), "paper", is_paper=True),
        Curve("ours, own speed", policies, tuple(own.values()), "own"),
        Curve(f"ours, load {p.BUSY_LOAD:g}", policies, tuple(busy.values()), "busy"),
    )
    lines = tuple(
        Curve(policy, p.LOADS, tuple(ttfts[policy] for ttfts in by_load.values()))
        for policy in policies
    )
    panels = (
        Panel("Mean TTFT", "scheduler", "seconds", bars, bars=True, log_y=True),
        Panel("Mean TTFT by load, ours", "load", "seconds", lines, log_y=True),
    )
    return Result(report, panels)


def mean_ttft_s(trace: Trace, policy: str) -> float:
    """Mean TTFT on 8P+8D under a policy."""
    ttft_s: float = simulate(trace, papers_world(policy=policy)).summary["ttft_mean_s"]
    return ttft_s
