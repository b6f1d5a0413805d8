import msgspec
import pytest

from snowskin.measure.records import (
    Costs,
    Ending,
    RequestRecord,
    Slo,
    is_effective,
    summarise,
)
from snowskin.terms.ids import RequestId


def record(**changes: object) -> RequestRecord:
    plain = RequestRecord(
        request=RequestId("req-1"),
        ending=Ending.COMPLETED,
        arrived_s=0.0,
        finished_s=4.0,
        prompt_tokens=100,
        output_tokens=10,
        cached_tokens=60,
        ttft_s=1.0,
        tbt_s=0.1,
    )
    return msgspec.structs.replace(plain, **changes)


SLO = Slo(ttft_s=1.0, tbt_s=0.1)


def test_a_request_on_both_bounds_is_effective() -> None:
    assert is_effective(record(), SLO)


@pytest.mark.parametrize(
    "changes",
    [{"ttft_s": 1.1}, {"tbt_s": 0.11}, {"ending": Ending.CANCELLED}, {"ttft_s": None}],
)
def test_a_request_that_misses_anything_is_not_effective(changes: dict[str, object]) -> None:
    assert not is_effective(record(**changes), SLO)


def test_a_request_of_one_token_breaks_no_tbt_bound() -> None:
    assert is_effective(record(tbt_s=None), SLO)


def test_without_bounds_every_completed_request_is_effective() -> None:
    assert is_effective(record(ttft_s=1e9, tbt_s=1e9), Slo())


def test_goodput_counts_effective_requests_over_the_span() -> None:
    records = [record(), record(arrived_s=2.0, finished_s=8.0), record(ttft_s=9.0)]
    assert summarise(records, slo=SLO, costs=Costs()).goodput_requests_per_s == 2 / 8
    assert summarise([], slo=SLO, costs=Costs()).goodput_requests_per_s is None


def test_the_summary_counts_every_request_once_and_measures_what_began() -> None:
    rejected = record(
        ending=Ending.REJECTED, output_tokens=0, cached_tokens=0, ttft_s=None, tbt_s=None
    )
    failed = record(ending=Ending.FAILED, ttft_s=3.0, tbt_s=None, cached_tokens=0, output_tokens=1)
    summary = summarise(
        [record(), rejected, failed],
        slo=SLO,
        costs=Costs(prefill_busy_s=2.0, transfer_bytes=7, wall_s=5.0),
    )
    assert (summary.requests, summary.completed, summary.rejected) == (3, 1, 1)
    assert (summary.failed, summary.cancelled) == (1, 0)
    assert summary.effective_ratio == 1 / 3
    assert summary.ttft_mean_s == 2.0
    assert summary.ttft_p90_s == pytest.approx(2.8)
    assert (summary.tbt_mean_s, summary.tbt_p90_s) == (0.1, 0.1)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (200, 60, 11)
    assert summary.hit_ratio == 0.3
    assert (summary.prefill_busy_s, summary.transfer_bytes, summary.wall_s) == (2.0, 7, 5.0)


def test_the_json_of_a_summary_is_flat_and_has_the_stable_names() -> None:
    flat = msgspec.to_builtins(summarise([], slo=Slo(), costs=Costs()))
    stable = (
        "requests completed rejected effective_ratio ttft_mean_s ttft_p90_s tbt_mean_s tbt_p90_s "
        "hit_ratio prefill_busy_s transfer_bytes wall_s"
    )
    assert set(stable.split()) <= set(flat)
    assert not any(isinstance(value, dict | list) for value in flat.values())
