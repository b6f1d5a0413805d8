"""Items of capacity within SLO: FAST Figures 1, 6 and 7, arXiv Figure 13."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from snowskin.measure.records import Slo, is_effective
from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.capacity import SpeedLadder
from snowskin.reproduce.pools import papers_world, rival
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.workloads import Scale, Workload, described, drawn, workload
from snowskin.sim.config import WorldConfig
from snowskin.sim.coupled import SYSTEMS, CoupledConfig, simulate_coupled
from snowskin.sim.simulate import simulate
from snowskin.trace.records import Trace

Config = WorldConfig | CoupledConfig
Ladders = dict[str, SpeedLadder]
MOONCAKE = "mooncake"
DEFINITION = (
    f"capacity: the highest replay speed at which {p.EFFECTIVE_RATIO:.0%} of the requests have a "
    f"TTFT of at most {p.TTFT_SLO_S:g} s and a TBT (mean of the longest 10 % of intervals) within "
    "the bound"
)


def summary_of_run(trace: Trace, config: Config) -> dict[str, Any]:
    """The flat summary of a trace on either kind of cluster."""
    if isinstance(config, WorldConfig):
        return simulate(trace, config).summary
    return simulate_coupled(trace, config)[0]


def effective_ratios(
    trace: Trace, config: Config, slos: Sequence[Slo], speed: float
) -> list[float]:
    """Effective requests / requests for each SLO, at one replay speed."""
    sped = trace.sped_up(speed)
    if isinstance(config, WorldConfig):
        records = simulate(sped, config).records
    else:
        records = simulate_coupled(sped, config)[1]
    return [sum(is_effective(each, slo) for each in records) / len(records) for slo in slos]


def ladders_of(played: Workload, configs: dict[str, Config], slos: Sequence[Slo]) -> Ladders:
    """One search for each system; nothing is played yet."""
    return {
        system: SpeedLadder(partial(effective_ratios, played.trace, config, slos))
        for system, config in configs.items()
    }


def gain_of(ours: float | None, theirs: float | None) -> float | None:
    """Ours over theirs − 1; None if either carries nothing."""
    return ours / theirs - 1 if ours is not None and theirs else None


def _rates(ladders: Ladders, index: int, rate_per_s: float) -> dict[str, float | None]:
    speeds = {
        system: ladder.capacity(index, target=p.EFFECTIVE_RATIO)
        for system, ladder in ladders.items()
    }
    return {
        system: speed * rate_per_s if speed is not None else None
        for system, speed in speeds.items()
    }


def fast_gain(item: str, name: str, scale: Scale) -> Result:
    """FAST Figures 1, 6, 7: capacity of 8P+8D against 16 instances of each rival."""
    played = workload(name, scale.swept())
    slos = [Slo(p.TTFT_SLO_S, tbt_s) for tbt_s in p.TBT_SLOS_S]
    configs: dict[str, Config] = {MOONCAKE: papers_world()}
    configs |= {system: rival(system) for system in SYSTEMS}
    ladders = ladders_of(played, configs, slos)
    labels = tuple(f"{tbt_s * 1000:.0f} ms" for tbt_s in p.TBT_SLOS_S)
    rate_per_s = played.rate_per_s()
    capacities = [_rates(ladders, index, rate_per_s) for index in range(len(slos))]
    gains: list[float | None] = []
    for rates in capacities:
        best = max(rates[system] or 0.0 for system in SYSTEMS)
        gains.append(gain_of(rates[MOONCAKE], best))
    printed = paper.CAPACITY_GAIN[name]
    rows = [
        row(f"gain over the best rival, TBT {label}", theirs, gain)
        for label, theirs, gain in zip(labels, printed, gains, strict=True)
    ]
    for label, rates in zip(labels, capacities, strict=True):
        rows += [
            row(f"{system}, TBT {label}, requests/s", None, rate) for system, rate in rates.items()
        ]
    report = Report(
        item,
        tuple(rows),
        described([played]),
        DEFINITION + "; gain: Mooncake's capacity / that of the best of the three rivals at this "
        "bound − 1, where 1 means +100 %",
        (
            "the paper names neither the share of requests nor which of the rivals its figures "
            "refer to; both are our choice",
            "8P+8D without admission control against 16 coupled instances",
        ),
    )
    gained = (
        Curve("paper", labels, printed, "paper", is_paper=True),
        Curve("ours", labels, tuple(gains), "ours"),
    )
    carried = tuple(
        Curve(system, labels, tuple(rates[system] for rates in capacities)) for system in configs
    )
    panels = (
        Panel("Gain in capacity", "TBT bound", "gain (1 = +100 %)", gained, bars=True),
        Panel("Capacity within SLO, ours", "TBT bound", "requests/s", carried, bars=True),
        _by_rate(f"Effective requests, TBT {labels[1]}", ladders, 1, rate_per_s),
    )
    return Result(report, panels)


def _by_rate(title: str, ladders: Ladders, index: int, rate_per_s: float) -> Panel:
    curves = tuple(
        Curve(
            system,
            tuple(speed * rate_per_s for speed, _ in ladder.points(index)),
            tuple(score for _, score in ladder.points(index)),
        )
        for system, ladder in ladders.items()
    )
    label = "share of requests"
    return Panel(title, "requests/s", label, curves, log_x=True, line_y=p.EFFECTIVE_RATIO)


def replay_gain(scale: Scale) -> Result:
    """arXiv Figure 13: 10P+10D against 20 vLLM instances on the real workload."""
    played = drawn(p.REAL, scale.swept())
    ttft_s, tbt_s = p.TTFT_SLO_S, p.TBT_SLOS_S[0]
    slos = [Slo(ttft_s, tbt_s), Slo(None, tbt_s), Slo(ttft_s, None)]
    configs: dict[str, Config] = {
        MOONCAKE: papers_world(prefill=10, decode=10),
        "vllm": rival("vllm", instances=20),
    }
    ladders = ladders_of(played, configs, slos)
    rate_per_s = played.rate_per_s()
    rates = _rates(ladders, 0, rate_per_s)
    rows: list[Row] = []
    for system, ladder in ladders.items():
        within = ladder.at_own_speed(1)
        rows.append(
            row(f"{system}, within the TBT SLO, ratio", paper.REPLAY_TBT_RATIO[system], within)
        )
        rows.append(row(f"{system}, within the TTFT SLO, ratio", 1.0, ladder.at_own_speed(2)))
    rows.append(row("gain in capacity", paper.REPLAY_GAIN, gain_of(rates[MOONCAKE], rates["vllm"])))
    rows += [row(f"{system}, capacity, requests/s", None, rate) for system, rate in rates.items()]
    report = Report(
        "arxiv-fig13",
        tuple(rows),
        described([played]),
        DEFINITION + "; ratios at the workload's own speed",
        ("the paper's TBT is 0.1 s per token; ours is the mean of the longest 10 % of intervals",),
    )
    panels = (
        _by_rate("Requests within the TBT SLO", ladders, 1, rate_per_s),
        _by_rate("Requests within the TTFT SLO", ladders, 2, rate_per_s),
    )
    return Result(report, panels)


def of_workload(item: str, name: str) -> Callable[[Scale], Result]:
    """The item of one of FAST's workloads."""
    return partial(fast_gain, item, name)
