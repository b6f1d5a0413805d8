"""``snowskin bench serve`` and ``engine`` measure what is really there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.serving import Server, snowskin


def test_repeated_prompts_are_found_in_the_cache_and_new_ones_are_not(
    server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    options = ["--prompt-tokens", "300", "--output-tokens", "4", "--rounds", "2"]
    ran = server.snowskin("bench", "serve", *options, "--concurrency", "4", "--json", str(out))
    assert ran.returncode == 0, ran.stderr
    rows = {row["name"]: row for row in json.loads(out.read_bytes())}
    assert rows["new prompts"]["cached_tokens_mean"] == 0
    assert rows["repeated prompts"]["cached_tokens_mean"] == 288
    assert rows["repeated, at once"]["cached_tokens_mean"] == 288
    assert [row["requests"] for row in rows.values()] == [2, 2, 4, 4]


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    ran = snowskin("bench", "serve", "--url", "http://127.0.0.1:9")
    assert ran.returncode == 2
    assert "http://127.0.0.1:9" in ran.stderr


@pytest.mark.parametrize(
    ("command", "option", "value", "words"),
    [
        ("serve", "--rounds", "0", "--rounds 0: give at least 1"),
        ("serve", "--concurrency", "0", "--concurrency 0: give at least 1"),
        ("serve", "--prompt-tokens", "1", "--prompt-tokens 1: give at least 2"),
        ("engine", "--budget", "-1", "--budget -1: give seconds, 0 or more"),
    ],
)
def test_to_measure_nothing_is_refused(command: str, option: str, value: str, words: str) -> None:
    ran = snowskin("bench", command, option, value)
    assert ran.returncode == 2
    assert words in ran.stderr


def test_an_engine_is_measured_point_by_point(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.json"
    options = ["--model", str(model_dir), "--threads", "1", "--budget", "1", "--json", str(out)]
    ran = snowskin("bench", "engine", *options)
    assert ran.returncode == 0, ran.stderr
    samples = json.loads(out.read_bytes())
    assert all(sample["prefill_s"] > 0 for sample in samples["prefill"])
    assert all(sample["step_s"] > 0 for sample in samples["decode"])
