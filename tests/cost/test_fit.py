import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.cost.costs import DecodeCost, PrefillCost
from snowskin.cost.fit import DecodeSample, PrefillSample, decode_error, fit_decode, fit_prefill
from snowskin.terms.errors import InvalidInput

LENGTHS = [(512, 0), (1024, 512), (4096, 0), (8192, 4096), (32768, 0), (65536, 62000), (131072, 0)]
coefficient = st.one_of(st.just(0.0), st.floats(1e-12, 1.0))


@given(st.builds(PrefillCost, st.floats(1e-4, 0.1), coefficient, coefficient, coefficient))
def test_samples_of_a_cost_are_fitted_by_it(cost: PrefillCost):
    samples = [PrefillSample(n, p, cost.seconds(n, p)) for n, p in LENGTHS]
    _, error = fit_prefill(samples)
    assert error.worst_ratio < 1e-3


def test_the_fit_finds_the_coefficients_again():
    cost = PrefillCost(0.0665, 110.05e-6, 0.738e-9, 2.62e-6)
    fitted, error = fit_prefill([PrefillSample(n, p, cost.seconds(n, p)) for n, p in LENGTHS])
    assert fitted.base_s == pytest.approx(cost.base_s)
    assert fitted.token_s == pytest.approx(cost.token_s)
    assert fitted.token_pair_s == pytest.approx(cost.token_pair_s)
    assert fitted.reused_token_s == pytest.approx(cost.reused_token_s)
    assert error.samples == len(LENGTHS)
    assert error.r_squared == pytest.approx(1.0)


@given(
    st.lists(
        st.builds(
            PrefillSample, st.integers(1000, 100_000), st.integers(0, 999), st.floats(1e-3, 50)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_samples_make_a_coefficient_negative(samples: list[PrefillSample]):
    cost, error = fit_prefill(samples)
    assert min(cost.base_s, cost.token_s, cost.token_pair_s, cost.reused_token_s) >= 0
    assert error.samples == len(samples)


def test_the_decode_fit_states_its_own_worst_error():
    cost = DecodeCost(0.01, 2e-4, 3e-8)
    samples = [
        DecodeSample(b, b * 4096, cost.step_s(b, b * 4096) * (1.1 if b == 8 else 1.0))
        for b in (1, 2, 4, 8, 16, 32)
    ]
    samples += [DecodeSample(4, 4 * ctx, cost.step_s(4, 4 * ctx)) for ctx in (1024, 32768)]
    fitted, error = fit_decode(samples)
    assert error == decode_error(fitted, samples)
    assert 0.01 < error.worst_ratio < 0.1


@pytest.mark.parametrize("samples", [[], [PrefillSample(100, 0, 0.0)]])
def test_a_fit_without_usable_samples_is_refused(samples: list[PrefillSample]):
    with pytest.raises(InvalidInput, match="at least one sample"):
        fit_prefill(samples)
