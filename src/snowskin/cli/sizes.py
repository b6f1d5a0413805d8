"""Sizes as people write them."""

from __future__ import annotations

import re

from snowskin.terms.errors import InvalidInput

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)


def parse_bytes(text: str, *, option: str) -> int:
    """Bytes of ``512MiB``, ``1.5GB``, ``4096`` …

    Raises:
        InvalidInput: it is no size; names the option.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(
            f"{option} {text!r} is no size: write for example 512MiB or 2GB", parameter=option
        )
    number, unit = match[1], match[2].lower()
    return int(float(number) * (_BINARY_UNITS | _UNITS)[unit])
