import pytest

from snowskin.cost.costs import DecodeCost, LinkCost, PrefillCost
from snowskin.terms.errors import InvalidInput


def test_prefill_cost_is_the_stated_formula():
    cost = PrefillCost(base_s=1.0, token_s=0.1, token_pair_s=0.01, reused_token_s=0.001)
    assert cost.seconds(10, 4) == pytest.approx(1.0 + 0.1 * 6 + 0.01 * (100 - 16) + 0.001 * 4)


def test_prefill_of_a_reused_prefix_is_cheaper_than_of_the_whole_prompt():
    cost = PrefillCost(0.0665, 110.05e-6, 0.738e-9, 2.62e-6)
    assert cost.seconds(8192, 4096) < cost.seconds(8192)


def test_decode_cost_is_the_stated_formula():
    assert DecodeCost(1.0, 0.1, 0.01).step_s(3, 50) == pytest.approx(1.0 + 0.3 + 0.5)


def test_link_cost_adds_latency_once_and_nothing_takes_no_time():
    link = LinkCost(latency_s=0.5, bytes_per_s=100.0)
    assert link.seconds(200) == 2.5
    assert link.seconds(0) == 0.0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_coefficient_that_is_no_time_is_refused_with_its_value(value: float):
    with pytest.raises(InvalidInput, match=f"token_s.*{value!r}"):
        PrefillCost(0.0, value, 0.0)


def test_a_link_without_speed_is_refused():
    with pytest.raises(InvalidInput, match="bytes_per_s must be greater than 0"):
        LinkCost(0.0, 0.0)
