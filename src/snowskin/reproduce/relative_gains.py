"""Items of capacity under a relative SLO: arXiv Figures 11 and 12."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from snowskin.reproduce import paper
from snowskin.reproduce import parameters as p
from snowskin.reproduce.capacity import SpeedLadder
from snowskin.reproduce.costs import thousands
from snowskin.reproduce.gains import Config, gain_of, summary_of_run
from snowskin.reproduce.pools import papers_world, rival
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.workloads import Scale, Workload, described, drawn, profile
from snowskin.trace.records import Trace
from snowskin.trace.shapes import SHAPES, fixed_shape

DEFINITION = (
    "capacity: the highest rate at which the 90th percentiles of TTFT and TBT (longest 10 %) are "
    "at most 10 and 5 times those of a lone request of the workload's mean length; [3P+1D] "
    "against 4 vLLM instances without prefix cache; gain: 1 means +100 %"
)
OURS = "mooncake [3P+1D]"


def percentile_scores(
    trace: Trace, config: Config, ttft_s: float, tbt_s: float, speed: float
) -> list[float]:
    """How far inside both bounds the 90th percentiles are, at one replay speed: 1 is the bound."""
    summary = summary_of_run(trace.sped_up(speed), config)
    tbt_p90_s = summary["tbt_p90_s"]
    tbt_score = tbt_s / tbt_p90_s if tbt_p90_s else float("inf")
    return [min(ttft_s / summary["ttft_p90_s"], tbt_score)]


def relative_capacity(played: Workload, config: Config) -> float | None:
    """Requests/s that a cluster carries within the arXiv paper's relative SLO."""
    tokens = round(float(played.trace.prompt_tokens.mean()))
    costs = profile()
    ttft_s = p.RELATIVE_SLO[0] * costs.prefill.seconds(tokens)
    tbt_s = p.RELATIVE_SLO[1] * costs.decode.step_s(1, tokens)
    ladder = SpeedLadder(partial(percentile_scores, played.trace, config, ttft_s, tbt_s))
    speed = ladder.capacity(0, target=1.0)
    return speed * played.rate_per_s() if speed is not None else None


Capacities = dict[str, list[float | None]]


def _capacities(played: Sequence[Workload], configs: dict[str, Config]) -> Capacities:
    return {
        system: [relative_capacity(each, config) for each in played]
        for system, config in configs.items()
    }


def _gains(capacities: Capacities, over: str) -> list[float | None]:
    return [
        gain_of(ours, theirs)
        for ours, theirs in zip(capacities[OURS], capacities[over], strict=True)
    ]


def dataset_gain(scale: Scale) -> Result:
    """arXiv Figure 11: [3P+1D] against four vLLM instances on two datasets."""
    documents = msgspec.structs.replace(SHAPES["documents"], requests=p.DATASET_REQUESTS)
    names = tuple(paper.DATASET_GAIN)
    played = [drawn(p.SUMMARIES, scale), drawn(documents, scale)]
    capacities = _capacities(
        played,
        {
            OURS: papers_world(prefill=3, decode=1),
            "mooncake [2P+2D]": papers_world(prefill=2, decode=2),
            "vllm": rival("vllm", instances=4),
        },
    )
    gains = _gains(capacities, "vllm")
    printed = tuple(paper.DATASET_GAIN.values())
    rows = [
        row(f"{name}, gain", theirs, gain)
        for name, theirs, gain in zip(names, printed, gains, strict=True)
    ]
    report = Report(
        "arxiv-fig11",
        (*rows, *_capacity_rows(names, capacities)),
        described(played),
        DEFINITION,
        ("lengths are drawn with the datasets' means; their spread is assumed",),
    )
    return Result(report, _panels("dataset", names, printed, gains, capacities))


def long_context_gain(scale: Scale) -> Result:
    """arXiv Figure 12: [3P+1D] against four vLLM instances by prompt length."""
    played = [_long_context(tokens, scale) for tokens in p.LONG_CONTEXT_TOKENS]
    single, batched = "vllm, one at a time", "vllm, batched"
    capacities = _capacities(
        played,
        {
            OURS: papers_world(prefill=3, decode=1),
            single: msgspec.structs.replace(rival("vllm", instances=4), sequence_limit=1),
            batched: rival("vllm", instances=4),
        },
    )
    labels = tuple(thousands(tokens) for tokens in p.LONG_CONTEXT_TOKENS)
    printed = tuple(paper.LONG_CONTEXT_GAIN[tokens] for tokens in p.LONG_CONTEXT_TOKENS)
    gains = _gains(capacities, single)
    rows = [
        row(f"{label}, gain over {single}", theirs, gain)
        for label, theirs, gain in zip(labels, printed, gains, strict=True)
    ]
    rows += [
        row(f"{label}, gain over {batched}", None, gain)
        for label, gain in zip(labels, _gains(capacities, batched), strict=True)
    ]
    report = Report(
        "arxiv-fig12",
        (*rows, *_capacity_rows(labels, capacities)),
        described(played),
        DEFINITION,
        (
            "to keep its SLO with long prompts, vLLM processes requests one by one, as the paper "
            "says; the batched one is given beside it",
            "half of each prompt is one of 20 documents; vLLM reuses nothing",
        ),
    )
    return Result(report, _panels("prompt, tokens", labels, printed, gains, capacities))


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


def _capacity_rows(labels: Sequence[str], capacities: Capacities) -> list[Row]:
    return [
        row(f"{label}, {system}, requests/s", None, values[index])
        for index, label in enumerate(labels)
        for system, values in capacities.items()
    ]


def _panels(
    x_label: str,
    labels: tuple[str, ...],
    printed: tuple[float | None, ...],
    gains: Sequence[float | None],
    capacities: Capacities,
) -> tuple[Panel, Panel]:
    gained = (
        Curve("paper", labels, printed, "paper", is_paper=True),
        Curve("ours", labels, tuple(gains), "ours"),
    )
    carried = tuple(Curve(system, labels, tuple(values)) for system, values in capacities.items())
    return (
        Panel("Gain of [3P+1D]", x_label, "gain (1 = +100 %)", gained, bars=True),
        Panel("Capacity within SLO, ours", x_label, "requests/s", carried, bars=True),
    )
