"""What a simulation gives: one record for each request, and the flat summary."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from snowskin.measure.latency import tail_count
from snowskin.measure.records import Costs, Ending, RequestRecord, Slo, summarise
from snowskin.sim.decode import DecodeBatch
from snowskin.sim.job import Job, Stay
from snowskin.sim.nodes import DecodeNode, PrefillNode
from snowskin.sim.world import World
from snowskin.trace.records import Floats, Trace

DEFINITIONS = {
    "requests": "all that arrived; = completed + rejected + failed + cancelled",
    "effective_ratio": "completed within both SLOs / requests",
    "goodput_requests_per_s": "effective requests / span_s",
    "ttft": "arrival to first token, over all requests that had one (rejected ones do not count)",
    "tbt": "of one request: mean of its longest 10 % of intervals between tokens (FAST '25); the "
    "first interval begins with the first token, so it holds the KV transfer",
    "hit_ratio": "prompt tokens whose KV prefill reused / prompt tokens, over the same requests",
    "prefill_busy_s": "time that prefill nodes computed, summed over nodes",
    "decode_busy_s": "time that decode nodes spent in steps, summed over nodes",
    "transfer_bytes": "KV bytes between nodes: fetched prefixes and prompts sent to decode nodes",
    "span_s": "simulated time from the first arrival to the last end",
    "wall_s": "the same as span_s: the wall clock of the simulated cluster. What the simulator "
    "itself took is printed, and never written, so that one seed gives one file",
}

FROM_DECODE = {
    "ttft": "arrival to the first token, which the decode node sends when it holds the KV on its "
    "device, over all requests that had one (rejected ones do not count)",
    "tbt": "of one request: mean of its longest 10 % of intervals between tokens (FAST '25)",
}
"""What differs where ``WorldConfig.first_token_from_decode`` holds."""


def request_records(jobs: list[Job], *, from_decode: bool = False) -> list[RequestRecord]:
    """One record for each request that left, in order of arrival.

    Args:
        from_decode: the first token is sent by the decode node, when it is ready to go on.
    """
    steps: dict[int, Floats] = {}
    records: list[RequestRecord] = []
    for job in jobs:
        assert job.ending is not None
        assert job.finished_s is not None
        first_s, stay = job.first_token_s, job.stay
        waited_s = stay.waited_s if stay is not None else 0.0
        if from_decode and first_s is not None and stay is not None:
            first_s, waited_s = first_s + waited_s + stay.stalled_s, -stay.stalled_s
        records.append(
            RequestRecord(
                job.request,
                job.ending,
                job.arrived_s,
                job.finished_s,
                job.prompt_tokens,
                job.output_tokens if job.ending is Ending.COMPLETED else 0,
                job.reused_tokens if first_s is not None else 0,
                first_s - job.arrived_s if first_s is not None else None,
                _tbt_s(stay, waited_s, steps) if stay is not None else None,
            )
        )
    return records


def _tbt_s(stay: Stay, waited_s: float, steps: dict[int, Floats]) -> float:
    """Mean of the longest 10 % of intervals, as ``measure`` defines it, from the batch's steps."""
    durations = steps.get(id(stay.batch))
    if durations is None:
        durations = steps[id(stay.batch)] = stay.batch.step_durations()
    intervals_s = durations[stay.first_step : stay.end_step].copy()
    intervals_s[0] += waited_s
    count = tail_count(len(intervals_s))
    intervals_s.partition(len(intervals_s) - count)
    # As ``sum`` does, at half its cost for so few.
    return float(np.add.reduce(intervals_s[len(intervals_s) - count :])) / count


def summary_of(world: World, records: list[RequestRecord]) -> dict[str, Any]:
    """The flat report: measures, what they cost, and the settings they belong to."""
    config = world.config
    nodes = [*world.gone, *world.nodes.values()]
    prefill = [node for node in nodes if isinstance(node, PrefillNode)]
    batches = [node.batch for node in nodes if isinstance(node, DecodeNode)]
    pools = [node.memory.pool.stat() for node in nodes]
    costs = Costs(
        prefill_busy_s=sum(node.busy_s for node in prefill),
        transfer_bytes=round(world.network.moved_bytes),
    )
    slo = Slo(ttft_s=config.ttft_slo_s, tbt_s=config.tbt_slo_s)
    return flat_summary(world.trace, records, slo, costs, batches) | {
        "transfers": world.network.flow_count,
        "fetches": world.journey.fetch_count,
        "fetched_bytes": world.journey.fetched_bytes,
        "committed_blocks": sum(pool.committed_total for pool in pools),
        "evicted_blocks": sum(pool.evicted_total for pool in pools),
        "system": "mooncake",
        "hardware": config.profile.name,
        "prefill": config.prefill_nodes,
        "decode": config.decode_nodes,
        "policy": config.policy,
        "admission": config.admission,
        "ttft_slo_s": config.ttft_slo_s,
        "tbt_slo_s": config.tbt_slo_s,
        "blocks_per_node": world.block_count,
        "eviction": config.eviction,
        "faults": len(config.faults),
        "seed": config.seed,
        "definitions": DEFINITIONS | (FROM_DECODE if config.first_token_from_decode else {}),
    }


def flat_summary(
    trace: Trace,
    records: list[RequestRecord],
    slo: Slo,
    costs: Costs,
    batches: list[DecodeBatch[Any]],
) -> dict[str, Any]:
    """The measures that every system has."""
    measures: dict[str, Any] = msgspec.to_builtins(summarise(records, slo=slo, costs=costs))
    measures["wall_s"] = measures["span_s"]
    return measures | {
        "decode_busy_s": sum(batch.busy_s for batch in batches),
        "mean_batch": _mean_batch(records, batches),
        "trace": trace.name,
        "sharing_known": trace.sharing_known,
        "block_tokens": trace.block_tokens,
    }


def _mean_batch(records: list[RequestRecord], batches: list[DecodeBatch[Any]]) -> float | None:
    """Sequences in the batch of a step, on average over steps."""
    steps = sum(batch.step_count for batch in batches)
    decoded = sum(max(0, record.output_tokens - 1) for record in records)
    return decoded / steps if steps else None
