from pathlib import Path

import msgspec
import pytest

from snowskin.cost.fit import PrefillSample, prefill_error
from snowskin.cost.profile import load_profile, profile_names, save_profile
from snowskin.terms.errors import InvalidInput

K = 1024
# FAST '25, Fig. 14: prompt tokens, prefill uncached, prefill 95 % cached, transfer, load; seconds.
FIGURE_14 = [
    (8 * K, 1.005, 0.134, 0.029, 0.029),
    (16 * K, 2.053, 0.227, 0.063, 0.053),
    (32 * K, 4.478, 0.406, 0.126, 0.106),
    (64 * K, 10.584, 0.882, 0.251, 0.213),
    (128 * K, 27.517, 2.328, 0.493, 0.420),
]
# Published A100 TP8 prefills of a 70B Llama, seconds.
A100_PREFILL = [(4, 0.424), (8, 0.832), (16, 1.788), (32, 4.057), (64, 10.087), (128, 28.190)]
H100_PREFILL = [(8, 0.344), (32, 1.536), (128, 9.309)]
# FAST '25, Fig. 12, 4×200 and 8×400 Gbps: bytes, seconds.
FIGURE_12 = {
    "a800_tp8": [(1e9, 0.0132), (10e9, 0.114), (40e9, 0.451), (100e9, 1.103)],
    "h100_tp8": [(10e9, 0.055), (40e9, 0.211), (100e9, 0.458)],
}


def figure_14_samples() -> list[PrefillSample]:
    return [
        sample
        for tokens, uncached_s, cached_s, *_ in FIGURE_14
        for sample in (
            PrefillSample(tokens, 0, uncached_s),
            PrefillSample(tokens, int(tokens * 0.95), cached_s),
        )
    ]


@pytest.mark.parametrize("sample", figure_14_samples())
def test_a800_prefill_lies_within_5_percent_of_figure_14(sample: PrefillSample):
    cost = load_profile("a800_tp8").prefill
    predicted_s = cost.seconds(sample.prompt_tokens, sample.reused_tokens)
    assert predicted_s == pytest.approx(sample.prefill_s, rel=0.05)


def test_a800_profile_states_its_own_worst_error():
    profile = load_profile("a800_tp8")
    error = prefill_error(profile.prefill, figure_14_samples())
    assert profile.prefill_error is not None
    assert error.worst_ratio == pytest.approx(profile.prefill_error.worst_ratio, abs=0.001)
    assert error.r_squared == pytest.approx(profile.prefill_error.r_squared, abs=1e-5)


@pytest.mark.parametrize(("tokens_k", "prefill_s"), A100_PREFILL)
def test_a100_prefill_lies_within_its_stated_error(tokens_k: int, prefill_s: float):
    profile = load_profile("a100_tp8")
    assert profile.prefill_error is not None
    assert profile.prefill.seconds(tokens_k * K) == pytest.approx(
        prefill_s, rel=profile.prefill_error.worst_ratio + 0.002
    )


@pytest.mark.parametrize(("tokens_k", "prefill_s"), H100_PREFILL)
def test_h100_prefill_lies_within_its_stated_error(tokens_k: int, prefill_s: float):
    profile = load_profile("h100_tp8")
    assert profile.prefill_error is not None
    assert profile.prefill.seconds(tokens_k * K) == pytest.approx(
        prefill_s, rel=profile.prefill_error.worst_ratio + 0.002
    )


@pytest.mark.parametrize(
    ("name", "transfer_bytes", "transfer_s"),
    [(name, *point) for name, points in FIGURE_12.items() for point in points],
)
def test_transfer_lies_within_10_percent_of_figure_12(
    name: str, transfer_bytes: float, transfer_s: float
):
    link = load_profile(name).transfer
    assert link.seconds(transfer_bytes) == pytest.approx(transfer_s, rel=0.1)


@pytest.mark.parametrize("point", FIGURE_14)
def test_a800_load_lies_within_10_percent_of_figure_14(point: tuple[float, ...]):
    profile = load_profile("a800_tp8")
    predicted_s = profile.load.seconds(profile.kv_bytes(int(point[0])))
    assert predicted_s == pytest.approx(point[4], rel=0.1)


@pytest.mark.parametrize("name", ["a100_tp8", "a800_tp8", "h100_tp8"])
def test_every_profile_has_a_source_and_the_papers_kv_size(name: str):
    profile = load_profile(name)
    assert name in profile_names()
    assert profile.name == name
    assert profile.source
    assert profile.kv_bytes_per_token == 327_680


def test_a_saved_profile_is_loaded_as_it_was(tmp_path: Path):
    path = tmp_path / "mine.json"
    profile = msgspec.structs.replace(load_profile("h100_tp8"), name="mine")
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert [file.name for file in tmp_path.iterdir()] == ["mine.json"]


def test_an_unknown_profile_is_refused_with_the_known_ones():
    with pytest.raises(InvalidInput, match=r"'b200'; known are a100_tp8, a800_tp8, h100_tp8"):
        load_profile("b200")


@pytest.mark.parametrize("text", ["", "{}", '{"name": 3}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="is no cost profile"):
        load_profile(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(InvalidInput, match="there is no file"):
        load_profile(tmp_path / "none.json")
