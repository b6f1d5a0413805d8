"""Items of overload: arXiv Table 3 (rejections), Figures 9 and 10 (oscillation of load)."""

from __future__ import annotations

import numpy as np

from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.pools import papers_world
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.workloads import Scale, Workload, described, drawn
from snowskin.sim.simulate import Outcome, simulate

ADMISSIONS = tuple(paper.REJECTED)
PAPER_REQUESTS = 23_000
SAMPLES = 240


def rejections(scale: Scale) -> Result:
    """arXiv Table 3: requests rejected under a faster replay, by admission."""
    played = drawn(p.REAL, scale)
    rows: list[Row] = []
    shares: dict[str, list[float]] = {admission: [] for admission in ADMISSIONS}
    for speed in p.OVERLOAD_SPEEDS:
        outcomes = {name: replay(played, speed, name) for name in ADMISSIONS}
        is_papers = speed == p.OVERLOAD_SPEEDS[0]
        for admission, outcome in outcomes.items():
            share = outcome.summary["rejected"] / outcome.summary["requests"]
            shares[admission].append(share)
            printed = paper.REJECTED[admission] / PAPER_REQUESTS if is_papers else None
            rows.append(row(f"{speed:g}×, {admission}, rejected, ratio", printed, share))
            effective = outcome.summary["effective_ratio"]
            rows.append(row(f"{speed:g}×, {admission}, effective, ratio", None, effective))
        for admission in ADMISSIONS[1:]:
            base = shares[ADMISSIONS[0]][-1]
            printed = paper.REJECTED[admission] / paper.REJECTED[ADMISSIONS[0]]
            relative = shares[admission][-1] / base if base else None
            name = f"{speed:g}×, rejected, {admission} / baseline"
            rows.append(row(name, printed if is_papers else None, relative))
    report = Report(
        "arxiv-table3",
        tuple(rows),
        described([played]),
        "rejected requests / requests on 8P+8D, TTFT SLO 30 s, TBT SLO 0.1 s; the paper's counts "
        "are of 23,000 requests",
        (
            "baseline: TTFT is checked at arrival, decode load after prefill; early: both at "
            "arrival; predicted: decode load as predicted for the end of prefill",
            "the paper's own hour of requests is not released in this form, and how near its "
            "cluster was to saturation is not known; so further speeds are given",
        ),
    )
    x = p.OVERLOAD_SPEEDS
    curves = [Curve(f"{name}, ours", x, tuple(shares[name]), name) for name in ADMISSIONS]
    curves += [
        Curve(f"{name}, paper", x[:1], (count / PAPER_REQUESTS,), name, is_paper=True)
        for name, count in paper.REJECTED.items()
    ]
    panel = Panel("Rejected requests", "replay speed", "share of requests", tuple(curves))
    return Result(report, (panel,))


def replay(played: Workload, speed: float, admission: str, *, samples: int = 0) -> Outcome:
    """A workload so many times faster than it is, on the papers' cluster."""
    trace = played.trace.sped_up(speed)
    return simulate(trace, papers_world(admission=admission), samples=samples)


def oscillation(scale: Scale) -> Result:
    """arXiv Figures 9 and 10: load of both pools over time under early rejection."""
    played = drawn(p.REAL, scale)
    speed = p.OVERLOAD_SPEEDS[-1]
    rows: list[Row] = []
    panels: list[Panel] = []
    for admission in ("early", "predicted"):
        outcome = replay(played, speed, admission, samples=SAMPLES)
        timeline = outcome.timeline
        assert timeline is not None
        end_s = played.trace_s() / speed
        count = sum(time_s <= end_s for time_s in timeline.times_s)
        minutes = tuple(time_s / 60 for time_s in timeline.times_s[:count])
        prefill = tuple(timeline.prefill_load[:count])
        decode = tuple(timeline.decode_load[:count])
        # The first quarter fills the cluster.
        settled = slice(count // 4, None)
        rows += [
            row(f"{admission}, decode load, deviation / mean", None, _scatter(decode[settled])),
            row(f"{admission}, prefill load, deviation / mean", None, _scatter(prefill[settled])),
            row(
                f"{admission}, correlation of the loads",
                None,
                _correlation(prefill[settled], decode[settled]),
            ),
            row(f"{admission}, effective, ratio", None, outcome.summary["effective_ratio"]),
        ]
        curves = (Curve("prefill", minutes, prefill), Curve("decode", minutes, decode))
        title = f"admission {admission}, {speed:g}× replay"
        panels.append(Panel(title, "minutes", "requests a node", curves, steps=True))
    report = Report(
        "arxiv-fig9-10",
        tuple(rows),
        f"{described([played])}; replayed {speed:g} times faster",
        "load: requests queued or running / nodes of the pool, sampled 240 times; statistics over "
        "the last three quarters of the arrivals",
        (
            "the paper draws this without numbers: under early rejection the loads of the two "
            "pools rise and fall in turn, prediction dampens it",
            "the speed is the greatest of those of arxiv-table3, where rejection matters most",
        ),
    )
    return Result(report, tuple(panels))


def _scatter(values: tuple[float, ...]) -> float | None:
    average = float(np.mean(values)) if values else 0.0
    return float(np.std(values)) / average if average else None


def _correlation(first: tuple[float, ...], second: tuple[float, ...]) -> float | None:
    if len(first) < 2 or not np.std(first) or not np.std(second):
        return None
    return float(np.corrcoef(first, second)[0, 1])
