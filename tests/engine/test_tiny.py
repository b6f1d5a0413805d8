import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine import tiny


def _digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


@pytest.mark.parametrize("name", [*tiny.SUPPORTED, *tiny.REFUSED])
def test_same_seed_builds_the_same_bytes_and_another_seed_builds_another_model(
    name: str, tmp_path: Path
) -> None:
    first = _digests(tiny.build(name, tmp_path / "first"))
    again = _digests(tiny.build(name, tmp_path / "again"))
    other = _digests(tiny.build(name, tmp_path / "other", seed=1))

    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]


@pytest.mark.parametrize("name", tiny.SUPPORTED)
def test_an_early_token_of_the_prompt_changes_the_last_logits(name: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.build(name, tmp_path), dtype=torch.float32)
    prompt = tiny.prompt_tokens(64)
    changed = [(prompt[0] + 1) % 256, *prompt[1:]]

    with torch.inference_mode():
        logits = model(torch.tensor([prompt, changed])).logits[:, -1]

    assert (logits[0] - logits[1]).abs().max() > 0.05


def test_the_tokenizer_takes_any_text_there_and_back(tmp_path: Path) -> None:
    directory = tiny.build_config_only("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "The thing and\n  été, 你好 🙂"

    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "the"}]
    assert (
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        == "<|user|>the<|end|><|assistant|>"
    )
