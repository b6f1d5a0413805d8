"""Beyond the papers: what the lead over coupled serving owes to network, memory and block size."""

from __future__ import annotations

import msgspec

from snowskin.reproduce import parameters as p
from snowskin.reproduce.pools import papers_world, rival
from snowskin.reproduce.report import Curve, Panel, Report, Result, Row, row
from snowskin.reproduce.sweeps import scaled_link
from snowskin.reproduce.workloads import Scale, described, profile, workload
from snowskin.sim.config import WorldConfig
from snowskin.sim.coupled import simulate_coupled
from snowskin.sim.simulate import simulate
from snowskin.trace.records import Trace, trace_of
from snowskin.trace.shapes import SHAPES
from snowskin.trace.synthesise import synthesise


def lead_over_coupled(scale: Scale) -> Result:
    """Prefill time of coupled instances with prefix caching over Mooncake's, by three settings."""
    played = workload("synthetic", scale)
    costs = profile()
    coupled_s = _coupled_s(played.trace)
    bandwidth: list[float] = []
    for gbps in p.LEAD_GBPS:
        slowed = msgspec.structs.replace(costs, transfer=scaled_link(costs.transfer, gbps))
        config = msgspec.structs.replace(papers_world(), profile=slowed)
        bandwidth.append(coupled_s / _mooncake_s(played.trace, config))
    memory = [
        coupled_s
        / _mooncake_s(
            played.trace,
            msgspec.structs.replace(papers_world(), dram_bytes=gigabytes * 1e9),
        )
        for gigabytes in p.LEAD_DRAM_GB
    ]
    blocks: list[float] = []
    for block_tokens in p.LEAD_BLOCK_TOKENS:
        trace = _reblocked(block_tokens, scale)
        blocks.append(_coupled_s(trace) / _mooncake_s(trace, papers_world()))
    parts = (
        ("Gbps", "bandwidth, Gbps", p.LEAD_GBPS, bandwidth),
        ("GB of DRAM", "DRAM a node, GB", p.LEAD_DRAM_GB, memory),
        ("tokens a block", "block, tokens", p.LEAD_BLOCK_TOKENS, blocks),
    )
    rows: list[Row] = []
    panels: list[Panel] = []
    for unit, label, values, leads in parts:
        rows += [
            row(f"{value:g} {unit}, lead", None, lead)
            for value, lead in zip(values, leads, strict=True)
        ]
        curve = Curve("lead", tuple(float(value) for value in values), tuple(leads))
        title = f"Lead by {label.partition(',')[0]}"
        panels.append(Panel(title, label, "times", (curve,), log_x=True, line_y=1.0))
    report = Report(
        "beyond-lead",
        tuple(rows),
        described([played]),
        "lead: prefill GPU time of 16 coupled instances with prefix caching / that of 8P+8D, at "
        "the workload's own speed",
        (
            "one setting is changed at a time; the others are those of every item",
            "coupled instances cache in device memory, which DRAM and network do not change",
        ),
    )
    return Result(report, tuple(panels))


def _mooncake_s(trace: Trace, config: WorldConfig) -> float:
    busy_s: float = simulate(trace, config).summary["prefill_busy_s"]
    return busy_s


def _coupled_s(trace: Trace) -> float:
    busy_s: float = simulate_coupled(trace, rival("vllm-prefix-caching"))[0]["prefill_busy_s"]
    return busy_s


def _reblocked(block_tokens: int, scale: Scale) -> Trace:
    requests = synthesise(SHAPES["synthetic"], seed=p.SEED, block_tokens=block_tokens)
    trace = trace_of("synthetic", requests, block_tokens=block_tokens)
    return trace if scale.requests is None else trace.head(scale.requests)
