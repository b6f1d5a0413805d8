"""The benchmarks run, and each row stands beside its limit."""

import json

import pytest
from typer.testing import CliRunner

from snowskin.cli.app import make_app
from snowskin.terms.errors import InvalidInput


def test_the_store_is_measured_beside_its_limits(tmp_path):
    out = tmp_path / "rows.json"
    options = ["--size", "4KiB", "--size", "300KiB", "--clients", "2", "--cycle", "2MiB"]
    short = ["--rounds", "1", "--round", "0.01", "--json", str(out)]
    result = CliRunner().invoke(make_app(), ["bench", "store", *options, *short])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    objects, blocks = ("get_into", "get", "get_many", "put_from"), ("pull", "pull_many")
    ops = {"tcp": (*objects, *blocks, "pull_busy", "pull_inside"), "shm": (*objects, *blocks)}
    wanted = {
        (transport, op, size)
        for transport in ops
        for op in ops[transport]
        for size in (4096, 300 * 1024)
    }
    measured = {(row["transport"], row["op"], row["size_bytes"]) for row in rows}
    assert {row for row in measured if row[0] != "nixl"} == wanted
    for row in rows:
        assert row["clients"] == 2
        assert row["ratio"] == row["bytes_per_s"] / row["limit_bytes_per_s"]
        assert 0 < row["p50_s"] <= row["p99_s"]


def test_the_directory_is_measured_beside_an_echo(tmp_path):
    out = tmp_path / "rows.json"
    short = ["--objects", "100", "--rounds", "1", "--round", "0.01", "--json", str(out)]
    result = CliRunner().invoke(make_app(), ["bench", "directory", *short])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert [row["op"] for row in rows] == ["exists", "exists_many", "exists_many", "exists_many"]
    assert all(row["ratio"] == row["per_s"] / row["limit_per_s"] for row in rows)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("store", "--rounds"),
        ("store", "--clients"),
        ("store", "--size"),
        ("directory", "--rounds"),
        ("directory", "--objects"),
    ],
)
def test_to_measure_nothing_is_refused(command, option):
    with pytest.raises(InvalidInput, match=f"{option} must be at least 1, not 0"):
        CliRunner().invoke(make_app(), ["bench", command, option, "0"], catch_exceptions=False)


def test_a_python_without_mooncake_is_named():
    result = CliRunner().invoke(make_app(), ["bench", "store", "--peer-python", "/bin/false"])
    assert result.exit_code != 0
    assert "/bin/false cannot run Mooncake" in str(result.exception)
