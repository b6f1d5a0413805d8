"""Values as the user has them: anything with contiguous bytes, seen as plain memory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from snowskin.store.objects.words import KEY_LIMIT_BYTES
from snowskin.terms.errors import InvalidInput


def memory_of(value: Any, *, writable: bool = False) -> memoryview:
    """The bytes of a value, without a copy: bytes, bytearray, memoryview, numpy, torch, …

    Raises:
        InvalidInput: it has no contiguous bytes in this machine's memory, or cannot be written.
    """
    if type(value) is bytearray or (type(value) is bytes and not writable):
        return memoryview(value)
    if (
        type(value) is memoryview
        and value.format == "B"
        and value.ndim == 1
        and value.contiguous
        and not (writable and value.readonly)
    ):
        return value
    name = type(value).__name__
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or not value.is_contiguous():
            raise InvalidInput("a tensor must be contiguous and on the CPU: .cpu().contiguous()")
        value = value.detach().reshape(-1).view(torch.uint8).numpy()
    try:
        if isinstance(value, np.ndarray):
            if not value.flags.c_contiguous or value.dtype.hasobject:
                raise InvalidInput(
                    "an array must be contiguous and hold no Python objects: np.ascontiguousarray"
                )
            value = value.reshape(-1).view(np.uint8)
        view = memoryview(value)
    except TypeError as error:
        raise InvalidInput(
            f"a {name} has no bytes of its own: give bytes, bytearray, memoryview, a numpy array "
            "or a torch tensor"
        ) from error
    if not view.c_contiguous:
        raise InvalidInput(f"the memory of this {name} is not contiguous: copy it first")
    if writable and view.readonly:
        raise InvalidInput(f"this {name} cannot be written to: give a bytearray or an array")
    if view.nbytes == 0:
        return memoryview(bytearray() if writable else b"")
    return view.cast("B")


def check_key(key: str) -> str:
    """A key as it may be.

    Raises:
        InvalidInput: it is no string, or empty, or too long.
    """
    if type(key) is not str:
        if not isinstance(key, str):
            raise InvalidInput(f"a key is a string, not {type(key).__name__}: {key!r}")
        key = str.__str__(key)  # As of numpy, or an enumeration.
    try:
        size_bytes = len(key) if key.isascii() else len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(f"the key {key!r} is no text: {error.reason}") from error
    if not 0 < size_bytes <= KEY_LIMIT_BYTES:
        raise InvalidInput(
            f"a key has 1 to {KEY_LIMIT_BYTES} bytes in UTF-8; this one has {size_bytes}"
        )
    return key
