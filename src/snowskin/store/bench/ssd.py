"""The SSD tier beside plain transfers of the same disk, past the page cache where it can be."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from snowskin.store.bench.lanes import Act, Lane
from snowskin.store.bench.rows import Case, StoreBenchConfig
from snowskin.store.ssd import Hit, SsdConfig, SsdTier, WriteOutcome
from snowskin.store.ssd.files import SegmentFile, aligned_buffer
from snowskin.store.ssd.record import PAGE_BYTES, record_pages
from snowskin.terms.errors import InvalidInput

WRITE_BYTES = 64 << 20
"""Values of one call: so many bytes, if they are no more than ``WRITE_COUNT``."""
WRITE_COUNT = 1024
PIECE_BYTES = 8 << 20
FLUSH_S = 60.0
SEGMENT_LEAST_BYTES = 32 << 20
SEGMENTS_LEAST = 8
ROOM_PAUSE_S = 200e-6


class SsdBench:
    """Values of one size on a disk, and the lanes over them.

    Args:
        plain: a file of which as many bytes are written and read as of the values.
    """

    def __init__(self, size_bytes: int, count: int, tier: SsdTier, plain: SegmentFile) -> None:
        self._size = size_bytes
        self._count = count
        self._tier = tier
        self._plain = plain
        self._value_pages = record_pages(size_bytes) - 1
        self._call_count = max(1, min(WRITE_COUNT, WRITE_BYTES // size_bytes))
        self._value = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
        self._numbers = itertools.count()

    def fill(self) -> None:
        """Write what will be read, both ways."""
        for index in range(self._count):
            self._write(self._key(index))
        self._flush()
        piece = aligned_buffer(self._value_pages * PAGE_BYTES)
        piece[: self._size] = self._value
        for index in range(self._count):
            self._plain.write(piece, index * self._value_pages)
        self._plain.sync()

    def cases(self) -> Iterator[Case]:
        """Reads come first, for writes evict what they read."""
        reading = [Lane("limit", self._read_plain), Lane("ours", self._read_tier)]
        yield Case("ssd", "read", reading)
        writing = [Lane("limit", self._write_plain), Lane("ours", self._write_tier)]
        yield Case("ssd", "write", writing)

    def _key(self, index: int) -> bytes:
        return f"read/{index % self._count}".encode()

    def _write(self, key: bytes) -> None:
        while (outcome := self._tier.write(key, self._value)) is WriteOutcome.QUEUE_FULL:
            time.sleep(ROOM_PAUSE_S)
        assert outcome is WriteOutcome.QUEUED, f"the tier does not take a value: {outcome}"

    def _flush(self) -> None:
        flushed = self._tier.flush(FLUSH_S)
        assert flushed.complete, "the disk does not keep up"
        assert not flushed.failed_count, "the disk failed"

    def _read_tier(self, number: int) -> Act:
        buffer = aligned_buffer(self._size)[: self._size]

        def act(index: int) -> int:
            hit = self._tier.read_into(self._key(index + number), buffer)
            assert isinstance(hit, Hit), f"a value that was flushed is missed: {hit}"
            return hit.value_bytes

        return act

    def _read_plain(self, number: int) -> Act:
        buffer = aligned_buffer(self._value_pages * PAGE_BYTES)

        def act(index: int) -> int:
            assert self._plain.read_pages(buffer, self._page(index + number)), "the file ends"
            return self._size

        return act

    def _write_tier(self, number: int) -> Act:
        del number

        def act(index: int) -> int:
            del index
            for _ in range(self._call_count):
                self._write(f"write/{next(self._numbers)}".encode())
            self._flush()
            return self._call_count * self._size

        return act

    def _write_plain(self, number: int) -> Act:
        call_bytes = self._call_count * self._value_pages * PAGE_BYTES
        piece = aligned_buffer(min(PIECE_BYTES, call_bytes))
        piece[:] = 1
        room_pages = self._count * self._value_pages

        def act(index: int) -> int:
            page = (index + number) * call_bytes // PAGE_BYTES
            for start in range(0, call_bytes, len(piece)):
                part = piece[: min(len(piece), call_bytes - start)]
                at = (page + start // PAGE_BYTES) % room_pages
                self._plain.write(part, min(at, room_pages - len(part) // PAGE_BYTES))
            self._plain.sync()
            return self._call_count * self._size

        return act

    def _page(self, index: int) -> int:
        return index % self._count * self._value_pages


@contextlib.contextmanager
def running_ssd(config: StoreBenchConfig, size_bytes: int) -> Iterator[SsdBench]:
    """A tier and a plain file in the directory of ``config``, filled; both are gone afterwards.

    Raises:
        InvalidInput: the directory cannot be used, or its disk has not enough room.
    """
    assert config.ssd is not None, "the tier is measured in a directory"
    count = config.count(size_bytes)
    record_bytes = record_pages(size_bytes) * PAGE_BYTES
    segment_bytes = max(SEGMENT_LEAST_BYTES, 4 * record_bytes + 2 * PAGE_BYTES)
    segments = max(SEGMENTS_LEAST, 2 * count * record_bytes // segment_bytes + 3)
    tier_config = SsdConfig(
        capacity_bytes=segments * segment_bytes,
        segment_bytes=segment_bytes,
        write_queue_bytes=max(WRITE_BYTES, 2 * record_bytes),
    )
    plain_bytes = count * record_bytes
    try:
        free_bytes = shutil.disk_usage(config.ssd).free
        folder = Path(tempfile.mkdtemp(prefix="snowskin-bench-", dir=config.ssd))
    except OSError as error:
        raise InvalidInput(f"cannot use {config.ssd}: {error}", parameter="--ssd") from error
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        needed_bytes = tier_config.capacity_bytes + plain_bytes
        if free_bytes < needed_bytes:
            raise InvalidInput(
                f"{config.ssd} has {free_bytes} bytes left, and values of {size_bytes} bytes need "
                f"{needed_bytes}; choose another directory, a lower --cycle, or smaller sizes",
                parameter="--ssd",
            )
        tier = stack.enter_context(SsdTier(folder / "tier", tier_config))
        plain = SegmentFile.create(folder / "plain", plain_bytes, 1, direct=True)
        stack.callback(plain.close)
        bench = SsdBench(size_bytes, count, tier, plain)
        bench.fill()
        yield bench
