"""What ``simulate`` and ``cache-curve`` print, and what they refuse."""

from __future__ import annotations

import pytest

from snowskin.cli.simulate import figure
from tests.cli.serving import snowskin


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("trace") / "t.jsonl")
    made = snowskin("trace", "synthesise", path, "--requests", "50", "--seed", "1")
    assert made.returncode == 0, made.stderr
    return path


def test_a_run_is_told_with_units_and_with_what_counts_as_effective(trace: str) -> None:
    told = snowskin("simulate", "--trace", trace, "--ttft-slo", "5", "--tbt-slo", "0.2").stdout
    assert "Effective: TTFT within 5 s and TBT within 0.2 s." in told
    rows = {row.split("│")[1].strip(): row.split("│")[2] for row in told.splitlines() if "│" in row}
    assert rows["requests"].strip() == "50"
    assert rows["tbt_mean_s"].endswith(" ms ")
    assert rows["effective_ratio"].endswith("% ")


def test_a_sweep_has_a_column_for_each_value(trace: str) -> None:
    told = snowskin("simulate", "--trace", trace, "--sweep", "prefill=2..3").stdout
    assert "prefill 2 ┃ " in told
    assert "prefill 3 ┃" in told


def test_what_does_not_go_side_by_side_comes_in_tables_below_each_other_with_no_figure_cut(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = snowskin("simulate", "--trace", trace, "--sweep", "prefill=4..12").stdout
    heads = [row.split("┃")[2:-1] for row in told.splitlines() if row.startswith("┃ measure")]
    assert [len(row) for row in heads] == [4, 4, 1]
    named = [head.strip() for row in heads for head in row]
    assert named == [f"prefill {count}" for count in range(4, 13)]
    assert "…" not in told
    monkeypatch.setenv("COLUMNS", "20")
    narrow = snowskin("simulate", "--trace", trace, "--sweep", "prefill=4..5").stdout
    assert "┃ prefill 4 ┃" in narrow
    assert "┃ prefill 5 ┃" in narrow


def test_a_rival_refuses_what_it_would_not_heed(trace: str) -> None:
    command = ["simulate", "--trace", trace, "--system", "vllm"]
    for option in (["--sweep", "prefill=1,2"], ["--kill", "prefill-0@1+1"], ["--check"]):
        ran = snowskin(*command, *option)
        assert ran.returncode == 2
        assert f"{option[0]} does not go with --system vllm" in ran.stderr
    assert snowskin(*command).returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--system", "sglang"], "--system sglang: give mooncake, vllm"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere to write out.json into"),
        (["--dram-gb", "0"], "--dram-gb 0: give more than 0"),
        (["--sweep", "prefill=1,2", "--plots", "here"], "--plots does not go with --sweep"),
        (["--sweep", "speed=1..3"], "FIRST..LAST is for whole numbers alone, so list each"),
        (["--kill", "prefill-9@1+1"], "there is no node 'prefill-9' to fail; there are prefill-0"),
        (["--kill", "prefill-0@1+-3"], "restart_s of a fault of prefill-0 must be at least 0"),
        (["--kill", "prefill-0@nan+3"], "at_s of a fault of prefill-0 must be at least 0"),
        (["--slow", "decode-0@1+3*-1"], "factor of a fault of decode-0 must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(
    trace: str, options: list[str], words: str
) -> None:
    ran = snowskin("simulate", "--trace", trace, *options)
    assert ran.returncode == 2
    assert words in ran.stderr


def test_failed_requests_are_told_why(trace: str) -> None:
    told = snowskin("simulate", "--trace", trace, "--blocks", "5").stdout
    assert "a prompt outgrew --dram-gb or --blocks" in told


def test_a_cache_curve_names_what_it_can_draw(trace: str) -> None:
    ran = snowskin("cache-curve", "--trace", trace, "--policy", "lru,fifo")
    assert ran.returncode == 2
    assert "no eviction policy 'fifo'; choose from lru, lfu, length-aware, belady" in ran.stderr


def test_a_cache_curve_states_its_definition_in_full_lines(trace: str) -> None:
    told = snowskin("cache-curve", "--trace", trace, "--blocks", "10,inf").stdout
    assert "Block-weighted: blocks in the longest cached prefix of each prompt" in told


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("requests", 1234, "1,234"),
        ("ttft_mean_s", 0.0314, "31.4 ms"),
        ("ttft_mean_s", 1234.5, "1,234.50 s"),
        ("span_s", 0.0, "0.0 ms"),
        ("hit_ratio", 0.256, "25.6%"),
        ("transfer_bytes", 1.5e12, "1.5 TB"),
        ("transfer_bytes", 12, "12 B"),
        ("goodput_requests_per_s", 0.3594, "0.359 /s"),
        ("mean_batch", 6.85, "6.85"),
        ("fetches", None, "–"),
    ],
)
def test_a_figure_has_the_unit_of_its_name(name: str, value: float | None, told: str) -> None:
    assert figure(name, value) == told
