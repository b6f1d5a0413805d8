from typing import Any

import msgspec
import pytest

from snowskin.conductor.config import ConductorConfig
from snowskin.terms.errors import InvalidInput


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("policy", "fastest", "must be one of kvcache-centric, cache-aware, load-balance, random"),
        ("admission", "all", "must be one of none, baseline, early, predicted"),
        ("block_tokens", 0, "must be at least 1"),
        ("max_in_flight", 0, "must be at least 1"),
        ("max_placements", -3, "must be at least 1"),
        ("replica_limit", 0, "must be at least 1"),
        ("kvcache_balancing_threshold", 0.5, "must be at least 1"),
        ("kvcache_balancing_threshold", float("nan"), "must be at least 1"),
        ("correction_bound", 0.9, "must be at least 1"),
        ("retry_limit_s", 0.5, "must be at least 1"),
        ("ttft_slo_s", 0.0, "must be greater than 0"),
        ("tbt_slo_s", -1.0, "must be greater than 0"),
        ("lease_s", float("nan"), "must be greater than 0"),
        ("decode_s", 0, "must be greater than 0"),
        ("correction_weight", 1.5, "must lie in 0–1"),
        ("decode_weight", -0.1, "must lie in 0–1"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_itself(field: str, value: Any, complaint: str):
    with pytest.raises(InvalidInput) as refusal:
        ConductorConfig(**{field: value})
    assert refusal.value.parameter == field
    assert str(refusal.value) == f"{field} {complaint}, not {value!r}"


def test_an_unknown_field_is_refused():
    with pytest.raises(msgspec.ValidationError, match="ttft_slo_ms"):
        msgspec.convert({"ttft_slo_ms": 30}, ConductorConfig)


def test_the_defaults_are_the_papers_slos():
    config = ConductorConfig()
    assert (config.ttft_slo_s, config.tbt_slo_s) == (30.0, 0.1)
    assert (config.policy, config.admission) == ("kvcache-centric", "none")
