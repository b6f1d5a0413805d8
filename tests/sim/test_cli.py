from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from snowskin.trace.formats import write_trace
from snowskin.trace.shapes import SHAPES
from snowskin.trace.synthesise import synthesise


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = msgspec.structs.replace(SHAPES["conversation"], requests=300)
    path = tmp_path_factory.mktemp("trace") / "conversation.jsonl"
    write_trace(path, synthesise(shape, seed=0), block_tokens=512, name="conversation")
    return path


def snowskin(*arguments: object, hash_seed: int = 0) -> subprocess.CompletedProcess[str]:
    code = "from snowskin.cli.app import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_one_seed_gives_the_same_bytes_under_any_hash_seed(
    trace_file: Path, tmp_path: Path
) -> None:
    written = set()
    for hash_seed in (0, 1, 2):
        path = tmp_path / f"{hash_seed}.json"
        done = snowskin(
            "simulate", "--trace", trace_file, "--prefill", 3, "--decode", 2, "--speed", 4,
            "--blocks", 700, "--admission", "predicted", "--kill", "prefill-1@5+5",
            "--seed", 7, "--json", path, hash_seed=hash_seed,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        written.add(path.read_bytes())
    assert len(written) == 1
    report = json.loads(written.pop())
    assert {
        "requests", "completed", "rejected", "effective_ratio", "ttft_mean_s", "ttft_p90_s",
        "tbt_mean_s", "tbt_p90_s", "hit_ratio", "prefill_busy_s", "transfer_bytes", "wall_s",
        "seed", "definitions",
    } <= set(report)  # fmt: skip
    assert report["requests"] == 300
    assert report["seed"] == 7


def test_a_sweep_gives_one_run_for_each_value_and_jobs_change_nothing(
    trace_file: Path, tmp_path: Path
) -> None:
    reports = []
    for jobs in (1, 2):
        path = tmp_path / f"{jobs}.json"
        done = snowskin(
            "simulate", "--trace", trace_file, "--requests", 100, "--sweep", "prefill=2..4",
            "--jobs", jobs, "--json", path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        reports.append(path.read_bytes())
    assert reports[0] == reports[1]
    assert [run["prefill"] for run in json.loads(reports[0])["runs"]] == [2, 3, 4]


def test_pictures_are_drawn(trace_file: Path, tmp_path: Path) -> None:
    done = snowskin("simulate", "--trace", trace_file, "--requests", 60, "--plots", tmp_path)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == ["hits.png", "latency.png", "load.png", "replicas.png"]


def test_a_cache_curve_rises_to_its_limit(trace_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    done = snowskin(
        "cache-curve", "--trace", trace_file, "--policy", "lru,lfu,length-aware",
        "--blocks", "10,100,inf", "--json", path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    points = json.loads(path.read_bytes())["points"]
    for policy in ("lru", "lfu", "length-aware"):
        ratios = [point["hit_ratio"] for point in points if point["policy"] == policy]
        assert ratios == sorted(ratios)
        assert ratios[-1] > 0.05


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--policy", "best"], "kvcache-centric"),
        (["--hardware", "abacus"], "a800_tp8"),
        (["--speed", "0"], "speed"),
        (["--kill", "prefill-0"], "NODE@SECOND+RESTART_S"),
        (["--sweep", "moon=1..2"], "SETTING"),
        (["--prefill", "0"], "at least 1"),
    ],
)
def test_bad_options_end_with_one_clear_line(
    trace_file: Path, arguments: list[str], told: str
) -> None:
    done = snowskin("simulate", "--trace", trace_file, *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_simulation_needs_neither_torch_nor_zmq() -> None:
    code = (
        "import sys, snowskin.sim.simulate, snowskin.sim.sweep, snowskin.sim.cache_curve, "
        "snowskin.trace.formats, snowskin.cli.simulate; "
        "bad = {'torch', 'zmq', 'transformers', 'fastapi', 'matplotlib'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
