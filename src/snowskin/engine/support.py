"""Which models the engine computes right, and by which part it refuses the others."""

from __future__ import annotations

from typing import Any

from snowskin.terms.errors import UnsupportedModel

SUPPORTED: frozenset[str] = frozenset(
    {
        "arcee",
        "cohere",
        "ernie4_5",
        "gemma",
        "glm",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "granitemoe",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
"""``model_type`` of every architecture that is tested, token for token, against transformers."""

_SOFT_CAP = "soft-capping of attention scores"
_WINDOW = "sliding-window attention"
_MLA = "multi-head latent attention (MLA)"
_ENCODER_DECODER = "an encoder and cross attention"
_RECURRENT = "recurrent (linear attention or state-space) layers"
_SINKS = "attention sinks"
_ALIBI = "ALiBi position biases"

REFUSED: dict[str, str] = {
    "bart": _ENCODER_DECODER,
    "bloom": _ALIBI,
    "cohere2": _WINDOW,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "falcon_h1": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "gemma2": f"{_SOFT_CAP} and {_WINDOW}",
    "gemma3": _WINDOW,
    "gemma3_text": _WINDOW,
    "gpt_oss": f"{_SINKS} and {_WINDOW}",
    "granitemoehybrid": _RECURRENT,
    "jamba": _RECURRENT,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "mpt": _ALIBI,
    "olmo3": _WINDOW,
    "qwen3_next": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "rwkv": _RECURRENT,
    "t5": _ENCODER_DECODER,
    "zamba2": _RECURRENT,
}
"""``model_type`` → the part that the engine would compute wrongly."""

_SOFT_CAP_FIELDS = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")
_MLA_FIELDS = ("kv_lora_rank",)
_FULL_ATTENTION = "full_attention"


def check_model_type(model_type: str) -> None:
    """Refuse an architecture by its name alone.

    Raises:
        UnsupportedModel: names the architecture and the part at fault.
    """
    if model_type in SUPPORTED:
        return
    part = REFUSED.get(model_type)
    known = ", ".join(sorted(SUPPORTED))
    if part is not None:
        raise UnsupportedModel(
            f"model type {model_type!r} has {part}, which the engine does not compute; "
            f"supported model types: {known}"
        )
    raise UnsupportedModel(
        f"model type {model_type!r} is not known to the engine; supported model types: {known}"
    )


def check_config(config: Any) -> None:
    """Refuse a supported architecture that is configured with a part the engine lacks.

    Args:
        config: a transformers configuration, with its defaults filled in: some parts (a sliding
            window) are on by default and absent from ``config.json``.

    Raises:
        UnsupportedModel: names the part and the field of ``config.json`` that turns it on.
    """
    if getattr(config, "is_encoder_decoder", False):
        _refuse(config, _ENCODER_DECODER, "is_encoder_decoder")
    if getattr(config, "add_cross_attention", False):
        _refuse(config, "cross attention", "add_cross_attention")
    if getattr(config, "alibi", False):
        _refuse(config, _ALIBI, "alibi")
    for field in _SOFT_CAP_FIELDS:
        if getattr(config, field, None) is not None:
            _refuse(config, _SOFT_CAP, field)
    for field in _MLA_FIELDS:
        if getattr(config, field, None) is not None:
            _refuse(config, _MLA, field)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        _refuse(config, "quantised weights", "quantization_config")
    _check_layers(config)
    _check_positions(config)


def context_limit_tokens(config: Any) -> int:
    """Most tokens of one sequence for which the engine's KV is right.

    LongRoPE turns its position tables over once a sequence outgrows the length of its first
    training, which would make stored KV depend on how long the sequence becomes; such a model is
    served up to that length.
    """
    limit = int(config.max_position_embeddings)
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, int(original or limit))
    return limit


def _check_layers(config: Any) -> None:
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    limit = int(config.max_position_embeddings)
    if layer_types is None:
        if window is not None and window < limit:
            _refuse(config, _window(window, limit), "sliding_window")
        return
    for layer_type in dict.fromkeys(layer_types):
        if layer_type == "sliding_attention":
            if window is not None and window < limit:
                _refuse(config, _window(window, limit), "layer_types")
        elif layer_type != _FULL_ATTENTION:
            _refuse(config, f"layers of type {layer_type!r}", "layer_types")


def _check_positions(config: Any) -> None:
    for rope in _ropes(config):
        if rope.get("rope_type") == "dynamic":
            # The base frequency follows the longest position seen, so keys stored by a short
            # sequence would not fit a long one.
            _refuse(config, "dynamic NTK position scaling", "rope_parameters.rope_type")


def _ropes(config: Any) -> tuple[dict[str, Any], ...]:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return ()
    nested = tuple(value for value in rope.values() if isinstance(value, dict))
    return (rope, *nested)


def _window(window_tokens: int, limit_tokens: int) -> str:
    return f"{_WINDOW} ({window_tokens} tokens, of a context of {limit_tokens})"


def _refuse(config: Any, part: str, field: str) -> None:
    raise UnsupportedModel(
        f"this {config.model_type} model has {part} ({field} in config.json), "
        "which the engine does not compute"
    )
