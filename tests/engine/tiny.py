"""Tiny random models of every supported architecture, and of some that must be refused.

``build(name, root, seed=0)`` saves one into ``root/name`` as a Hugging Face directory: fp32
safetensors, config, generation config and a real byte-level BPE tokenizer with a chat template.
The same arguments give the same bytes.

The weights are drawn much wider than a fresh model's: attention is sharp and logits are spread
over several units, so a token computed at the wrong position or with a missing block changes the
output instead of vanishing in near-uniform noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 331
"""Not a multiple of 8 or 16, so that kernels take their remainder paths too."""
END_TOKEN = "<|end|>"
MAX_CONTEXT_TOKENS = 1024

_MERGES = (
    "t h, Ġ t, Ġt h, Ġth e, i n, e r, a n, o n, Ġ a, r e, o r, a t, e n, i t, Ġ w, o u, Ġ s, Ġ o, "
    "Ġ c, n d, i s, e s, Ġ b, e d, Ġ f, in g, Ġo f, a r, Ġ m, Ġa nd, Ġt o, Ġ p, Ġ d, Ġ h, Ġ i, "
    "Ġi n, l l, o m, i c, l e, Ġ l, Ġ n, s t, Ġ m, Ġ e"
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT_TOKENS,
    "tie_word_embeddings": False,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_CONTEXT_TOKENS,
}
_GPT_NEOX: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_CONTEXT_TOKENS,
}
_GEMMA2 = {**_BASE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64}
_DEEPSEEK = {
    **_BASE,
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}

SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _BASE),
    "qwen2": ("Qwen2", _BASE),
    "qwen3": ("Qwen3", {**_BASE, "head_dim": 16}),
    "mistral": ("Mistral", {**_BASE, "sliding_window": None, "head_dim": 8}),
    "phi3": ("Phi3", {**_BASE, "sliding_window": None}),
    "granite": ("Granite", {**_BASE, "attention_multiplier": 0.3, "logits_scaling": 1.5}),
    "olmo2": ("Olmo2", _BASE),
    "smollm3": ("SmolLM3", {**_BASE, "tie_word_embeddings": True, "no_rope_layer_interval": 2}),
    "gpt2": ("GPT2", _GPT2),
    "gpt_neox": ("GPTNeoX", _GPT_NEOX),
}
"""Name → the transformers class prefix and its config. All but the last two share KV heads."""

_MOE: dict[str, Any] = {
    **_BASE,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_NARROW_HEADS = {**_BASE, "head_dim": 8}

ALSO_SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", _BASE),
    "cohere": ("Cohere", _BASE),
    "ernie4_5": ("Ernie4_5", _NARROW_HEADS),
    "gemma": ("Gemma", _NARROW_HEADS),
    "glm": ("Glm", _NARROW_HEADS),
    "glm4": ("Glm4", _NARROW_HEADS),
    "gpt_bigcode": ("GPTBigCode", _GPT2),
    "granitemoe": ("GraniteMoe", _MOE),
    "helium": ("Helium", _NARROW_HEADS),
    "hunyuan_v1_dense": ("HunYuanDenseV1", _NARROW_HEADS),
    "mixtral": ("Mixtral", {**_MOE, "sliding_window": None}),
    "olmo": ("Olmo", _BASE),
    "olmoe": ("Olmoe", _MOE),
    "phi": ("Phi", _BASE),
    "qwen2_moe": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "head_dim": 16}),
    "seed_oss": ("SeedOss", _NARROW_HEADS),
    "starcoder2": ("Starcoder2", {**_BASE, "sliding_window": None}),
}
"""Further architectures, tested by the engine alone."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", _GEMMA2),
    "mistral_window": ("Mistral", {**_BASE, "sliding_window": 64, "head_dim": 8}),
    "deepseek_v2": ("DeepseekV2", _DEEPSEEK),
}
"""Models with a part that the engine does not compute: soft-capping, sliding window, MLA."""


def build(name: str, root: Path, *, seed: int = 0) -> Path:
    """Save the model ``name`` under ``root`` and give its directory."""
    prefix, options = (SUPPORTED | ALSO_SUPPORTED | REFUSED)[name]
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = getattr(transformers, f"{prefix}Config")(**options, **ids)
    make: Callable[..., PreTrainedModel] = getattr(transformers, _causal_class(prefix))
    # Constructors draw initial weights from the global generator, though all are replaced below.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config).to(torch.float32)
    _draw_weights(model, torch.Generator().manual_seed(seed))
    model.generation_config = GenerationConfig(**ids)
    directory = root / name
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def build_all(root: Path, *, seed: int = 0) -> dict[str, Path]:
    """Every supported model; its name → its directory."""
    return {name: build(name, root, seed=seed) for name in SUPPORTED}


def build_config_only(name: str, root: Path) -> Path:
    """A directory of ``name`` with config and tokenizer but no weights: enough to be refused."""
    prefix, options = (SUPPORTED | REFUSED)[name]
    directory = root / f"{name}-config"
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    config = getattr(transformers, f"{prefix}Config")(
        **options,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        architectures=[_causal_class(prefix)],
    )
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Rewrite fields of a saved model's config.json, e.g. to make it one that is refused."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes, indent=2))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text goes there and back; a few English merges."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for pair in dict.fromkeys(_MERGES.split(", ")):
        left, right = pair.split(" ")
        merges.append((left, right))
        symbols.append(left + right)
    vocab = {symbol: index for index, symbol in enumerate(dict.fromkeys(symbols))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_TOKEN,
        bos_token=END_TOKEN,
        pad_token=END_TOKEN,
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        model_max_length=MAX_CONTEXT_TOKENS,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    assert len(tokenizer) <= VOCAB_SIZE
    return tokenizer


def prompt_tokens(count: int, *, seed: int = 0) -> list[int]:
    """A random prompt of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


def _causal_class(prefix: str) -> str:
    return "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"


def _draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                scale_of_norm = name.endswith("weight")
                weight.copy_(1 + 0.1 * drawn if scale_of_norm else 0.1 * drawn)
            else:
                weight.copy_(drawn * 1.5 / weight.shape[-1] ** 0.5)
