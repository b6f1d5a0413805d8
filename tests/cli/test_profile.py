"""``snowskin profile`` says what is wrong before it measures."""

from __future__ import annotations

import pytest

from tests.cli.serving import snowskin


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--budget", "0"], "--budget 0: give at least 1 s"),
        (["--budget", "nan"], "--budget nan: give at least 1 s"),
        (["--out", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--model", "nowhere"], "'nowhere' is neither 'smollm2' nor a folder that exists"),
    ],
)
def test_a_wrong_value_is_told_with_its_remedy(options: list[str], words: str) -> None:
    ran = snowskin("profile", *options)
    assert ran.returncode == 2
    assert words in ran.stderr
    assert "Measuring" not in ran.stderr
