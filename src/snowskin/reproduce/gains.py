"""Items of capacity within SLO: FAST Figures 1, 6 and 7, arXiv Figure 13."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from snowskin.measure.records import Ending, RequestRecord, Slo, is_effective
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
Promise = Callable[[RequestRecord], bool]
Ladders = dict[str, SpeedLadder]
MOONCAKE = "mooncake"
DEFINITION = (
    f"capacity: the highest replay speed at which {p.EFFECTIVE_RATIO:.0%} of the requests have a "
    f"TTFT of at most {p.TTFT_SLO_S:g} s and a TBT (mean of the longest 10 % of intervals) within "
    "the bound"
)


def play(trace: Trace, config: Config) -> list[RequestRecord]:
    """The records of a trace on either kind of cluster."""
    if isinstance(config, WorldConfig):
        return simulate(trace, config).records
    return simulate_coupled(trace, config)[1]


def kept_ratios(
    trace: Trace, config: Config, promises: Sequence[Promise], speed: float
) -> list[float]:
    """Requests for which each promise is kept / requests, at one replay speed."""
    records = play(trace.sped_up(speed), config)
    return [sum(map(promise, records)) / len(records) for promise in promises]


def within(slo: Slo) -> Promise:
    """FAST's effective request: its TBT is the mean of the longest 10 % of intervals."""
    return partial(is_effective, slo=slo)


def mean_interval_s(record: RequestRecord) -> float | None:
    """The arXiv paper's TBT, in seconds per token: the mean over all intervals of a request."""
    if record.ttft_s is None or record.output_tokens < 2:
        return None
    return (record.finished_s - record.arrived_s - record.ttft_s) / (record.output_tokens - 1)


def within_per_token(slo: Slo) -> Promise:
    """The arXiv paper's effective request: its TBT is the mean over all intervals."""

    def keeps(record: RequestRecord) -> bool:
        tbt_s = mean_interval_s(record)
        return (
            record.ending is Ending.COMPLETED
            and record.ttft_s is not None
            and (slo.ttft_s is None or record.ttft_s <= slo.ttft_s)
            and (slo.tbt_s is None or tbt_s is None or tbt_s <= slo.tbt_s)
        )

    return keeps


def ladders_of(
    played: Workload, configs: dict[str, Config], promises: Sequence[Promise]
) -> Ladders:
    """One search for each system; nothing is played yet."""
    return {
        system: SpeedLadder(partial(kept_ratios, played.trace, config, promises))
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
    slos = [within(Slo(p.TTFT_SLO_S, tbt_s)) for tbt_s in p.TBT_SLOS_S]
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
        rows += [
            row(f"gain over {system}, TBT {label}", None, gain_of(rates[MOONCAKE], rates[system]))
            for system in SYSTEMS
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
    both = Slo(ttft_s, tbt_s)
    promises = [
        within_per_token(both),
        within_per_token(Slo(None, tbt_s)),
        within_per_token(Slo(ttft_s, None)),
        within(both),
        within(Slo(None, tbt_s)),
    ]
    configs: dict[str, Config] = {
        MOONCAKE: papers_world(prefill=10, decode=10),
        "vllm": rival("vllm", instances=20),
    }
    ladders = ladders_of(played, configs, promises)
    rate_per_s = played.rate_per_s()
    per_token, longest = _rates(ladders, 0, rate_per_s), _rates(ladders, 3, rate_per_s)
    rows: list[Row] = []
    for system, ladder in ladders.items():
        printed = paper.REPLAY_TBT_RATIO[system]
        rows.append(row(f"{system}, within the TBT SLO, ratio", printed, ladder.at_own_speed(1)))
        rows.append(row(f"{system}, within the TTFT SLO, ratio", 1.0, ladder.at_own_speed(2)))
    gain = gain_of(per_token[MOONCAKE], per_token["vllm"])
    rows.append(row("gain in capacity", paper.REPLAY_GAIN, gain))
    rows += [
        row(f"{system}, capacity, requests/s", None, rate) for system, rate in per_token.items()
    ]
    for system, ladder in ladders.items():
        rows.append(row(f"{system}, within FAST's TBT, ratio", None, ladder.at_own_speed(4)))
    gain = gain_of(longest[MOONCAKE], longest["vllm"])
    rows.append(row("gain in capacity by FAST's TBT", None, gain))
    report = Report(
        "arxiv-fig13",
        tuple(rows),
        described([played]),
        f"capacity: the highest replay speed at which {p.EFFECTIVE_RATIO:.0%} of the requests have "
        f"a TTFT of at most {ttft_s:g} s and a TBT of at most {tbt_s:g} s per token, which is the "
        "mean over all intervals of a request; ratios at the workload's own speed",
        (
            "the arXiv paper states its TBT per token; by FAST's definition (the longest 10 %) "
            "one long prefill of a neighbour breaks the promise: rows of it are given beside",
        ),
    )
    panels = (
        _by_rate("Requests within the TBT SLO", ladders, 1, rate_per_s),
        _by_rate("Requests within the TTFT SLO", ladders, 2, rate_per_s),
    )
    return Result(report, panels)


def of_workload(item: str, name: str) -> Callable[[Scale], Result]:
    """The item of one of FAST's workloads."""
    return partial(fast_gain, item, name)
