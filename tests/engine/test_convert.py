"""A conversion that fails says so, and one whose parent dies ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snowskin.engine.convert import convert
from snowskin.terms.errors import SnowskinError


def test_what_is_no_gguf_file_is_told_in_the_packages_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model at all")
    with pytest.raises(SnowskinError, match=r"broken.gguf could not be converted"):
        convert(broken, tmp_path / "out")
    assert "Error: " in capfd.readouterr().err


def test_a_conversion_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    # A named pipe that nobody writes: the conversion would wait for ever.
    os.mkfifo(tmp_path / "endless.gguf")
    code = f"""
from pathlib import Path
from snowskin.engine.convert import convert
convert(Path({str(tmp_path / "endless.gguf")!r}), Path({str(tmp_path / "out")!r}))
"""
    asking = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    tasks = Path(f"/proc/{asking.pid}/task/{asking.pid}/children")
    deadline_s = time.monotonic() + 30
    while not (children := tasks.read_text().split()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    while Path(f"/proc/{children[0]}").exists():
        assert time.monotonic() < deadline_s, "the conversion goes on"
        time.sleep(0.05)
