"""Processes that are killed at any moment, and the start after it."""

import os
import random
import select
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from snowskin.store.ssd import MissReason, SsdTier
from snowskin.store.ssd.files import SegmentFile
from snowskin.store.ssd.record import PAGE_BYTES, RecordKind, parse_record
from tests.store.ssd_tiers import (
    KIB,
    MIB,
    fill,
    found,
    key,
    keys_held,
    small_config,
    value,
    write,
)

KILLS = 24
WINDOW = 60
LASTING = range(-130, -100)


def size_of(number):
    return 1 + number * 7919 % 50_000


def churn(directory):
    """Without end: write one key and remove that ``WINDOW`` before it; say what is certain.

    Lines: ``held N`` (all up to N are on disk), ``leaving N`` (N may be removed from now on),
    ``gone N`` (its removal is on disk).
    """
    config = small_config(capacity_bytes=6 * MIB)
    with SsdTier(directory, config) as tier:
        numbers = [int.from_bytes(name, "little", signed=True) for name in keys_held(tier)]
        first = max([-1, *numbers]) + 1
        for number in numbers:
            if 0 <= number < first - WINDOW:  # Its removal was not flushed.
                assert tier.remove(key(number))
        for number in LASTING:
            write(tier, key(number), value(number, size_of(-number)))
        tier.flush()
        print(f"held {first - 1}", flush=True)
        while True:
            for number in range(first, first + 1 + first % 7):
                write(tier, key(number), value(number, size_of(number)))
                print(f"leaving {number - WINDOW}", flush=True)
                tier.remove(key(number - WINDOW))
            flushed = tier.flush()
            assert flushed.complete
            assert flushed.failed_count == 0
            assert tier.stat().evicted_total == 0
            print(f"held {number}\ngone {number - WINDOW}", flush=True)
            first = number + 1


def spawn(name, directory):
    program = f"from pathlib import Path; import tests.store.test_ssd_restart as t; t.{name}"
    return subprocess.Popen(
        [sys.executable, "-c", f"{program}(Path({str(directory)!r}))"],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


def kill_later(child, delay_s):
    """All whole lines that a child says until it is killed, so long after its first one."""
    assert select.select([child.stdout], [], [], 60)[0]
    lines = [child.stdout.readline()]
    killer = threading.Timer(delay_s, child.kill)
    killer.start()
    lines += child.stdout.readlines()
    killer.join()
    assert child.wait() == -9
    return [line.decode().split() for line in lines if line.endswith(b"\n")]


def test_a_process_killed_at_any_moment_loses_nothing_that_was_flushed(tmp_path):
    rng = random.Random(11)
    newest = -1
    for _ in range(KILLS):
        said = kill_later(spawn("churn", tmp_path), rng.uniform(0.0, 0.4))
        last = {word: int(number) for word, number in said}
        newest = max(newest, last["held"])
        leaving, gone = last.get("leaving", newest - WINDOW), last.get("gone", -WINDOW)
        with SsdTier(tmp_path, small_config(capacity_bytes=6 * MIB)) as tier:
            stat = tier.stat()
            for number in LASTING:
                assert found(tier, key(number)) == value(number, size_of(-number))
            for number in range(max(0, leaving + 1), newest + 1):
                assert found(tier, key(number)) == value(number, size_of(number))
            for name in keys_held(tier):
                number = int.from_bytes(name, "little", signed=True)
                assert number in LASTING or number > gone
                expected = value(number, size_of(abs(number)))
                assert found(tier, name) == expected
                newest = max(newest, number)
            for number in range(max(0, leaving - 40), gone + 1):
                assert found(tier, key(number)) is MissReason.ABSENT
            assert tier.stat().corrupt_total == 0
            assert stat.evicted_total == 0
    assert newest > 500, "the log has been round several times"


def fill_and_die(directory):
    config = small_config(capacity_bytes=256 * MIB, segment_bytes=None, write_queue_bytes=16 * MIB)
    tier = SsdTier(directory, config)
    for number in range(260):
        write(tier, key(number), value(number, 256 * KIB))
    assert tier.flush().failed_count == 0
    os.kill(os.getpid(), 9)


def test_all_of_260_keys_survive_a_fill_of_four_times_the_memory_and_a_kill(tmp_path):
    """260 values of 256 KiB through a queue of 16 MiB, which is all the memory that there is."""
    assert spawn("fill_and_die", tmp_path).wait(timeout=120) == -9
    config = small_config(capacity_bytes=256 * MIB, segment_bytes=None, write_queue_bytes=16 * MIB)
    with SsdTier(tmp_path, config) as tier:
        assert len(tier.held()) == 260
        for number in range(260):
            assert found(tier, key(number)) == value(number, 256 * KIB)
        assert tier.stat().lost_at_start_total == 0


def test_neighbours_evicted_together_are_marked_by_one_page_and_stay_away_after_a_crash(tmp_path):
    with SsdTier(tmp_path / "lived", small_config()) as tier:
        fill(tier, range(1200))
        held = keys_held(tier)
        shutil.copytree(tmp_path / "lived", tmp_path / "crashed")
    kinds: Counter[RecordKind] = Counter()
    for path in (tmp_path / "crashed").glob("segment-*"):
        file = SegmentFile(path, direct=False)
        pages = path.read_bytes()
        for at in range(0, len(pages), PAGE_BYTES):
            header = parse_record(pages[at : at + PAGE_BYTES], file.seed(at // PAGE_BYTES))
            kinds[RecordKind.END if header is None else header.kind] += 1
        file.close()
    # Headers behind one that skips them still say that there is a value.
    dead_count = kinds[RecordKind.VALUE] + kinds[RecordKind.DEAD] - len(held)
    assert 0 < 4 * kinds[RecordKind.DEAD] < dead_count
    with SsdTier(tmp_path / "crashed", small_config()) as tier:
        assert keys_held(tier) == held
        assert tier.stat().lost_at_start_total == 0


def test_starting_again_and_again_fills_no_space(tmp_path):
    for number in range(40):
        with SsdTier(tmp_path, small_config(capacity_bytes=4 * MIB)) as tier:
            fill(tier, [number])
            assert len(tier.held()) == number + 1
            assert tier.stat().evicted_total == 0


def test_ten_thousand_values_are_found_again_sooner_than_they_were_written(tmp_path):
    config = small_config(
        capacity_bytes=160 * MIB, segment_bytes=None, write_queue_bytes=16 * MIB, batch_bytes=MIB
    )
    data = value(1, PAGE_BYTES)
    begin_s = time.perf_counter()
    with SsdTier(tmp_path, config) as tier:
        for number in range(10_000):
            write(tier, key(number), data)
        tier.flush()
        written_s = time.perf_counter() - begin_s
    with SsdTier(tmp_path, config) as tier:
        assert len(tier.held()) == 10_000
        assert tier.stat().open_s < written_s
        print(f"10,000 values: written in {written_s:.3f} s, found in {tier.stat().open_s:.3f} s")


@pytest.mark.parametrize("direct_io", [True, False])
def test_a_directory_is_read_with_or_without_the_page_cache(tmp_path, direct_io):
    with SsdTier(tmp_path, small_config(direct_io=direct_io)) as tier:
        fill(tier, range(50))
    with SsdTier(tmp_path, small_config(direct_io=not direct_io)) as tier:
        assert [found(tier, key(n)) for n in range(50)] == [value(n) for n in range(50)]
