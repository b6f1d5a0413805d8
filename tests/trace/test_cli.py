from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from snowskin.cli.trace import app
from snowskin.terms.errors import InvalidInput
from snowskin.trace.formats import read_trace


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_synthesised_file_is_described_as_it_was_asked_for(tmp_path: Path) -> None:
    path, numbers, picture = (tmp_path / name for name in ("t.jsonl", "t.json", "t.png"))
    run("synthesise", path, "--shape", "fixed:4096:16:0.5", "--requests", 200, "--rate", 5)
    told = run("describe", path, "--json", numbers, "--picture", picture)
    assert "200" in told
    summary = json.loads(numbers.read_bytes())
    assert summary["prompt_tokens"]["mean"] == 4096
    assert summary["rate_per_s"] == pytest.approx(5, rel=0.2)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_mooncake_format_can_be_written_and_one_seed_gives_one_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for path in files:
        run("synthesise", path, "--requests", 50, "--format", "mooncake", "--seed", 3)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(read_trace(files[0])) == 50


@pytest.mark.parametrize(
    "wrong",
    [
        ["--shape", "novel"],
        ["--shape", "fixed:many:1"],
        ["--requests", "0"],
        ["--rate", "-1"],
        ["--format", "csv"],
        ["--format", "mooncake", "--block-tokens", "64"],
    ],
)
def test_wrong_options_are_refused_by_name(tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(InvalidInput):
        run("synthesise", tmp_path / "t", *wrong)


def test_a_share_below_one_block_is_warned_of(tmp_path: Path) -> None:
    small = ["synthesise", tmp_path / "t", "--shape", "fixed:600:10:0.5", "--requests", 10]
    assert "give fewer --block-tokens" in run(*small)
    assert "warning" not in run(*small, "--block-tokens", 64)
    assert "warning" not in run(*small[:3], "fixed:600:10", *small[4:])
    assert "give a longer PROMPT" in run(*small, "--format", "mooncake")
