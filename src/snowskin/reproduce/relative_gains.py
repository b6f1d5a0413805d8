"""Items of capacity under a relative SLO: arXiv Figures 11 and 12."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from snowskin.measure.latency import percentile
from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.capacity import SpeedLadder
from snowskin.reproduce.costs import thousands
from snowskin.reproduce.gains import Config, gain_of, mean_interval_s, play
from snowskin.reproduce.pools import papers_world, rival
from snowskin.reproduce.report import Curve, Panel, Report, Result, row
from snowskin.reproduce.workloads import Scale, Workload, described, drawn, profile
from snowskin.trace.records import Trace
from snowskin.trace.shapes import SHAPES, fixed_shape

DEFINITION = (
    "capacity: the highest rate at which the 90th percentiles of TTFT and TBT are at most 10 and 5 "
    "times those of a lone request of the workload's mean length; TBT of a request: the mean over "
    "its intervals; [3P+1D] against 4 vLLM instances without prefix cache; gain: 1 means +100 %"
)
BY_FAST = (
    "by FAST's TBT, the mean of the longest 10 % of intervals, one long prefill of a neighbour "
    "breaks the promise: rows of it are given beside"
)
OURS = "mooncake [3P+1D]"
PER_TOKEN, LONGEST = 0, 1
"""The two definitions of TBT, as promises of a ladder."""


def percentile_scores(
    trace: Trace, config: Config, ttft_s: float, tbt_s: float, speed: float
) -> list[float]:
    """How far inside both bounds the 90th percentiles are, at one replay speed: 1 is the bound."""
    records = play(trace.sped_up(speed), config)
    ttft_score = ttft_s / _p90(each.ttft_s for each in records)
    per_token = tbt_s / _p90(map(mean_interval_s, records))
    longest = tbt_s / _p90(each.tbt_s for each in records)
    return [min(ttft_score, per_token), min(ttft_score, longest)]


def _p90(values: Iterable[float | None]) -> float:
    return percentile([value for value in values if value is not None], 90) or 1e-9


class Carried(msgspec.Struct, frozen=True):
    """Requests/s of each system on each workload; None: it cannot keep its promise at any rate."""

    per_token: dict[str, list[float | None]]
    longest: dict[str, list[float | None]]


def _carried(played: Sequence[Workload], configs: dict[str, Config]) -> Carried:
    found = {
        system: [_capacities(each, config) for each in played] for system, config in configs.items()
    }
    return Carried(
        {system: [rates[PER_TOKEN] for rates in each] for system, each in found.items()},
        {system: [rates[LONGEST] for rates in each] for system, each in found.items()},
    )


def _capacities(played: Workload, config: Config) -> list[float | None]:
    """Requests/s within the relative SLO, by each definition of TBT."""
    tokens = round(float(played.trace.prompt_tokens.mean()))
    costs = profile()
    ttft_s = p.RELATIVE_SLO[0] * costs.prefill.seconds(tokens)
    tbt_s = p.RELATIVE_SLO[1] * costs.decode.step_s(1, tokens)
    ladder = SpeedLadder(partial(percentile_scores, played.trace, config, ttft_s, tbt_s))
    speeds = [ladder.capacity(promise, target=1.0) for promise in (PER_TOKEN, LONGEST)]
    rate_per_s = played.rate_per_s()
    return [speed * rate_per_s if speed is not None else None for speed in speeds]


Rates = dict[str, list[float | None]]


def _gains(rates: Rates) -> list[float | None]:
    """Over the best of the rivals."""
    rivals = [values for system, values in rates.items() if system.startswith("vllm")]
    best = [max(value or 0.0 for value in column) for column in zip(*rivals, strict=True)]
    return [gain_of(ours, theirs) for ours, theirs in zip(rates[OURS], best, strict=True)]


def dataset_gain(scale: Scale) -> Result:
    """arXiv Figure 11: [3P+1D] against four vLLM instances on two datasets."""
    documents = msgspec.structs.replace(SHAPES["documents"], requests=p.DATASET_REQUESTS)
    played = [drawn(p.SUMMARIES, scale), drawn(documents, scale)]
    carried = _carried(
        played,
        {
            OURS: papers_world(prefill=3, decode=1),
            "mooncake [2P+2D]": papers_world(prefill=2, decode=2),
            "vllm": rival("vllm", instances=4),
            "coupled with prefix caching": rival("vllm-prefix-caching", instances=4),
        },
    )
    printed = tuple(paper.DATASET_GAIN.values())
    assumptions = ("lengths are drawn with the datasets' means; their spread is assumed", BY_FAST)
    names = tuple(paper.DATASET_GAIN)
    return _result("arxiv-fig11", ("dataset", names, printed), played, carried, assumptions)


def long_context_gain(scale: Scale) -> Result:
    """arXiv Figure 12: [3P+1D] against four vLLM instances by prompt length."""
    played = [_long_context(tokens, scale) for tokens in p.LONG_CONTEXT_TOKENS]
    batched = rival("vllm", instances=4)
    carried = _carried(
        played,
        {
            OURS: papers_world(prefill=3, decode=1),
            "vllm, batched": batched,
            "vllm, one at a time": msgspec.structs.replace(batched, sequence_limit=1),
        },
    )
    labels = tuple(thousands(tokens) for tokens in p.LONG_CONTEXT_TOKENS)
    printed = tuple(paper.LONG_CONTEXT_GAIN[tokens] for tokens in p.LONG_CONTEXT_TOKENS)
    assumptions = (
        "vLLM may batch or, as the paper says it does to keep its SLO, take requests one by one: "
        "the better of the two counts",
        "half of each prompt is one of 20 documents; vLLM reuses nothing",
        BY_FAST,
    )
    axis = ("prompt, tokens", labels, printed)
    return _result("arxiv-fig12", axis, played, carried, assumptions)


def _long_context(tokens: int, scale: Scale) -> Workload:
    shape = fixed_shape(
        tokens, p.LONG_CONTEXT_OUTPUT_TOKENS, cache_ratio=p.LONG_CONTEXT_CACHE_RATIO
    )
    # Any rate does, since the search is for one; this one begins it near the answer.
    rate_per_s = 4_096 / tokens
    return drawn(
        msgspec.structs.replace(shape, requests=p.LONG_CONTEXT_REQUESTS, rate_per_s=rate_per_s),
        scale,
    )


def _result(
    item: str,
    axis: tuple[str, tuple[str, ...], tuple[float | None, ...]],
    played: Sequence[Workload],
    carried: Carried,
    assumptions: tuple[str, ...],
) -> Result:
    """Args: axis: its name, the name of each workload, and the gain that the paper prints there."""
    x_label, names, printed = axis
    gains, by_fast = _gains(carried.per_token), _gains(carried.longest)
    rows = [
        row(f"{name}, gain", theirs, gain)
        for name, theirs, gain in zip(names, printed, gains, strict=True)
    ]
    rows += [
        row(f"{name}, gain by FAST's TBT", None, gain)
        for name, gain in zip(names, by_fast, strict=True)
    ]
    rows += [
        row(f"{name}, {system}, requests/s", None, values[index])
        for index, name in enumerate(names)
        for system, values in carried.per_token.items()
    ]
    report = Report(item, tuple(rows), described(list(played)), DEFINITION, assumptions)
    gained = (
        Curve("paper", names, printed, "paper", is_paper=True),
        Curve("ours", names, tuple(gains), "ours"),
    )
    rates = tuple(
        Curve(system, names, tuple(values)) for system, values in carried.per_token.items()
    )
    panels = (
        Panel("Gain of [3P+1D]", x_label, "gain (1 = +100 %)", gained, bars=True),
        Panel("Capacity within SLO, ours", x_label, "requests/s", rates, bars=True),
    )
    return Result(report, panels)
