"""A Hugging Face causal language model: what it is, and its forward pass over packed sequences."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from snowskin.engine import support
from snowskin.engine.hardware import Dtype, choose_device, choose_dtype, torch_dtype
from snowskin.terms.errors import InvalidInput
from snowskin.terms.request import Sampling

if TYPE_CHECKING:
    from snowskin.engine.attention import LayerWatcher, Span
    from snowskin.engine.kv import KvShape

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_SAMPLE_BYTES = 1 << 16
"""How much of both ends of a weight file goes into the revision."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of the system needs to know of a model; costs no weights to learn."""

    name: str
    """The name of its folder."""
    model_dir: Path
    revision: str
    """Differs whenever configuration or weights do: part of every block key."""
    model_type: str
    dtype: Dtype
    device: str
    """As torch spells it, e.g. ``cpu`` or ``cuda:0``."""
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab_size: int
    max_context_tokens: int
    stop_tokens: tuple[int, ...]
    sampling: Sampling
    """What the model's makers recommend (generation_config.json)."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of one token over all layers."""
        element_bytes = {"fp32": 4, "bf16": 2}[self.dtype]
        return self.layers * 2 * self.kv_heads * self.head_dim * element_bytes


def inspect_model(model_dir: Path, *, dtype: str = "auto", device: str = "auto") -> ModelInfo:
    """Say what the model in a folder is, without reading its weights.

    Args:
        model_dir: with ``config.json`` and weights as safetensors (or ``pytorch_model.bin``).
        dtype: ``auto`` (bf16 where the hardware multiplies it, else fp32), ``fp32`` or ``bf16``.
        device: ``auto`` (CUDA if there is any), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        InvalidInput: no such folder, an incomplete one, or a value that is not offered.
        UnsupportedModel: the engine would compute this model wrongly; names the part.
    """
    raw = _read_config(model_dir)
    weights = sorted(path for pattern in _WEIGHT_PATTERNS for path in model_dir.glob(pattern))
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidInput(f"{model_dir / 'config.json'} has no model_type", parameter="model")
    support.check_model_type(model_type)
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)

    config = _load_config(model_dir)
    support.check_config(config)
    if not weights:
        raise InvalidInput(
            f"{model_dir} has no weights: expected {' or '.join(_WEIGHT_PATTERNS)}",
            parameter="model",
        )
    generation = _read_generation_config(model_dir)
    query_heads = int(config.num_attention_heads)
    hidden = int(config.hidden_size)
    head_dim = getattr(config, "head_dim", None) or hidden // query_heads
    return ModelInfo(
        name=model_dir.resolve().name,
        model_dir=model_dir,
        revision=_revision(model_dir / "config.json", weights),
        model_type=model_type,
        dtype=chosen_dtype,
        device=chosen_device,
        layers=int(config.num_hidden_layers),
        query_heads=query_heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or query_heads),
        head_dim=int(head_dim),
        hidden=hidden,
        vocab_size=int(config.vocab_size),
        max_context_tokens=support.context_limit_tokens(config),
        stop_tokens=_stop_tokens(generation, config),
        sampling=_recommended_sampling(generation),
    )


class Model:
    """A loaded model. Not thread-safe: one thread computes.

    Get one from ``load``.
    """

    def __init__(self, info: ModelInfo, module: Any) -> None:
        import torch

        from snowskin.engine.attention import CausalMasks
        from snowskin.engine.kv import KvShape

        self._module = module
        self._device = torch.device(info.device)
        self._info = info
        self._kv_shape = KvShape(
            layers=info.layers,
            kv_heads=info.kv_heads,
            head_dim=info.head_dim,
            dtype=torch_dtype(info.dtype),
        )
        self._masks = CausalMasks(dtype=self._kv_shape.dtype, device=self._device)

    @classmethod
    def load(cls, info: ModelInfo) -> Model:
        """Read the weights.

        Raises:
            InvalidInput: the weights are damaged or do not belong to the configuration.
        """
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM

        from snowskin.engine.attention import ATTENTION_NAME, register

        register()
        try:
            with no_progress_bars():
                module, loading = AutoModelForCausalLM.from_pretrained(
                    info.model_dir,
                    dtype=torch_dtype(info.dtype),
                    attn_implementation=ATTENTION_NAME,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise InvalidInput(
                f"the weights in {info.model_dir} cannot be loaded: {error}", parameter="model"
            ) from error
        missing = sorted(loading["missing_keys"])
        if missing:
            raise InvalidInput(
                f"the weights in {info.model_dir} lack {len(missing)} tensors that config.json "
                f"asks for, e.g. {missing[0]}",
                parameter="model",
            )
        return cls(info, module.eval().requires_grad_(False).to(info.device))

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._info

    @property
    def device(self) -> Any:
        """The ``torch.device`` that computes."""
        return self._device

    @property
    def kv_shape(self) -> KvShape:
        """The shape of the model's KV."""
        return self._kv_shape

    def forward(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        *,
        logit_rows: Sequence[int],
        watcher: LayerWatcher | None = None,
    ) -> Any:
        """One pass over packed sequences; their KV grows by it.

        Args:
            tokens: of all spans, one after the other.
            spans: of each sequence, in the order of the tokens.
            logit_rows: the rows whose next-token logits are wanted.
            watcher: is told of each layer.

        Returns:
            fp32 tensor ``[len(logit_rows), vocab]`` on the device.
        """
        import torch

        from snowskin.engine.attention import PackedPass

        rows = sum(span.rows for span in spans)
        assert rows == len(tokens) > 0, (rows, len(tokens))
        with torch.inference_mode():
            packed = PackedPass(spans, self._masks, watcher)
            positions = [position for span in spans for position in range(span.start, span.end)]
            # Without a row of logits wanted, one is computed all the same and left out: the models
            # take an empty choice for all rows.
            keep = torch.tensor(list(logit_rows) or [rows - 1])
            output = self._module(
                input_ids=self._to_device(torch.tensor([list(tokens)])),
                position_ids=self._to_device(torch.tensor([positions])),
                use_cache=False,
                logits_to_keep=self._to_device(keep),
                packed_pass=packed,
            )
            for span in spans:
                span.kv.tokens = span.end
            return output.logits[0, : len(logit_rows)].float()

    def _to_device(self, host: Any) -> Any:
        if self._device.type == "cuda":
            return host.pin_memory().to(self._device, non_blocking=True)
        return host


def _read_config(model_dir: Path) -> dict[str, Any]:
    if not model_dir.is_dir():
        raise InvalidInput(f"model folder {str(model_dir)!r} does not exist", parameter="model")
    path = model_dir / "config.json"
    if not path.is_file():
        raise InvalidInput(
            f"{model_dir} has no config.json: not a Hugging Face model folder", parameter="model"
        )
    try:
        raw = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}", parameter="model") from error
    if not isinstance(raw, dict):
        raise InvalidInput(f"{path} is not a JSON object", parameter="model")
    return raw


def _load_config(model_dir: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"transformers cannot read {model_dir / 'config.json'}: {error}", parameter="model"
        ) from error


def _read_generation_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}", parameter="model") from error
    return raw if isinstance(raw, dict) else {}


def _recommended_sampling(generation: dict[str, Any]) -> Sampling:
    """What the makers recommend, of those settings that a client may leave out."""
    named = {
        name: generation[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if generation.get(name) is not None
    }
    if named.get("top_k") == 0:
        del named["top_k"]
    if generation.get("do_sample") is False:
        named["temperature"] = 0.0
    try:
        return msgspec.convert(named, Sampling, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"generation_config.json: {error}", parameter="model") from error


def _stop_tokens(generation: dict[str, Any], config: Any) -> tuple[int, ...]:
    declared = generation.get("eos_token_id")
    if declared is None:
        declared = getattr(config, "eos_token_id", None)
    if declared is None:
        return ()
    return tuple(declared) if isinstance(declared, list) else (int(declared),)


def _revision(config_path: Path, weights: Sequence[Path]) -> str:
    # Both ends of each file: the head of a safetensors file describes all tensors, and training
    # changes the tail's values. Reading it whole would cost minutes for a large model.
    digest = xxhash.xxh3_128(config_path.read_bytes())
    for path in weights:
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}:{size_bytes};".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size_bytes - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silence the progress bars of transformers, whose steps mean little to a user."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
