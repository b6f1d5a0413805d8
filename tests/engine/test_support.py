from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from snowskin.engine.model import Model, inspect_model
from snowskin.terms.errors import InvalidInput, UnsupportedModel
from tests.engine import tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def editable(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "llama")


@pytest.mark.parametrize(
    ("name", "part"),
    [("gemma2", "soft-capping"), ("mistral_window", "sliding-window"), ("deepseek_v2", "MLA")],
)
def test_a_model_with_an_unsupported_part_is_refused_by_its_name(
    name: str, part: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=part):
        inspect_model(tiny.build_config_only(name, tmp_path))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "t5"}, "cross attention"),
        ({"model_type": "mamba2"}, "state-space"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "starship"}, "'starship' is not known"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "NTK"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"attn_logit_softcapping": 50.0}, "soft-capping"),
    ],
)
def test_a_field_of_the_configuration_can_make_a_model_refused(
    changes: dict[str, Any], part: str, editable: Path
) -> None:
    tiny.edit_config(editable, **changes)
    with pytest.raises(UnsupportedModel, match=part):
        inspect_model(editable)


def test_cross_attention_of_gpt2_is_refused(tmp_path: Path) -> None:
    model_dir = tiny.build_config_only("gpt2", tmp_path)
    tiny.edit_config(model_dir, add_cross_attention=True)
    with pytest.raises(UnsupportedModel, match="cross attention"):
        inspect_model(model_dir)


@pytest.mark.parametrize("window", [1024, 4096, None])
def test_a_window_that_no_sequence_can_outgrow_is_no_obstacle(
    window: int | None, tmp_path: Path
) -> None:
    model_dir = tiny.build("mistral", tmp_path)
    tiny.edit_config(model_dir, sliding_window=window)
    assert inspect_model(model_dir).max_context_tokens == 1024


def test_a_window_on_some_layers_is_refused_where_it_is_in_effect(tmp_path: Path) -> None:
    model_dir = tiny.build_config_only("qwen2", tmp_path)
    changes = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    tiny.edit_config(model_dir, layer_types=None, **changes)
    with pytest.raises(UnsupportedModel, match=r"sliding-window attention \(64 tokens"):
        inspect_model(model_dir)


def test_longrope_is_served_up_to_its_first_training_length(tmp_path: Path) -> None:
    model_dir = tiny.build("phi3", tmp_path)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 256,
    }
    tiny.edit_config(model_dir, rope_parameters=rope, original_max_position_embeddings=256)
    assert inspect_model(model_dir).max_context_tokens == 256


def test_what_is_wrong_with_a_folder_is_said_clearly(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not exist"):
        inspect_model(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        inspect_model(tmp_path)
    with pytest.raises(InvalidInput, match="no weights"):
        inspect_model(tiny.build_config_only("llama", tmp_path))
    with pytest.raises(InvalidInput, match="dtype 'fp8' is not one of auto, fp32, bf16"):
        inspect_model(llama, dtype="fp8")
    with pytest.raises(InvalidInput, match="device 'tpu' is not one of"):
        inspect_model(llama, device="tpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidInput, match="is not JSON"):
        inspect_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidInput, match="no model_type"):
        inspect_model(tmp_path)


def test_weights_that_lack_a_tensor_are_not_filled_with_noise(editable: Path) -> None:
    tiny.edit_config(editable, num_hidden_layers=4)
    with pytest.raises(InvalidInput, match=r"lack \d+ tensors"):
        Model.load(inspect_model(editable, dtype="fp32", device="cpu"))


def test_weights_of_another_shape_or_cut_short_are_refused(editable: Path) -> None:
    tiny.edit_config(editable, intermediate_size=96)
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        Model.load(inspect_model(editable, dtype="fp32", device="cpu"))
    (weights,) = editable.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        Model.load(inspect_model(editable, dtype="fp32", device="cpu"))
