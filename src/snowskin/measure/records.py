"""What is kept of each request, and the summary of many: the flat JSON that every report has."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from snowskin.measure.latency import mean, percentile
from snowskin.terms.ids import RequestId


class Ending(StrEnum):
    """How a request left: every request that came in has one, or is in flight."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Slo(msgspec.Struct, frozen=True):
    """Service level objectives of one request; None: no bound."""

    ttft_s: float | None = None
    tbt_s: float | None = None


class RequestRecord(msgspec.Struct, frozen=True):
    """One request, measured. Times in seconds of the clock that drove the system."""

    request: RequestId
    ending: Ending
    arrived_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV the prefill node reused."""
    ttft_s: float | None = None
    """None if there was no first token."""
    tbt_s: float | None = None
    """None if there were fewer than two tokens."""


def is_effective(record: RequestRecord, slo: Slo) -> bool:
    """Whether the request completed and met both SLOs (FAST '25 §5: an effective request).

    A request of one token has no TBT and meets that SLO.
    """
    if record.ending is not Ending.COMPLETED or record.ttft_s is None:
        return False
    if slo.ttft_s is not None and record.ttft_s > slo.ttft_s:
        return False
    return slo.tbt_s is None or record.tbt_s is None or record.tbt_s <= slo.tbt_s


class Summary(msgspec.Struct, frozen=True):
    """Many requests in numbers. Times in seconds, ratios from 0 to 1; None: nothing to measure."""

    requests: int
    """All that arrived and left; those in flight are not counted."""
    completed: int
    rejected: int
    failed: int
    cancelled: int
    effective_ratio: float | None
    """Effective requests / requests, so that a rejected one counts as not effective."""
    goodput_requests_per_s: float | None
    """Effective requests / span_s; None where no time passed."""
    ttft_mean_s: float | None
    """Over all requests that had a first token."""
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tbt_mean_s: float | None
    """Mean over the requests with two tokens or more of their TBT (longest 10 % of intervals)."""
    tbt_p50_s: float | None
    tbt_p90_s: float | None
    tbt_p99_s: float | None
    prompt_tokens: int
    """Over the requests that had a first token."""
    cached_tokens: int
    output_tokens: int
    """Over all requests."""
    hit_ratio: float | None
    """Token-weighted: cached_tokens / prompt_tokens."""
    prefill_busy_s: float
    """Time that prefill nodes spent computing, summed over the nodes."""
    transfer_bytes: int
    """KV bytes that went between nodes: fetched prefixes and prompts sent to decode nodes."""
    span_s: float
    """First arrival to last end, by the clock that drove the system."""
    wall_s: float
    """Real time that the run took; of a live run, the same as span_s or a little more."""


class Costs(msgspec.Struct, frozen=True):
    """What a run cost besides its requests; see the fields of the same names in Summary."""

    prefill_busy_s: float = 0.0
    transfer_bytes: int = 0
    wall_s: float = 0.0


def summarise(records: Sequence[RequestRecord], *, slo: Slo, costs: Costs) -> Summary:
    """The summary of all requests that left."""
    endings = dict.fromkeys(Ending, 0)
    for record in records:
        endings[record.ending] += 1
    begun = [record for record in records if record.ttft_s is not None]
    ttfts = [record.ttft_s for record in begun if record.ttft_s is not None]
    tbts = [record.tbt_s for record in begun if record.tbt_s is not None]
    ttft_mean_s, tbt_mean_s = mean(ttfts), mean(tbts)
    # Each percentile sorts anew, which takes little where all is in order. The means come first: a
    # sum of floats depends on their order.
    ttfts.sort()
    tbts.sort()
    span_s = _span_s(records)
    prompt_tokens = sum(record.prompt_tokens for record in begun)
    cached_tokens = sum(record.cached_tokens for record in begun)
    effective = sum(is_effective(record, slo) for record in records)
    return Summary(
        requests=len(records),
        completed=endings[Ending.COMPLETED],
        rejected=endings[Ending.REJECTED],
        failed=endings[Ending.FAILED],
        cancelled=endings[Ending.CANCELLED],
        effective_ratio=effective / len(records) if records else None,
        goodput_requests_per_s=effective / span_s if span_s else None,
        ttft_mean_s=ttft_mean_s,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p90_s=percentile(ttfts, 90),
        ttft_p99_s=percentile(ttfts, 99),
        tbt_mean_s=tbt_mean_s,
        tbt_p50_s=percentile(tbts, 50),
        tbt_p90_s=percentile(tbts, 90),
        tbt_p99_s=percentile(tbts, 99),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=sum(record.output_tokens for record in records),
        hit_ratio=cached_tokens / prompt_tokens if prompt_tokens else None,
        prefill_busy_s=costs.prefill_busy_s,
        transfer_bytes=costs.transfer_bytes,
        span_s=span_s,
        wall_s=costs.wall_s,
    )


def _span_s(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    last_s = max(record.finished_s for record in records)
    return last_s - min(record.arrived_s for record in records)
