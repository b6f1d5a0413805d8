"""What a model is, remembered: looking at it takes torch, and loading torch takes seconds.

The front needs to know the model and never computes with it. So another process looks, and its
answer is kept in the cache folder, under a name that changes with everything that it follows from:
the model's files, what was asked for, the machine, the packages that looked and our own code that
did.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import msgspec
import xxhash

from snowskin.engine import hardware, model, support
from snowskin.engine.default_model import cache_dir
from snowskin.engine.model import ModelInfo, inspect_model
from snowskin.terms.errors import SnowskinError
from snowskin.transfer.child import Child, Parent

_READ_WHOLE = ("config.json", "generation_config.json")
_LOOKERS = [module.__file__ or "" for module in (model, support, hardware)]


class Look(msgspec.Struct, frozen=True):
    """What a process of its own is to look at, and where it writes down what it saw."""

    model_dir: str
    dtype: str
    device: str
    path: str


def inspect_once(model_dir: Path, *, dtype: str, device: str, machine: str) -> ModelInfo:
    """As ``inspect_model`` has it, without torch where the same was asked before.

    Args:
        machine: names this machine, since its hardware is part of the answer.

    Raises:
        InvalidInput: as ``inspect_model``.
        UnsupportedModel: as ``inspect_model``; only what can be served is remembered.
    """
    try:
        name = _digest(model_dir, f"{dtype}|{device}|{machine}")
    except OSError:  # An incomplete folder; what it lacks is told below.
        return inspect_model(model_dir, dtype=dtype, device=device)
    path = cache_dir() / "inspections" / f"{name}.json"
    if (info := _remembered(path)) is None:
        with contextlib.suppress(OSError):
            child = Child(__name__, Look(str(model_dir), dtype, device, str(path)))
            try:
                child.wait()
            finally:
                child.kill()
        info = _remembered(path)
    # Refused, or a cache that cannot be written: looking here tells all, and costs time alone.
    return info or inspect_model(model_dir, dtype=dtype, device=device)


def _remembered(path: Path) -> ModelInfo | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=ModelInfo, dec_hook=_path)
    return None


def _digest(model_dir: Path, asked: str) -> str:
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia*"))
    facts: list[object] = [model_dir.resolve(), asked, gpus, os.environ.get("CUDA_VISIBLE_DEVICES")]
    facts += [version(package) for package in ("torch", "transformers")]
    for path in sorted(model_dir.iterdir()):
        stat = path.stat()
        facts.append((path.name, stat.st_size, stat.st_mtime_ns))
    contents = [*(model_dir / name for name in _READ_WHOLE), *map(Path, _LOOKERS)]
    facts += [xxhash.xxh3_128_hexdigest(p.read_bytes()) for p in contents if p.is_file()]
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _path(kind: type[object], text: str) -> Path:
    assert kind is Path, kind
    return Path(text)


def _keep(path: Path, content: bytes) -> None:
    """Write all or nothing: others may read at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
        draft.write(content)
    Path(draft.name).replace(path)


def main() -> None:
    """The entry point of a process that looks, writes down what it saw, and gives torch back."""
    parent = Parent()
    look = parent.hear(Look)
    parent.watch(lambda: os._exit(1), grace_s=1.0)
    try:
        info = inspect_model(Path(look.model_dir), dtype=look.dtype, device=look.device)
        _keep(Path(look.path), msgspec.json.encode(info, enc_hook=str))
    except (SnowskinError, OSError):
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
