"""The store's benchmark, short: which rows there are, and that each stands beside a limit."""

import subprocess
import sys
from importlib.util import find_spec

import msgspec
import pytest

from snowskin.store.bench.data import bench_store
from snowskin.store.bench.rows import StoreBenchConfig, StoreRow
from snowskin.terms.errors import InvalidInput
from snowskin.transfer.transports.nixl import MODULES

NIXL = any(find_spec(name.partition(".")[0]) is not None for name in MODULES)
SHORT = {"sizes": (4096,), "clients": (2,), "cycle_bytes": 1 << 20, "rounds": 1, "round_s": 0.01}


def test_every_operation_of_every_transport_is_a_row_beside_its_limit():
    shown = []
    rows = bench_store(StoreBenchConfig(**SHORT), shown.append)
    assert shown == list(rows)
    assert [(row.transport, row.op) for row in rows] == [
        *(("tcp", op) for op in ("get_into", "get", "get_many", "put_from")),
        *(("shm", op) for op in ("get_into", "get", "get_many", "put_from")),
        *(("tcp", op) for op in ("pull", "pull_many", "pull_busy", "pull_inside")),
        *(("shm", op) for op in ("pull", "pull_many")),
    ]
    for row in rows:
        assert (row.size_bytes, row.clients) == (4096, 2)
        assert row.ratio == row.bytes_per_s / row.limit_bytes_per_s > 0
        assert 0 < row.p50_s <= row.p99_s


def test_reads_from_a_busy_owner_go_through_its_messenger_as_from_an_idle_one():
    config = StoreBenchConfig(
        sizes=(1 << 20,),
        transports=("tcp",),
        ops=("pull_busy", "pull_inside"),
        clients=(1,),
        cycle_bytes=4 << 20,
        rounds=2,
        round_s=0.1,
    )
    messenger, inside = bench_store(config, lambda row: row)
    assert messenger.ratio > 1.5 * inside.ratio


@pytest.mark.parametrize("size_bytes", [5000, 1 << 20])
def test_the_ssd_tier_is_measured_where_it_is_said_and_leaves_nothing(tmp_path, size_bytes):
    options = {**SHORT, "sizes": (size_bytes,), "cycle_bytes": 8 << 20}
    config = StoreBenchConfig(transports=("ssd",), ssd=str(tmp_path), **options)
    rows = bench_store(config, lambda row: row)
    assert [(row.transport, row.op) for row in rows] == [("ssd", "read"), ("ssd", "write")]
    assert all(row.bytes_per_s > 0 < row.limit_bytes_per_s for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_used_is_refused_by_name(tmp_path):
    options = {**SHORT, "sizes": (1 << 20,), "transports": ("ssd",)}
    with pytest.raises(InvalidInput, match=r"cannot use .*absent"):
        bench_store(StoreBenchConfig(ssd=str(tmp_path / "absent"), **options), print)
    options["sizes"] = (1 << 40,)
    with pytest.raises(InvalidInput, match="choose another directory, a lower --cycle"):
        bench_store(StoreBenchConfig(ssd=str(tmp_path), **options), print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not NIXL, reason="NIXL is not installed: snowskin[nixl]")
def test_nixl_moves_blocks():
    config = StoreBenchConfig(transports=("nixl",), **SHORT)
    rows = bench_store(config, lambda row: row)
    assert [row.op for row in rows] == ["pull", "pull_many", "pull_busy"]


@pytest.mark.skipif(NIXL, reason="NIXL is installed")
def test_nixl_that_is_not_installed_is_left_out_unless_it_was_asked_for(tmp_path):
    with pytest.raises(InvalidInput, match=r"install snowskin\[nixl\]"):
        bench_store(StoreBenchConfig(transports=("nixl",), **SHORT), lambda row: row)
    file = tmp_path / "rows.json"
    short = ["--size", "4KiB", "--clients", "1", "--rounds", "1", "--round", "0.01"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "snowskin",
            "bench",
            "store",
            "--op",
            "pull",
            *short,
            "--json",
            str(file),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "no rows of nixl, which is not installed" in done.stderr
    rows = msgspec.json.decode(file.read_bytes(), type=list[StoreRow])
    assert [row.transport for row in rows] == ["tcp", "shm"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"transports": ("pigeon",)}, "'pigeon' is not among transports: tcp, shm, nixl, ssd"),
        ({"ops": ("steal",)}, "'steal' is not among ops"),
        ({"transports": ("ssd",)}, "give --ssd DIRECTORY"),
        ({"transports": ("nixl",), "ops": ("get",)}, "nothing of get goes over nixl; choose from"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(wrong, message):
    with pytest.raises(InvalidInput, match=message):
        StoreBenchConfig(**wrong)
