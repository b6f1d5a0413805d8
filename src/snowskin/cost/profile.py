"""A cost profile: one model on one kind of node, with its source and its own error.

Profiles are JSON data. Those that come with the package lie beside this file in ``profiles/``.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import msgspec

from snowskin.cost.costs import DecodeCost, LinkCost, PrefillCost
from snowskin.terms.errors import InvalidInput

_FOLDER = Path(__file__).parent / "profiles"


class FitError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a fitted cost lies from its samples."""

    samples: int
    worst_ratio: float
    """The greatest |predicted − real| / real; 0.05 is 5 %."""
    r_squared: float | None = None
    """Share of the samples' variance that the cost explains; None where it is not known."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the Conductor and the simulator know of a model on a node."""

    name: str
    model: str
    hardware: str
    source: str
    kv_bytes_per_token: int
    prefill: PrefillCost
    decode: DecodeCost
    transfer: LinkCost
    """Between the DRAM of two nodes."""
    load: LinkCost
    """From a node's DRAM to its device memory."""
    prefill_error: FitError | None = None
    decode_error: FitError | None = None

    def __post_init__(self) -> None:
        if self.kv_bytes_per_token < 1:
            raise InvalidInput(
                f"kv_bytes_per_token must be at least 1, not {self.kv_bytes_per_token}",
                parameter="kv_bytes_per_token",
            )

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the KV of so many tokens."""
        return tokens * self.kv_bytes_per_token


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_profile(name_or_path: str | Path) -> Profile:
    """The named profile, or the one in a JSON file.

    Raises:
        InvalidInput: there is no such profile, or the file is not one; the CLI shows it.
    """
    path = Path(name_or_path)
    if path.suffix != ".json":
        path = _FOLDER / f"{name_or_path}.json"
        if not path.is_file():
            known = ", ".join(profile_names())
            raise InvalidInput(
                f"there is no cost profile {str(name_or_path)!r}; "
                f"known are {known}, or the path of a .json file",
                parameter="hardware",
            )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {path}", parameter="hardware") from None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{path} is no cost profile: {error}", parameter="hardware") from error


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON that a person can read; replaces the file in one step.

    Raises:
        InvalidInput: ``path`` cannot be written; nothing is left there.
    """
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")  # Others may save it at once.
    try:
        draft.write_bytes(text)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise InvalidInput(f"cannot save {path}: {error.strerror}", parameter="path") from error
