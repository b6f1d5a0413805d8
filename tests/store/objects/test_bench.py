"""The benchmarks run, and each row stands beside its limit."""

import json

from typer.testing import CliRunner

from snowskin.cli.app import app


def test_the_store_is_measured_beside_its_limits(tmp_path):
    out = tmp_path / "rows.json"
    options = ["--size", "4KiB", "--size", "300KiB", "--clients", "2", "--cycle", "2MiB"]
    short = ["--rounds", "1", "--round", "0.01", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "store", *options, *short])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    wanted = {
        (transport, op, size)
        for transport in ("tcp", "shm")
        for op in ("get_into", "get", "get_many", "put_from")
        for size in (4096, 300 * 1024)
    }
    assert {(row["transport"], row["op"], row["size_bytes"]) for row in rows} == wanted
    for row in rows:
        assert row["clients"] == 2
        assert row["ratio"] == row["bytes_per_s"] / row["limit_bytes_per_s"]
        assert 0 < row["p50_s"] <= row["p99_s"]


def test_the_directory_is_measured_beside_an_echo(tmp_path):
    out = tmp_path / "rows.json"
    short = ["--objects", "100", "--rounds", "1", "--round", "0.01", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "directory", *short])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert [row["op"] for row in rows] == ["exists", "exists_many", "exists_many", "exists_many"]
    assert all(row["ratio"] == row["per_s"] / row["limit_per_s"] for row in rows)


def test_a_python_without_mooncake_is_named():
    result = CliRunner().invoke(app, ["bench", "store", "--peer-python", "/bin/false"])
    assert result.exit_code != 0
    assert "/bin/false cannot run Mooncake" in str(result.exception)
