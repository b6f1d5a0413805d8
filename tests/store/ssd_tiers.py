"""Small tiers, and hands on their files, for tests."""

import os
import random
import time
from pathlib import Path

from snowskin.store.ssd import SsdConfig, Value, WriteOutcome
from snowskin.store.ssd.record import PAGE_BYTES

KIB = 1 << 10
MIB = 1 << 20


def small_config(**changes):
    options = {
        "capacity_bytes": 8 * MIB,
        "segment_bytes": MIB,
        "write_queue_bytes": 2 * MIB,
        "batch_bytes": 256 * KIB,
    }
    return SsdConfig(**(options | changes))


def key(number):
    return number.to_bytes(16, "little", signed=True)


def value(number, size=20 * KIB):
    """The one right value of a number."""
    return random.Random(number).randbytes(size)


def write(tier, name, data, **options):
    """Write, waiting for room in the queue as long as need be."""
    while (outcome := tier.write(name, data, **options)) is WriteOutcome.QUEUE_FULL:
        time.sleep(0.0005)
    return outcome


def fill(tier, numbers, size=20 * KIB):
    for number in numbers:
        assert write(tier, key(number), value(number, size)) is WriteOutcome.QUEUED
    flushed = tier.flush()
    assert flushed.complete
    assert flushed.failed_count == 0


def found(tier, name):
    """The bytes of a value, or why there are none."""
    answer = tier.read(name)
    return answer.data.tobytes() if isinstance(answer, Value) else answer.reason


def keys_held(tier):
    return {held.key for held in tier.held()}


def page_of(directory, data):
    """The file in which a value lies, and the offset of its first byte."""
    for path in sorted(directory.glob("segment-*")):
        content = path.read_bytes()
        offset = content.find(data)
        if offset >= 0:
            assert offset % PAGE_BYTES == 0
            return path, offset
    raise AssertionError("the value is in no file")


def flip_bit(path, offset):
    """Change one bit on disk, past all that a process may have read of it."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())


def descriptors(directory):
    """Open descriptors of this process on segment files of a directory."""
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = link.readlink()
        except FileNotFoundError:
            continue  # The listing's own.
        if target.parent == directory and target.name.startswith("segment-"):
            opened.append(int(link.name))
    return opened
