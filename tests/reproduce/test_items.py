"""The table of items, their files, and what a user sees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from snowskin.reproduce.items import ITEMS, items_named
from snowskin.reproduce.report import Report, Row, report_json, row
from snowskin.reproduce.running import run_items
from snowskin.reproduce.summary import summary_table
from snowskin.reproduce.workloads import RELEASED_FILES, Scale, workload
from snowskin.terms.errors import InvalidInput
from snowskin.trace.formats import write_mooncake
from snowskin.trace.shapes import SHAPES
from snowskin.trace.synthesise import synthesise

FEW = Scale(60)


def snowskin(*arguments: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "snowskin", "reproduce", *arguments],
        env=os.environ | {"PYTHONHASHSEED": seed, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_table_and_figure_of_both_papers_has_an_item() -> None:
    fast = [f"fast-fig{number}" for number in (1, *range(5, 16))]
    arxiv = ["arxiv-table1", "arxiv-table3", *[f"arxiv-fig{n}" for n in (7, 8, 11, 12, 13)]]
    wanted = {"fast-table1", "fast-table2", *fast, *arxiv, "arxiv-fig9-10"}
    assert wanted == {name for name in ITEMS if not name.startswith("beyond-")}


def test_an_unknown_item_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"fast-fig99.*fast-fig14"):
        items_named(["fast-fig99"])


@pytest.mark.parametrize("name", ["fast-fig5", "fast-fig8", "fast-fig15", "arxiv-fig9-10"])
def test_an_item_writes_a_report_of_exactly_the_promised_shape(name: str, tmp_path: Path) -> None:
    list(run_items([ITEMS[name]], folder=tmp_path, scale=FEW, jobs=1))
    written = json.loads((tmp_path / f"{name}.json").read_bytes())
    assert list(written) == ["item", "rows", "workload", "definition", "assumptions"]
    assert written["item"] == name
    assert written["rows"]
    for each in written["rows"]:
        assert list(each) == ["name", "paper", "ours", "relative_error"]
        if each["paper"] and each["ours"] is not None:
            error = each["ours"] / each["paper"] - 1
            assert each["relative_error"] == pytest.approx(error, abs=1e-4)
        else:
            assert each["relative_error"] is None
    assert "the first 60 of" in written["workload"]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["tool-agent", "synthetic"])
def test_a_released_trace_is_played_where_it_is_at_hand(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = msgspec.structs.replace(SHAPES[name], requests=50)
    write_mooncake(tmp_path / RELEASED_FILES[name], synthesise(shape, seed=0))
    monkeypatch.setenv("SNOWSKIN_TRACES", str(tmp_path))
    workload.cache_clear()
    try:
        played = workload(name, Scale())
    finally:
        workload.cache_clear()
    assert played.origin == f"{name}: the released trace, 50 requests"
    assert len(played.trace) == 50


def test_one_seed_gives_the_same_bytes_in_any_process_and_order_of_hashing(tmp_path: Path) -> None:
    names = ["fast-fig10", "fast-fig11", "fast-fig12", "arxiv-table3"]
    for seed in ("0", "1"):
        done = snowskin(
            *names, "--requests", "80", "--jobs", "2", "--out", str(tmp_path / seed), seed=seed
        )
        assert done.returncode == 0, done.stderr
    for name in names:
        for file in (f"{name}.json", f"{name}.png"):
            first, second = (tmp_path / seed / file for seed in ("0", "1"))
            assert first.read_bytes() == second.read_bytes(), file


def test_the_command_prints_the_papers_value_beside_ours_and_its_error(tmp_path: Path) -> None:
    done = snowskin("fast-table1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"threshold on a800_tp8, GB/s\W+6\W+5\.859\W+-2\.3%", done.stdout)
    assert "Definition:" in done.stdout
    assert "fast-table1" in (tmp_path / "summary.md").read_text()


def test_the_list_names_every_item() -> None:
    done = snowskin("--list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(ITEMS)


@pytest.mark.parametrize(
    "arguments", [(), ("--all", "fast-fig1"), ("nonsense",), ("--all", "--jobs", "0")]
)
def test_a_wrong_command_ends_with_one_clear_line(arguments: tuple[str, ...]) -> None:
    done = snowskin(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("snowskin: ")
    assert done.stderr.count("\n") == 1


def test_reproduction_runs_without_torch() -> None:
    code = (
        "import sys; from snowskin.reproduce.items import ITEMS; "
        "from snowskin.reproduce import drawing, running, summary; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'zmq')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_row_keeps_counts_whole_and_cuts_noise() -> None:
    assert row("requests", 10, 11) == Row("requests", 10, 11, 0.1)
    assert row("time, s", 3.0, 2.0000001) == Row("time, s", 3.0, 2.0, -0.333333)
    assert row("nothing printed", None, 1.5) == Row("nothing printed", None, 1.5, None)
    report = Report("x", (row("requests", 10, 11),), "none", "none", ())
    assert json.loads(report_json(report))["rows"][0]["paper"] == 10


def test_the_summary_counts_what_is_near() -> None:
    rows = (row("a", 1.0, 1.05), row("b", 1.0, 2.0), row("c", None, 3.0))
    report = Report("fast-fig5", rows, "none", "none", ())
    line = summary_table([report]).splitlines()[-1]
    assert line == "| `fast-fig5` | TTFT by scheduler | 2 | 1 | 52.5% | 100.0% |"
