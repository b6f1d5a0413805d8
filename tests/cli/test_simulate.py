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
        (["--dram-gb", "0"], "--dram-gb 0: give more than 0"),
        (["--sweep", "prefill=1,2", "--plots", "here"], "--plots does not go with --sweep"),
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
