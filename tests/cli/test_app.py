"""What the command line loads, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from snowskin.cli.app import COMMANDS
from snowskin.cli.threads import keep_blas_to_one_thread

LOADED = """
import sys
from snowskin.cli.app import main
sys.argv = ["snowskin", *sys.argv[1:]]
try:
    main()
finally:
    print(*[name for name in sys.modules if name.startswith("snowskin.cli.")], file=sys.stderr)
"""


def loaded(*words: str) -> set[str]:
    ended = subprocess.run(
        [sys.executable, "-c", LOADED, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {name.removeprefix("snowskin.cli.") for name in ended.stderr.split()}


def test_a_command_loads_itself_and_no_other() -> None:
    commands = set(COMMANDS.values())
    assert loaded("trace", "describe", "-h") & commands == {"trace"}
    assert loaded("cache-curve", "-h") & commands == {"simulate"}
    assert loaded("-h") & commands == commands


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "1"),
        ({"OPENBLAS_NUM_THREADS": "3"}, "3"),
        ({"OMP_NUM_THREADS": "2"}, None),
    ],
)
def test_blas_has_one_thread_unless_the_user_says_otherwise(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    keep_blas_to_one_thread()
    assert os.environ.get("OPENBLAS_NUM_THREADS") == expected
