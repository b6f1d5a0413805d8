import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest

from snowskin.store.ssd import (
    Flushed,
    HeldValue,
    Hit,
    Miss,
    MissReason,
    SsdConfig,
    SsdTier,
    WriteOutcome,
)
from snowskin.store.ssd.files import aligned_buffer
from snowskin.terms.errors import InvalidInput
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

SIZES = [0, 1, 4095, 4096, 4097, 20_000, 300_000, 900_000]


@pytest.fixture
def tier(tmp_path):
    with SsdTier(tmp_path, small_config()) as opened:
        yield opened


@pytest.mark.parametrize("direct_io", [True, False])
def test_values_of_any_size_are_read_back_from_queue_and_disk(tmp_path, direct_io):
    with SsdTier(tmp_path, small_config(direct_io=direct_io)) as tier:
        for size in SIZES:
            assert write(tier, key(size), value(size, size)) is WriteOutcome.QUEUED
            assert found(tier, key(size)) == value(size, size)
        assert tier.flush() == Flushed(complete=True, failed_count=0)
        for size in SIZES:
            assert tier.size(key(size)) == size
            assert found(tier, key(size)) == value(size, size)
            for offset in (0, 1):
                memory = aligned_buffer(size + 5000)[offset : offset + size + 7]
                assert tier.read_into(key(size), memory).value_bytes == size
                assert memory[:size].tobytes() == value(size, size)
        assert [held.value_bytes for held in tier.held()] == SIZES
        assert tier.stat().direct_io in {False, direct_io}


def test_a_missing_key_is_a_miss_and_not_an_empty_value(tier):
    assert write(tier, b"empty", b"") is WriteOutcome.QUEUED
    assert found(tier, b"empty") == b""
    assert tier.read(b"none") == Miss(MissReason.ABSENT)
    assert tier.read_into(b"none", bytearray(4)) == Miss(MissReason.ABSENT)
    assert tier.size(b"none") is None
    assert not tier.contains(b"none")
    assert not tier.remove(b"none")
    assert tier.stat().miss_total == 2


def test_a_key_is_written_once_and_says_so(tier):
    assert write(tier, b"k", b"one") is WriteOutcome.QUEUED
    for _ in range(2):
        assert write(tier, b"k", b"one") is WriteOutcome.HELD
        assert write(tier, b"k", b"two") is WriteOutcome.CONFLICT
        tier.flush()
    assert found(tier, b"k") == b"one"
    assert tier.remove(b"k")
    assert tier.read(b"k") == Miss(MissReason.ABSENT)
    assert write(tier, b"k", b"two") is WriteOutcome.QUEUED
    tier.flush()
    assert found(tier, b"k") == b"two"


def test_a_removed_key_stays_removed_over_a_restart_at_whichever_moment_it_was_removed(tmp_path):
    expected = set()
    with SsdTier(tmp_path, small_config()) as tier:
        for number in range(300):
            write(tier, key(number), value(number, 5000))
            expected.add(key(number))
            for old, gone in ((number, number % 2), (number - 10, number % 3 == 0)):
                if gone:
                    assert tier.remove(key(old)) == (key(old) in expected)
                    expected.discard(key(old))
        tier.flush()
        assert keys_held(tier) == expected
    with SsdTier(tmp_path, small_config()) as tier:
        assert keys_held(tier) == expected


def test_what_is_held_over_a_restart_is_what_was_held_before(tmp_path):
    rng = random.Random(5)
    with SsdTier(tmp_path, small_config(eviction="lfu")) as tier:
        for number in range(600):
            write(tier, key(number), value(number, rng.randrange(60_000)))
            tier.read(key(rng.randrange(number + 1)))
        tier.flush()
        expected = keys_held(tier)
        stat = tier.stat()
        assert stat.evicted_total == 600 - len(expected) > 100
        assert stat.moved_bytes > 0
    with SsdTier(tmp_path, small_config()) as tier:
        assert keys_held(tier) == expected
        assert tier.stat().lost_at_start_total == 0
        for held in tier.held():
            number = int.from_bytes(held.key, "little")
            assert found(tier, held.key) == value(number, held.value_bytes)


def test_held_values_come_with_their_size_and_depth_after_a_restart_too(tmp_path):
    expected = (HeldValue(b"a", 10, 3), HeldValue(b"b", 0, 0))
    with SsdTier(tmp_path, small_config()) as tier:
        write(tier, b"a", bytes(10), depth=3)
        write(tier, b"b", b"")
        tier.flush()
        assert tier.held() == expected
    with SsdTier(tmp_path, small_config()) as tier:
        assert tier.held() == expected


def test_changes_tell_what_reached_and_left_the_disk(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(3))
        assert tier.drain_changes() == ((key(0), key(1), key(2)), ())
        tier.remove(key(1))
        fill(tier, [7])
        tier.remove(key(7))
        assert tier.drain_changes() == ((), (key(1),))
    with SsdTier(tmp_path, small_config()) as tier:
        assert tier.drain_changes() == ((), ())


def test_every_second_read_from_disk_says_that_the_value_should_be_promoted(tier):
    fill(tier, [1])
    assert [tier.read(key(1)).promote for _ in range(4)] == [False, True, False, True]


def test_the_least_recently_used_goes_first(tier):
    fill(tier, range(100))
    for number in range(10):
        tier.read(key(number))
    fill(tier, range(100, 330))
    held = keys_held(tier)
    assert all(key(number) not in held for number in range(10, 60))
    first_in = next(number for number in range(10, 330) if key(number) in held)
    assert [number for number in range(first_in, 330) if key(number) not in held] == []


def test_the_files_never_exceed_the_capacity(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        for first in range(0, 2000, 50):
            fill(tier, range(first, first + 50), size=30_000)
            sizes = [path.stat().st_size for path in tmp_path.glob("segment-*")]
            assert sum(sizes) <= tier.stat().capacity_bytes
        assert sum(sizes) == tier.stat().capacity_bytes
        assert tier.stat().live_bytes < 0.8 * 7 * MIB


def test_values_nearly_as_large_as_a_file_go_in_and_out(tmp_path):
    config = small_config(capacity_bytes=3 * MIB)
    with SsdTier(tmp_path, config) as tier:
        size = tier.value_limit_bytes
        assert size == MIB - 3 * 4096
        for number in range(12):
            fill(tier, [number], size)
            assert found(tier, key(number)) == value(number, size)
        with pytest.raises(InvalidInput, match=f"takes {size} at most"):
            tier.write(key(99), bytes(size + 1))


def test_a_full_queue_says_so_and_what_it_took_is_kept(tmp_path):
    with SsdTier(tmp_path, small_config(write_queue_bytes=300 * KIB)) as tier:
        data = value(0, 100 * KIB)
        outcomes = {}
        for number in range(10_000):
            outcomes[number] = tier.write(key(number), data)
            if outcomes[number] is WriteOutcome.QUEUE_FULL:
                break
        assert outcomes[number] is WriteOutcome.QUEUE_FULL
        assert tier.stat().queue_full_total == 1
        assert tier.stat().queued_bytes <= 300 * KIB
        assert not tier.contains(key(number))
        assert tier.flush() == Flushed(complete=True, failed_count=0)
        assert tier.stat().written_total == number
        assert tier.write(key(number), data) is WriteOutcome.QUEUED


def test_a_flush_whose_time_runs_out_says_so(tier):
    for number in range(1000):
        write(tier, key(number), value(0))
        if not tier.flush(timeout_s=0.0).complete:
            break
    else:
        raise AssertionError("the disk was never behind")
    assert tier.flush().complete


def test_what_is_out_of_bounds_is_refused_with_its_figures(tier):
    with pytest.raises(InvalidInput, match="1025 bytes"):
        tier.write(bytes(1025), b"")
    with pytest.raises(InvalidInput, match="0 bytes"):
        tier.write(b"", b"")
    with pytest.raises(InvalidInput, match="contiguous"):
        tier.write(b"k", np.zeros((4, 4), np.uint8)[:, ::2])
    fill(tier, [1], 100)
    with pytest.raises(InvalidInput, match=r"99 bytes, the value 100; ask size\(\)"):
        tier.read_into(key(1), bytearray(99))
    with pytest.raises(InvalidInput, match="read-only"):
        tier.read_into(key(1), memoryview(bytes(100)))
    assert write(tier, bytes(1024), np.arange(6, dtype=np.uint32).reshape(2, 3)) is (
        WriteOutcome.QUEUED
    )
    assert np.frombuffer(found(tier, bytes(1024)), np.uint32).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_closed_tier_refuses_work(tmp_path):
    tier = SsdTier(tmp_path, small_config())
    tier.close()
    tier.close()
    for use in (tier.flush, lambda: tier.read(b"k"), lambda: tier.write(b"k", b"")):
        with pytest.raises(InvalidInput, match="closed"):
            use()


def test_closing_writes_what_is_queued(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        for number in range(50):
            write(tier, key(number), value(number))
    with SsdTier(tmp_path, small_config()) as tier:
        assert [found(tier, key(n)) for n in range(50)] == [value(n) for n in range(50)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity_bytes": 2 * MIB}, "at least 3 segment files"),
        ({"capacity_bytes": 5000 * MIB}, "at most 1024"),
        ({"segment_bytes": 5000}, "multiple of 4096"),
        ({"write_queue_bytes": 4096}, "write_queue_bytes is 4096"),
        ({"batch_bytes": 0}, "batch_bytes is 0"),
        ({"promote_after": 0}, "promote_after is 0"),
    ],
)
def test_options_out_of_bounds_are_refused(changes, message):
    with pytest.raises(InvalidInput, match=message):
        small_config(**changes)


def test_files_are_sized_by_the_capacity_so_that_their_number_stays_bounded():
    for capacity_bytes, file_mib in ((64 * MIB, 2), (6400 * MIB, 200), (2 << 40, 8192)):
        config = SsdConfig(capacity_bytes=capacity_bytes)
        assert config.new_segment_bytes == file_mib * MIB
        assert 3 <= config.segment_limit(config.new_segment_bytes) <= 256


def test_an_unknown_eviction_policy_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="'fifo'"):
        SsdTier(tmp_path, small_config(eviction="fifo"))


def test_a_directory_is_of_one_tier_at_a_time_and_the_other_is_named(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from snowskin.store.ssd import SsdConfig, SsdTier\n"
        "tier = SsdTier(Path(sys.argv[1]), SsdConfig(capacity_bytes=64 << 20))\n"
        "print('open', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(InvalidInput, match=f"in use by process {child.pid};"):
            SsdTier(tmp_path, small_config())
    finally:
        child.kill()
        child.communicate()
    with (
        SsdTier(tmp_path, small_config()),
        pytest.raises(InvalidInput, match=f"in use by process {os.getpid()};"),
    ):
        SsdTier(tmp_path, small_config())


def test_a_wrong_directory_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path in (file, file / "below"):
        with pytest.raises(InvalidInput, match="cannot be used"):
            SsdTier(path, small_config())
    with SsdTier(tmp_path / "new" / "deep", small_config()):
        pass


def test_files_of_others_are_left_alone_and_of_several_sizes_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for name, size in (("a", MIB), ("b", 2 * MIB)):
        with SsdTier(tmp_path / name, small_config(segment_bytes=size)) as tier:
            fill(tier, [1])
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, [1])
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "a" / "segment-00000.snow").rename(tmp_path / "b" / "segment-00009.snow")
    with pytest.raises(InvalidInput, match="several sizes"):
        SsdTier(tmp_path / "b", small_config())


def test_a_smaller_capacity_keeps_what_fits_and_a_larger_one_everything(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(200))
        before = keys_held(tier)
    with SsdTier(tmp_path, small_config(capacity_bytes=16 * MIB)) as tier:
        assert keys_held(tier) == before
    with SsdTier(tmp_path, small_config(capacity_bytes=4 * MIB)) as tier:
        files = list(tmp_path.glob("segment-*"))
        assert len(files) <= 4
        kept = keys_held(tier)
        assert len(before) / 4 < len(kept) < len(before)
        assert kept < before
        fill(tier, range(1000, 1200))
        for held in tier.held():
            assert found(tier, held.key) == value(int.from_bytes(held.key, "little"))


def test_readers_and_writers_at_once_never_see_a_wrong_byte(tmp_path):
    count, wrong, hits, stop = 60, [], [], threading.Event()

    def size_of(number):
        return 1 + number * 2917 % 150_000

    with SsdTier(tmp_path, small_config(capacity_bytes=4 * MIB)) as tier:

        def writer(seed):
            rng = random.Random(seed)
            for _ in range(600):
                number = rng.randrange(count)
                write(tier, key(number), value(number, size_of(number)))
                if rng.random() < 0.1:
                    tier.remove(key(rng.randrange(count)))

        def reader(seed):
            rng = random.Random(seed)
            memory = aligned_buffer(160_000)[seed % 2 :]
            while not stop.is_set():
                number = rng.randrange(count)
                answer = tier.read_into(key(number), memory)
                if isinstance(answer, Hit):
                    hits.append(number)
                    if memory[: answer.value_bytes].tobytes() != value(number, size_of(number)):
                        wrong.append(number)
                elif answer.reason is not MissReason.ABSENT:
                    wrong.append(answer)

        readers = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
        writers = [threading.Thread(target=writer, args=(seed,)) for seed in range(10, 12)]
        for thread in readers + writers:
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        for thread in readers:
            thread.join()
        assert wrong == []
        assert len(hits) > 100
        stat = tier.stat()
        assert stat.evicted_total > 0
        assert stat.moved_bytes > 0
        assert stat.corrupt_total == stat.disk_error_total == 0
