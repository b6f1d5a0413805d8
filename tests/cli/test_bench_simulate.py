import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from snowskin.cli.app import make_app
from snowskin.terms.errors import InvalidInput


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 500 * at, "input_length": 1500, "output_length": 20, "hash_ids": [0, 1, at]}
        for at in range(2, 22)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def rows_of(*arguments: str, out: Path) -> list[dict]:
    result = CliRunner().invoke(
        make_app(), ["bench", *arguments, "--prefill", "2", "--decode", "2", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    return json.loads(out.read_bytes())


def test_a_replay_is_timed_alone_and_as_a_process_beside_a_peer(trace: Path, tmp_path: Path):
    peer = tmp_path / "python"
    peer.write_text("#!/bin/sh\nexit 0\n")
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    options = ("--trace", str(trace), "--rounds", "2", "--peer-python", str(peer))
    alone, whole, other = rows_of("simulate", *options, out=tmp_path / "rows.json")
    assert [row["name"] for row in (alone, whole, other)] == [
        "simulation alone",
        "whole process",
        "peer's whole process",
    ]
    assert {row["requests"] for row in (alone, whole, other)} == {20}
    assert {row["rounds"] for row in (alone, whole, other)} == {2}
    assert alone["cpu_s"] < whole["cpu_s"]
    assert whole["peer_ratio"] < 1 == other["peer_ratio"]


def test_a_peer_that_fails_is_an_error_and_no_row(trace: Path):
    with pytest.raises(InvalidInput, match="ended with status"):
        CliRunner().invoke(
            make_app(),
            ["bench", "simulate", "--trace", str(trace), "--peer-python", "/bin/false"],
            catch_exceptions=False,
        )


def test_decisions_are_timed_over_the_events_of_a_simulated_run(trace: Path, tmp_path: Path):
    (row,) = rows_of("conductor", "--trace", str(trace), out=tmp_path / "rows.json")
    assert (row["prefill"], row["decode"], row["requests"]) == (2, 2, 20)
    assert row["events"] > 5 * 20
    assert 0 < row["decision_p50_s"] <= row["decision_p99_s"]
    assert row["decisions_per_s"] > 0
    assert row["events_per_s"] > 0
