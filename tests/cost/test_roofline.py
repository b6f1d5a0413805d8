import pytest

from snowskin.cost.profile import load_profile
from snowskin.cost.roofline import HARDWARE, roofline
from snowskin.cost.shapes import SHAPES


@pytest.mark.parametrize(
    ("name", "kv_bytes_per_token", "billions"),
    [
        ("llama2-70b", 327_680, 69.0),
        ("llama3-70b", 327_680, 70.6),
        ("llama3-8b", 131_072, 8.03),
        ("smollm2", 23_040, 0.1345),
    ],
)
def test_shapes_have_the_published_sizes(name: str, kv_bytes_per_token: int, billions: float):
    shape = SHAPES[name]
    assert shape.kv_bytes_per_token == kv_bytes_per_token
    assert shape.weight_count / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("prompt_tokens", [4096, 8192, 32768, 131072])
def test_roofline_prefill_lies_within_a_third_of_the_measured_a100(prompt_tokens: int):
    measured = load_profile("a100_tp8").prefill.seconds(prompt_tokens)
    predicted = roofline(SHAPES["llama2-70b"], HARDWARE["a800_tp8"]).prefill.seconds(prompt_tokens)
    assert predicted == pytest.approx(measured, rel=1 / 3)


@pytest.mark.parametrize(("sequences", "context"), [(1, 4096), (32, 4096), (8, 32768), (32, 32768)])
def test_roofline_decode_lies_within_a_third_of_the_measured_a100(sequences: int, context: int):
    measured = load_profile("a100_tp8").decode.step_s(sequences, sequences * context)
    predicted = roofline(SHAPES["llama2-70b"], HARDWARE["a800_tp8"]).decode
    assert predicted.step_s(sequences, sequences * context) == pytest.approx(measured, rel=1 / 3)


def test_a_smaller_model_is_faster_in_every_respect():
    large = roofline(SHAPES["llama3-70b"], HARDWARE["a800_tp8"])
    small = roofline(SHAPES["llama3-8b"], HARDWARE["a800_tp8"])
    assert small.prefill.seconds(8192) < large.prefill.seconds(8192)
    assert small.decode.step_s(8, 65536) < large.decode.step_s(8, 65536)
    assert small.kv_bytes(1) < large.kv_bytes(1)


def test_prefill_arithmetic_of_a_suffix_and_its_prefix_make_up_the_whole():
    shape = SHAPES["llama3-8b"]
    head = 2.0 * shape.vocabulary * shape.hidden
    whole = shape.prefill_flops(8192)
    parts = shape.prefill_flops(4096) + shape.prefill_flops(8192, 4096)
    assert parts == pytest.approx(whole + head)
