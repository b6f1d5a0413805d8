"""Items of overload: arXiv Table 3 (rejections), Figures 9 and 10 (oscillation of load)."""

from __future__ import annotations

import numpy as np

from snowskin.measure.records import Ending, Slo
from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.gains import within_per_token
from snowskin.reproduce.pools import papers_world
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.workloads import Scale, Workload, described, drawn
from snowskin.sim.simulate import Outcome, simulate

ADMISSIONS = tuple(paper.REJECTED)
PAPER_REQUESTS = 23_000
SAMPLES = 240


CLUSTERS = ((p.PREFILL_NODES, p.DECODE_NODES), p.DECODE_BOUND)


def rejections(scale: Scale) -> Result:
    """arXiv Table 3: requests rejected under a faster replay, by admission."""
    played = drawn(p.REAL, scale)
    rows: list[Row] = []
    panels: list[Panel] = []
    for cluster in CLUSTERS:
        shares: dict[str, list[float]] = {name: [] for name in ADMISSIONS}
        is_papers = cluster == CLUSTERS[0]
        for speed in p.OVERLOAD_SPEEDS:
            outcomes = {name: replay(played, speed, name, cluster=cluster) for name in ADMISSIONS}
            rows += _rejection_rows(
                outcomes, f"{_named(cluster)}, {speed:g}×", is_papers and speed == 2
            )
            for name, outcome in outcomes.items():
                shares[name].append(_share(outcome))
        curves = [
            Curve(f"{name}, ours", p.OVERLOAD_SPEEDS, tuple(shares[name]), name) for name in shares
        ]
        if is_papers:
            curves += [
                Curve(f"{name}, paper", (2.0,), (count / PAPER_REQUESTS,), name, is_paper=True)
                for name, count in paper.REJECTED.items()
            ]
        title = f"Rejected requests, {_named(cluster)}"
        panels.append(Panel(title, "replay speed", "share of requests", tuple(curves)))
    report = Report(
        "arxiv-table3",
        tuple(rows),
        described([played]),
        "rejected requests / requests, TTFT SLO 30 s, TBT SLO 0.1 s; effective: within both, TBT "
        "in seconds per token as this paper has it; its counts are of 23,000 requests on 8P+8D",
        (
            "baseline: TTFT is checked at arrival, decode load after prefill; early: both at "
            "arrival; predicted: decode load as predicted for the end of prefill",
            "the paper's own hour of requests is not released in this form, and how near its "
            "cluster was to saturation is not known; so a further speed is given",
            "with 8P+8D decode never limits our model: a second cluster of 16 nodes, where it "
            "does, shows how the three rules differ",
        ),
    )
    return Result(report, tuple(panels))


def _named(cluster: tuple[int, int]) -> str:
    return f"{cluster[0]}P+{cluster[1]}D"


def _share(outcome: Outcome) -> float:
    rejected: int = outcome.summary["rejected"]
    return rejected / len(outcome.records)


def effective_ratio(outcome: Outcome) -> float:
    """Requests within both SLOs, by the arXiv paper's TBT / all requests."""
    keeps = within_per_token(Slo(p.TTFT_SLO_S, p.TBT_SLOS_S[0]))
    return sum(map(keeps, outcome.records)) / len(outcome.records)


def _served(outcome: Outcome) -> float:
    """Prompt tokens of the completed requests / of all."""
    records = outcome.records
    served = sum(each.prompt_tokens for each in records if each.ending is Ending.COMPLETED)
    return served / sum(each.prompt_tokens for each in records)


def _rejection_rows(outcomes: dict[str, Outcome], case: str, is_papers: bool) -> list[Row]:
    rows: list[Row] = []
    base = _share(outcomes[ADMISSIONS[0]])
    for name, outcome in outcomes.items():
        printed = paper.REJECTED[name]
        share = _share(outcome)
        rows.append(
            row(
                f"{case}, {name}, rejected, ratio",
                printed / PAPER_REQUESTS if is_papers else None,
                share,
            )
        )
        if name != ADMISSIONS[0]:
            relative = printed / paper.REJECTED[ADMISSIONS[0]] if is_papers else None
            ours = share / base if base else None
            rows.append(row(f"{case}, rejected, {name} / baseline", relative, ours))
        rows.append(row(f"{case}, {name}, effective, ratio", None, effective_ratio(outcome)))
        by_fast = outcome.summary["effective_ratio"]
        rows.append(row(f"{case}, {name}, effective by FAST's TBT, ratio", None, by_fast))
        rows.append(row(f"{case}, {name}, prompt tokens served, ratio", None, _served(outcome)))
    return rows


def replay(
    played: Workload,
    speed: float,
    admission: str,
    *,
    cluster: tuple[int, int] = CLUSTERS[0],
    samples: int = 0,
) -> Outcome:
    """A workload so many times faster than it is, on so many prefill and decode nodes."""
    trace = played.trace.sped_up(speed)
    config = papers_world(admission=admission, prefill=cluster[0], decode=cluster[1])
    return simulate(trace, config, samples=samples)


def oscillation(scale: Scale) -> Result:
    """arXiv Figures 9 and 10: load of both pools over time under early rejection."""
    played = drawn(p.REAL, scale)
    speed = p.OVERLOAD_SPEEDS[-1]
    rows: list[Row] = []
    panels: list[Panel] = []
    for cluster in CLUSTERS:
        for admission in ("early", "predicted"):
            outcome = replay(played, speed, admission, cluster=cluster, samples=SAMPLES)
            case = f"{_named(cluster)}, {admission}"
            found, panel = _load_over_time(outcome, case, end_s=played.trace_s() / speed)
            rows += found
            panels.append(panel)
    report = Report(
        "arxiv-fig9-10",
        tuple(rows),
        f"{described([played])}; replayed {speed:g} times faster",
        "load: requests queued or running / nodes of the pool, sampled 240 times; statistics over "
        "the last three quarters of the arrivals",
        (
            "the paper draws this without numbers: under early rejection the loads of the two "
            "pools rise and fall in turn, prediction dampens it",
            "the speed is the greater of those of arxiv-table3, where rejection matters most; the "
            "clusters are those of arxiv-table3",
        ),
    )
    return Result(report, tuple(panels))


def _load_over_time(outcome: Outcome, case: str, *, end_s: float) -> tuple[list[Row], Panel]:
    timeline = outcome.timeline
    assert timeline is not None
    count = sum(time_s <= end_s for time_s in timeline.times_s)
    minutes = tuple(time_s / 60 for time_s in timeline.times_s[:count])
    prefill = tuple(timeline.prefill_load[:count])
    decode = tuple(timeline.decode_load[:count])
    # The first quarter fills the cluster.
    settled = slice(count // 4, None)
    correlation = _correlation(prefill[settled], decode[settled])
    rows = [
        row(f"{case}, decode load, deviation / mean", None, _scatter(decode[settled])),
        row(f"{case}, prefill load, deviation / mean", None, _scatter(prefill[settled])),
        row(f"{case}, correlation of the loads", None, correlation),
        row(f"{case}, effective, ratio", None, effective_ratio(outcome)),
    ]
    curves = (Curve("prefill", minutes, prefill), Curve("decode", minutes, decode))
    return rows, Panel(case, "minutes", "requests a node", curves, steps=True)


def _scatter(values: tuple[float, ...]) -> float | None:
    average = float(np.mean(values)) if values else 0.0
    return float(np.std(values)) / average if average else None


def _correlation(first: tuple[float, ...], second: tuple[float, ...]) -> float | None:
    if len(first) < 2 or not np.std(first) or not np.std(second):
        return None
    return float(np.corrcoef(first, second)[0, 1])
