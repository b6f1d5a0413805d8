"""The same trace over several values of one setting, several runs at once."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import msgspec

from snowskin.sim.config import WorldConfig
from snowskin.sim.simulate import simulate
from snowskin.terms.errors import InvalidInput
from snowskin.trace.records import Trace

_FIELDS: dict[str, tuple[str, type]] = {
    "prefill": ("prefill_nodes", int),
    "decode": ("decode_nodes", int),
    "blocks": ("blocks", int),
    "seed": ("seed", int),
    "policy": ("policy", str),
    "admission": ("admission", str),
    "eviction": ("eviction", str),
    "threshold": ("balancing_threshold", float),
    "ttft_slo": ("ttft_slo_s", float),
    "tbt_slo": ("tbt_slo_s", float),
    "speed": ("", float),
}
"""What can be swept: its field in the configuration, and its kind. Speed changes the trace."""


class Axis(msgspec.Struct, frozen=True):
    """The swept setting and its values."""

    name: str
    values: tuple[int | float | str, ...]


def parse_sweep(text: str) -> Axis:
    """``prefill=4..12`` or ``speed=1,1.5,2``.

    Raises:
        InvalidInput: the setting is unknown or a value is wrong.
    """
    name, equals, listed = text.partition("=")
    name = name.strip()
    if not equals or name not in _FIELDS:
        raise InvalidInput(
            f"expected SETTING=FIRST..LAST or SETTING=A,B,…; got {text!r}. Settings: "
            f"{', '.join(_FIELDS)}",
            parameter="sweep",
        )
    kind = _FIELDS[name][1]
    try:
        if ".." in listed and kind is int:
            first, last = (int(part) for part in listed.split(".."))
            values: tuple[Any, ...] = tuple(range(first, last + 1))
        else:
            values = tuple(kind(part.strip()) for part in listed.split(","))
    except ValueError:
        hint = "" if kind is int else "; FIRST..LAST is for whole numbers alone, so list each"
        raise InvalidInput(
            f"not values of {name}: {listed!r}{hint if '..' in listed else ''}", parameter="sweep"
        ) from None
    if not values:
        raise InvalidInput(f"no values in {text!r}", parameter="sweep")
    return Axis(name, values)


def run_sweep(trace: Trace, config: WorldConfig, axis: Axis, *, jobs: int) -> list[dict[str, Any]]:
    """The summary of each run, in the order of the values; each holds the swept setting."""
    if jobs < 1:
        raise InvalidInput(f"jobs must be at least 1, not {jobs}", parameter="jobs")
    work = [(trace, *_changed(config, axis.name, value)) for value in axis.values]
    if jobs == 1:
        summaries = [_one(*each) for each in work]
    else:
        with ProcessPoolExecutor(min(jobs, len(work))) as pool:
            summaries = list(pool.map(_one, *zip(*work, strict=True)))
    return [
        summary | {axis.name: value} for summary, value in zip(summaries, axis.values, strict=True)
    ]


def _changed(config: WorldConfig, name: str, value: Any) -> tuple[WorldConfig, float]:
    field = _FIELDS[name][0]
    if not field:
        return config, float(value)
    return msgspec.structs.replace(config, **{field: value}), 1.0


def _one(trace: Trace, config: WorldConfig, speed: float) -> dict[str, Any]:
    return simulate(trace.sped_up(speed) if speed != 1.0 else trace, config).summary
