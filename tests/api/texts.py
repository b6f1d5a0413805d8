"""Small real tokenizers, trained here and saved as model directories."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The capital of France is Paris, and the capital of Spain is Madrid.",
    "A mooncake has a thin skin and a rich core; the core is what counts.",
    "Die Straße ist naß, der Käse schmeckt. Ça va? Où est la gare?",
    "月餅 is eaten in autumn. 中秋節快樂! Emoji: 😀😃🥮.",
    "def handle(self, event):\n    return tuple(event)\n\n    # four spaces",
] * 3

TEMPLATE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = 'Be brief.' %}
    {%- set rest = messages %}
{%- endif %}
{{ bos_token }}[SYS]{{ system | trim }}[/SYS]
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Turns must alternate, from user on') }}
    {% endif %}
    {% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
    {% else %}
{{ message | tojson }}
    {% endif %}
    {% if loop.index > 50 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}[ANSWER]{% endif %}
{% if shout is defined and shout %}!{% endif %}
"""
"""Uses what templates in the wild use: trimming, loop controls, tojson, generation, exceptions."""

END = {"__type": "AddedToken", "content": "</s>", "special": True}


def byte_level_dir(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """As GPT-2 and most models since."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _saved(folder, tokenizer, {"bos_token": "<|start|>", "eos_token": "<|end|>"}, template)


def byte_fallback_dir(folder: Path, *, template: str | None = None, **config: object) -> Path:
    """As Llama 1 and 2: words begin with a mark, unknown characters fall back to bytes."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=[],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    trained = json.loads(tokenizer.to_str())
    vocab = trained["model"]["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    tokens = {"bos_token": "<s>", "eos_token": END, "unk_token": "<unk>"}
    return _saved(folder, Tokenizer.from_str(json.dumps(trained)), {**tokens, **config}, template)


def _saved(
    folder: Path, tokenizer: Tokenizer, config: dict[str, object], template: str | None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
