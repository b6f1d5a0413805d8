"""Damaged files, full disks and failing disks, all of them real."""

import contextlib
import os
import shutil
import subprocess
import time

import pytest

from snowskin.store.ssd import (
    WRITE_RETRY_S,
    Flushed,
    Hit,
    Miss,
    MissReason,
    SsdTier,
    WriteOutcome,
)
from snowskin.store.ssd.files import SegmentFile, aligned_buffer
from snowskin.store.ssd.record import PAGE_BYTES
from snowskin.terms.errors import InvalidInput
from tests.store.ssd_tiers import (
    KIB,
    MIB,
    descriptors,
    fill,
    flip_bit,
    found,
    key,
    keys_held,
    page_of,
    small_config,
    value,
    write,
)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("a tmpfs cannot be mounted here: it takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def failing_disk(directory, path):
    """While it lasts, the open segment files of a directory are another file instead."""
    saved = {number: os.dup(number) for number in descriptors(directory)}
    other = os.open(path, os.O_RDWR)
    for number in saved:
        os.dup2(other, number)
    os.close(other)
    yield
    for number, copy in saved.items():
        os.dup2(copy, number)
        os.close(copy)


def test_a_flipped_bit_in_a_value_is_a_counted_miss_and_the_others_are_whole(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(20))
        path, offset = page_of(tmp_path, value(7))
        flip_bit(path, offset + 12_345)
        memory = bytearray(20 * KIB)
        assert tier.read_into(key(7), memory) == Miss(MissReason.CORRUPT)
        assert tier.read_into(key(7), memory) == Miss(MissReason.ABSENT)
        assert tier.read_into(key(8), memory) == Hit(20 * KIB, promote=False)
        assert tier.stat().corrupt_total == 1
        assert tier.stat().miss_total == 2
        assert tier.stat().value_count == 19
        assert tier.drain_changes()[0] == tuple(key(n) for n in range(20) if n != 7)
        assert write(tier, key(7), value(7)) is WriteOutcome.QUEUED
        tier.flush()
    with SsdTier(tmp_path, small_config()) as tier:
        assert [found(tier, key(n)) for n in range(20)] == [value(n) for n in range(20)]


def test_a_flipped_bit_in_a_value_is_found_after_a_restart_too(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(100))
    path, offset = page_of(tmp_path, value(7))
    flip_bit(path, offset)
    with SsdTier(tmp_path, small_config()) as tier:
        assert found(tier, key(7)) is MissReason.CORRUPT
        assert [found(tier, key(n)) for n in range(100) if n != 7] == [
            value(n) for n in range(100) if n != 7
        ]


@pytest.mark.parametrize("number", [0, 7, 19])
def test_a_flipped_bit_in_a_header_costs_one_value_and_is_counted(tmp_path, number):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(20))
    path, offset = page_of(tmp_path, value(number))
    flip_bit(path, offset - PAGE_BYTES + 10)
    with SsdTier(tmp_path, small_config()) as tier:
        assert tier.stat().lost_at_start_total == 1
        assert keys_held(tier) == {key(n) for n in range(20) if n != number}
        assert found(tier, key(number)) is MissReason.ABSENT
        for other in range(20):
            if other != number:
                assert found(tier, key(other)) == value(other)
        fill(tier, [number])
    with SsdTier(tmp_path, small_config()) as tier:
        assert keys_held(tier) == {key(n) for n in range(20)}


@pytest.mark.parametrize("page", [0, 1])
def test_a_damaged_header_of_a_file_has_a_second_copy(tmp_path, page):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(20))
    flip_bit(tmp_path / "segment-00000.snow", page * PAGE_BYTES + 20)
    with SsdTier(tmp_path, small_config()) as tier:
        assert len(keys_held(tier)) == 20


def test_a_file_that_lost_both_headers_is_used_anew(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(100))
        before = keys_held(tier)
    flip_bit(tmp_path / "segment-00000.snow", 20)
    flip_bit(tmp_path / "segment-00000.snow", PAGE_BYTES + 20)
    with SsdTier(tmp_path, small_config()) as tier:
        kept = keys_held(tier)
        assert kept < before
        assert len(kept) > 50
        fill(tier, range(1000, 1100))
        for held in tier.held():
            assert found(tier, held.key) == value(int.from_bytes(held.key, "little"))


@pytest.mark.parametrize("cut_pages", [1, 3, 6])
def test_a_torn_last_record_is_dropped_at_the_start(tmp_path, cut_pages):
    """As a crash in mid-write leaves it: the front is there, the rest is what was there before."""
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(20))
        path, offset = page_of(tmp_path, value(19))
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in tmp_path.glob("segment-*"):
            shutil.copy(file, copy)
    with (copy / path.name).open("r+b") as file:
        file.seek(offset + (5 - cut_pages) * PAGE_BYTES)
        file.write(bytes(cut_pages * PAGE_BYTES))
    with SsdTier(copy, small_config()) as tier:
        assert keys_held(tier) == {key(n) for n in range(19)}
        # Without its header there was nothing of it; otherwise it is counted.
        assert tier.stat().lost_at_start_total == (0 if cut_pages == 6 else 1)
        assert tier.stat().corrupt_total == 0
        fill(tier, [19])
        assert [found(tier, key(n)) for n in range(20)] == [value(n) for n in range(20)]


def test_a_file_cut_short_costs_what_lay_beyond(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(20))
    path, offset = page_of(tmp_path, value(10))
    os.truncate(path, offset + 100)
    with SsdTier(tmp_path, small_config()) as tier:
        answers = [found(tier, key(n)) for n in range(20)]
        assert answers[:10] == [value(n) for n in range(10)]
        assert set(answers[10:]) <= {MissReason.ABSENT, MissReason.CORRUPT}
        fill(tier, range(100, 500))
        for held in tier.held():
            assert found(tier, held.key) == value(int.from_bytes(held.key, "little"))


def test_a_value_that_is_the_image_of_a_file_brings_nothing_back(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(5))
        image = (tmp_path / "segment-00000.snow").read_bytes()[2 * PAGE_BYTES : 500 * KIB]
        for number in range(5):
            tier.remove(key(number))
        write(tier, b"image", image)
        tier.flush()
    path, offset = page_of(tmp_path, image)
    flip_bit(path, offset - PAGE_BYTES)  # The search for the next record leads into the image.
    with SsdTier(tmp_path, small_config()) as tier:
        assert tier.held() == ()


def test_a_disk_without_room_for_the_capacity_is_used_as_far_as_it_goes(small_disk):
    with SsdTier(small_disk, small_config()) as tier:
        for first in range(0, 600, 20):
            fill(tier, range(first, first + 20))
            assert found(tier, key(first + 19)) == value(first + 19)
        stat = tier.stat()
        assert stat.segment_count == 5  # What 6 MiB have room for, beside the directory's own.
        assert stat.disk_full_total > 0
        assert stat.evicted_total > 0
        before = keys_held(tier)
        for name in before:
            assert found(tier, name) == value(int.from_bytes(name, "little"))
    with SsdTier(small_disk, small_config()) as tier:
        assert keys_held(tier) == before


def test_a_full_disk_refuses_writes_and_takes_them_again_once_it_has_room(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(5 * MIB + 512 * KIB))
    with SsdTier(small_disk, small_config()) as tier:
        assert write(tier, key(1), value(1)) is WriteOutcome.QUEUED
        assert tier.flush() == Flushed(complete=True, failed_count=1)
        assert tier.flush() == Flushed(complete=True, failed_count=0)
        assert tier.read(key(1)) == Miss(MissReason.ABSENT)
        assert tier.write(key(2), value(2)) is WriteOutcome.REFUSED
        stat = tier.stat()
        assert stat.disk_full_total == stat.failed_write_total == stat.refused_total == 1
        assert stat.segment_count == 0
        assert not list(small_disk.glob("segment-*"))
        ballast.unlink()
        time.sleep(WRITE_RETRY_S)
        fill(tier, range(20))
        assert [found(tier, key(n)) for n in range(20)] == [value(n) for n in range(20)]


def test_a_disk_that_fills_up_in_mid_write_fails_these_writes_alone(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(10))
        with failing_disk(tmp_path, "/dev/full"):
            assert write(tier, key(100), value(100)) is WriteOutcome.QUEUED
            assert tier.flush().failed_count == 1
            assert tier.write(key(101), value(101)) is WriteOutcome.REFUSED
            assert tier.stat().disk_full_total == 1
        assert keys_held(tier) == {key(n) for n in range(10)}
        time.sleep(WRITE_RETRY_S)
        fill(tier, range(100, 110))
        assert found(tier, key(5)) == value(5)
    with SsdTier(tmp_path, small_config()) as tier:
        assert len(tier.held()) == 20


def test_a_failing_disk_is_a_counted_miss_or_a_failed_write_and_the_rest_stays(tmp_path):
    with SsdTier(tmp_path, small_config()) as tier:
        fill(tier, range(10))
        # At the offsets of a small segment nothing is mapped: reads and writes give EIO.
        with failing_disk(tmp_path, "/proc/self/mem"):
            assert tier.read(key(3)) == Miss(MissReason.DISK_ERROR)
            assert tier.read(key(3)) == Miss(MissReason.ABSENT)
            errors = tier.stat().disk_error_total
            assert errors >= 1
            assert write(tier, key(100), value(100)) is WriteOutcome.QUEUED
            flushed = tier.flush()
            assert flushed.failed_count == 1
            assert not flushed.complete
            assert tier.stat().disk_error_total > errors
        for number in (0, 1, 2, 4, 5, 6, 7, 8, 9):
            assert found(tier, key(number)) == value(number)
        assert tier.stat().disk_full_total == tier.stat().corrupt_total == 0
        time.sleep(WRITE_RETRY_S)
        fill(tier, range(100, 110))


def test_a_disk_that_fails_while_values_are_moved_loses_no_readable_value(tmp_path):
    with SsdTier(tmp_path, small_config(capacity_bytes=5 * MIB)) as tier:
        for first in range(0, 140, 10):  # Holes in all files, so that values must be moved.
            fill(tier, range(first, first + 10))
            tier.remove(key(first))
        tier.flush()
        before = keys_held(tier)
        with failing_disk(tmp_path, "/dev/full"):
            for number in range(1000, 1010):
                tier.write(key(number), value(number))
            tier.flush()
        time.sleep(WRITE_RETRY_S)
        kept = keys_held(tier)
        assert kept <= before
        for name in kept:
            assert found(tier, name) == value(int.from_bytes(name, "little"))
        assert len(before) - len(kept) == tier.stat().evicted_total
        fill(tier, range(2000, 2100))
        assert tier.stat().corrupt_total == 0


def test_pages_that_the_disk_does_not_read_are_salvaged_around(tmp_path):
    file = SegmentFile.create(tmp_path / "segment-00000.snow", MIB, 1, direct=True)
    pages = aligned_buffer(4 * PAGE_BYTES)
    pages[:] = 7
    file.write(pages, 2)
    assert file.salvage(pages, 2) == 0
    assert (pages == 7).all()
    with failing_disk(tmp_path, "/proc/self/mem"):
        assert file.salvage(pages, 2) == 4
    assert not pages.any()
    file.close()


def test_a_disk_that_fails_at_the_start_is_refused_with_its_error(tmp_path):
    (tmp_path / "segment-00000.snow").symlink_to("/proc/self/mem")
    with pytest.raises(InvalidInput, match="Input/output error"):
        SsdTier(tmp_path, small_config())
