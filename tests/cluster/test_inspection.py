"""A model is looked at once; what was seen is forgotten with anything that it follows from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from snowskin.cluster.inspection import inspect_once
from snowskin.engine.model import inspect_model
from snowskin.terms.errors import InvalidInput, UnsupportedModel
from tests.engine import tiny


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SNOWSKIN_CACHE", str(folder))
    return folder


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny.build("llama", tmp_path)


def remembered(cache: Path) -> int:
    return len(list((cache / "inspections").glob("*.json")))


def test_looking_gives_the_same_as_ever_and_loads_no_torch_here(
    cache: Path, model_dir: Path
) -> None:
    code = f"""
import sys
from pathlib import Path
from snowskin.cluster.inspection import inspect_once
for _ in range(2):
    info = inspect_once(Path({str(model_dir)!r}), dtype="fp32", device="auto", machine="m")
print(info.revision, "torch" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    seen = inspect_once(model_dir, dtype="fp32", device="auto", machine="m")
    assert seen == inspect_model(model_dir, dtype="fp32")
    assert ran.stdout.split() == [seen.revision, "False"]
    assert remembered(cache) == 1


def test_another_question_another_file_or_another_machine_is_looked_at_anew(
    cache: Path, model_dir: Path
) -> None:
    def look(dtype: str = "fp32", machine: str = "m") -> int:
        return inspect_once(model_dir, dtype=dtype, device="cpu", machine=machine).vocab_size

    vocab_size = look()
    look("bf16")
    look(machine="n")
    assert remembered(cache) == 3
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size + 8}))
    assert look() == vocab_size + 8


def test_what_cannot_be_read_back_is_looked_at_anew(cache: Path, model_dir: Path) -> None:
    first = inspect_once(model_dir, dtype="fp32", device="cpu", machine="m")
    for path in (cache / "inspections").iterdir():
        path.write_text('{"name": "from another version"}')
    assert inspect_once(model_dir, dtype="fp32", device="cpu", machine="m") == first


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("SNOWSKIN_CACHE", str(blocked))
    assert inspect_once(model_dir, dtype="fp32", device="cpu", machine="m").layers


def test_a_refusal_is_never_remembered(cache: Path, model_dir: Path, tmp_path: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            inspect_once(model_dir, dtype="fp32", device="cpu", machine="m")
    with pytest.raises(InvalidInput):
        inspect_once(tmp_path / "nowhere", dtype="fp32", device="cpu", machine="m")
    assert not cache.exists()
