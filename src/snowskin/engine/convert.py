"""Converts a GGUF file to a Hugging Face model folder, in a process of its own.

Converting takes torch and the whole model in memory; the process gives them back.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import msgspec

from snowskin.terms.errors import SnowskinError
from snowskin.transfer.child import Child, Parent


class Conversion(msgspec.Struct, frozen=True):
    """What is to be converted, into which folder, which must not exist."""

    gguf: str
    target: str


def convert(gguf: Path, target: Path) -> None:
    """Convert in a child process, which ends with this one.

    Raises:
        SnowskinError: it could not be converted; its own words stand on stderr.
    """
    child = Child(__name__, Conversion(str(gguf), str(target)))
    try:
        status = child.wait()
    finally:
        child.kill()
    if status != 0:
        raise SnowskinError(
            f"{gguf.name} could not be converted (exit status {status}); see the message above"
        )


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from snowskin.engine.model import no_progress_bars

    # Reading a GGUF file draws a bar of its own, which has no switch.
    with no_progress_bars(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    _recommend_greedy(target / "generation_config.json")
    # Weights are written readable by their owner alone; a cache may be shared.
    for path in target.iterdir():
        path.chmod(0o644)


def _recommend_greedy(path: Path) -> None:
    """Say that the likeliest token is to be taken where a client does not say otherwise.

    Our choice: 135 million weights of 4 bits lose the thread when they are sampled from.
    """
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    path.write_text(json.dumps({**settings, "do_sample": False}, indent=2) + "\n")


def main() -> None:
    """The entry point of the child process."""
    parent = Parent()
    wanted = parent.hear(Conversion)
    parent.watch(lambda: os._exit(1), grace_s=1.0)
    try:
        _convert(Path(wanted.gguf), Path(wanted.target))
    except Exception as error:  # A package's own failure, of any kind, told in its words.
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
