from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from snowskin.engine.attention import Span
from snowskin.engine.kv import SequenceKv
from snowskin.engine.model import Model, inspect_model
from snowskin.engine.support import SUPPORTED
from tests.engine import tiny

torch.set_num_threads(1)

ARCHITECTURES = [*tiny.SUPPORTED, *tiny.ALSO_SUPPORTED]


def test_every_supported_architecture_is_tested_here() -> None:
    assert set(ARCHITECTURES) == SUPPORTED


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    also = {name: tiny.build(name, root) for name in tiny.ALSO_SUPPORTED}
    return tiny.build_all(root) | also


def load(model_dir: Path) -> Model:
    return Model.load(inspect_model(model_dir, dtype="fp32", device="cpu"))


def oracle(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def oracle_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def new_kv(model: Model, tokens: int) -> SequenceKv:
    return SequenceKv(
        model.kv_shape, device=model.device, capacity_tokens=tokens, limit_tokens=1024
    )


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    kv = new_kv(model, len(prompt) + count)
    logits = model.forward(prompt, [Span(kv, 0, len(prompt))], logit_rows=[len(prompt) - 1])
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        logits = model.forward(tokens[-1:], [Span(kv, kv.tokens, 1)], logit_rows=[0])
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_and_logits_are_those_of_transformers(
    name: str, models: dict[str, Path]
) -> None:
    model, reference = load(models[name]), oracle(models[name])
    prompt = tiny.prompt_tokens(70, seed=3)
    kv = new_kv(model, len(prompt))
    ours = model.forward(prompt, [Span(kv, 0, 70)], logit_rows=range(70))
    torch.testing.assert_close(ours, oracle_logits(reference, prompt), atol=1e-4, rtol=0)

    generated = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 70, dtype=torch.long),
        max_new_tokens=24,
        eos_token_id=[-1],
        do_sample=False,
    )[0, 70:].tolist()
    assert greedy(model, prompt, 24) == generated


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_prompt_in_chunks_beside_others_gives_the_logits_of_one_alone(
    name: str, models: dict[str, Path]
) -> None:
    model, reference = load(models[name]), oracle(models[name])
    prompts = [tiny.prompt_tokens(count, seed=count) for count in (300, 1, 33)]
    kvs = [new_kv(model, len(prompt)) for prompt in prompts]
    long, one, short = prompts

    model.forward(long[:32] + short[:7], [Span(kvs[0], 0, 32), Span(kvs[2], 0, 7)], logit_rows=[])
    logits = model.forward(
        long[32:] + one + short[7:],
        [Span(kvs[0], 32, 268), Span(kvs[1], 0, 1), Span(kvs[2], 7, 26)],
        logit_rows=[267, 268, 294],
    )
    expected = torch.stack([oracle_logits(reference, prompt)[-1] for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)

    step = [Span(kv, kv.tokens, 1) for kv in kvs]
    for kv in kvs:
        kv.reserve(kv.tokens + 1)
    logits = model.forward([5, 6, 7], step, logit_rows=[0, 1, 2])
    longer = [[*prompt, token] for prompt, token in zip(prompts, (5, 6, 7), strict=True)]
    expected = torch.stack([oracle_logits(reference, prompt)[-1] for prompt in longer])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_bf16_stays_near_fp32(models: dict[str, Path]) -> None:
    prompt = tiny.prompt_tokens(300, seed=8)
    exact = oracle_logits(oracle(models["llama"]), prompt)
    model = Model.load(inspect_model(models["llama"], dtype="bf16", device="cpu"))
    kv = new_kv(model, 300)
    model.forward(prompt[:160], [Span(kv, 0, 160)], logit_rows=[])
    ours = model.forward(prompt[160:], [Span(kv, 160, 140)], logit_rows=range(140))
    assert (ours - exact[160:]).std() < 0.1 * exact.std()


def test_inspection_reports_shape_and_limits_without_weights(models: dict[str, Path]) -> None:
    info = inspect_model(models["qwen3"], dtype="bf16", device="cpu")
    assert (info.layers, info.query_heads, info.kv_heads, info.head_dim) == (3, 6, 2, 16)
    assert (info.vocab_size, info.max_context_tokens) == (331, 1024)
    assert info.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert len(info.stop_tokens) == 1
    assert info.revision == inspect_model(models["qwen3"], dtype="fp32").revision
    assert info.revision != inspect_model(models["qwen2"], dtype="fp32").revision
