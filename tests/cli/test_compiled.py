import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import snowskin
from snowskin.cli import compiled
from snowskin.cli.compiled import StaleModule, compiled_count, refuse_stale_modules

PACKAGE = Path(snowskin.__file__).parent

SYNTHESISE = ("trace", "synthesise", "--requests", "400", "--seed", "3")
SIMULATE = ("simulate", "--admission", "predicted", "--blocks", "200", "--speed", "4")
FAULTS = ("--kill", "prefill-0@5+10", "--slow", "decode-1@20+30*0.2")


def run(source: Path, *arguments: str) -> None:
    code = "from snowskin.cli.app import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    environment = os.environ | {"PYTHONPATH": str(source)}
    subprocess.run(command, env=environment, check=True, timeout=240, capture_output=True)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "length-aware"])
def test_compiled_and_plain_modules_give_the_same_bytes(tmp_path, eviction):
    if not compiled_count():
        pytest.skip("nothing is compiled")
    plain = tmp_path / "plain"
    shutil.copytree(PACKAGE, plain / "snowskin", ignore=shutil.ignore_patterns("*.so"))
    trace = tmp_path / "trace.jsonl"
    run(PACKAGE.parent, *SYNTHESISE, str(trace))
    written = []
    for source in (PACKAGE.parent, plain):
        out = tmp_path / f"{source.name}.json"
        options = ("--eviction", eviction, "--trace", str(trace), "--json", str(out))
        run(source, *SIMULATE, *FAULTS, *options)
        written.append(out.read_bytes())
    assert written[0] == written[1]


def test_a_source_that_was_edited_after_it_was_compiled_is_refused(tmp_path, monkeypatch):
    room = tmp_path / "src" / "snowskin" / "sim"
    room.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    module, source = room / "world.cpython-311.so", room / "world.py"
    module.touch()
    source.touch()
    monkeypatch.setattr(compiled, "PACKAGE", room.parent)
    os.utime(source, (1000, 1000))
    refuse_stale_modules()
    os.utime(module, (999, 999))
    with pytest.raises(StaleModule, match=r"sim/world\.py was changed after .*make setup"):
        refuse_stale_modules()
