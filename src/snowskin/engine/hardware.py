"""What a model is computed on, and in which number format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from snowskin.terms.errors import InvalidInput

Dtype = Literal["fp32", "bf16"]


def choose_device(device: str) -> str:
    """The device as torch spells it, for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        InvalidInput: another word, or a device that is not there.
    """
    import torch

    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdigit():
        raise InvalidInput(
            f"device {device!r} is not one of auto, cpu, cuda, cuda:N", parameter="device"
        )
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"device {device!r} is not there: {torch.cuda.device_count()} CUDA devices found",
            parameter="device",
        )
    return f"cuda:{index or 0}"


def choose_dtype(dtype: str, device: str) -> Dtype:
    """``auto`` is bf16 where the hardware multiplies it, else fp32.

    Raises:
        InvalidInput: neither that nor a format that is offered.
    """
    if dtype in ("fp32", "bf16"):
        return cast(Dtype, dtype)
    if dtype != "auto":
        raise InvalidInput(f"dtype {dtype!r} is not one of auto, fp32, bf16", parameter="dtype")
    return "bf16" if _multiplies_bf16(device) else "fp32"


def _multiplies_bf16(device: str) -> bool:
    import torch

    if device != "cpu":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(line.split())
    return False


def torch_dtype(dtype: Dtype) -> Any:
    """The ``torch.dtype`` of that name."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
