"""A segment file of the SSD tier: whole pages in and out, past the page cache where it can be."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from snowskin.store.ssd.record import (
    PAGE_BYTES,
    SEGMENT_HEADER_PAGES,
    RecordHeader,
    SegmentHeader,
    pack_record,
    pack_segment,
    parse_segment,
)

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE_BYTES = 2 << 20
PIECE_BYTES = 4 << 20
"""Most that one system call reads; values beyond it are read and checked piece by piece."""


def aligned_buffer(length_bytes: int) -> Bytes:
    """Zeroed memory that begins on a page, as O_DIRECT demands; in huge pages, where they fit.

    The kernel pins the pages of an O_DIRECT transfer one by one, so that huge ones double the rate
    of a fast disk. Before Linux 6.3 a process must not fork (without exec) during a direct read.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(length_bytes, PAGE_BYTES), flags=flags)
    if length_bytes >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # A kernel without them.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def is_aligned(buffer: Bytes) -> bool:
    """Whether an array begins on a page."""
    address: int = buffer.__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


class SegmentFile:
    """One file of ``segment_bytes``, allocated whole when it is made.

    Writes and reads raise OSError as the system gives it. Reads may run in any thread, beside
    writes; what is read must be checked against its checksum.

    Attributes:
        direct: O_DIRECT is in use.
        header: of its present use; None if it never had one, or it is damaged.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.path = path
        self.header: SegmentHeader | None = None
        self.fd, self.direct = _open(path, direct=direct)
        self._cached_fd = self.fd
        page = aligned_buffer(PAGE_BYTES)
        try:
            if self.direct:
                self._cached_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            for number in range(SEGMENT_HEADER_PAGES):
                self.salvage(page, number)
                self.header = self.header or parse_segment(page.tobytes())
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, segment_bytes: int, epoch: int, *, direct: bool) -> SegmentFile:
        """A new file with all its room allocated; leaves none behind if it raises.

        Raises:
            OSError: ENOSPC above all.
        """
        try:
            file = cls(path, direct=direct)
            try:
                os.posix_fallocate(file.fd, 0, segment_bytes)
                file.reset(epoch, segment_bytes)
                _sync_directory(path.parent)
            except BaseException:
                file.close()
                raise
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return file

    @property
    def epoch(self) -> int:
        """Of its present use."""
        return 0 if self.header is None else self.header.epoch

    def seed(self, page: int) -> int:
        """Of the checksum of a record's header at a page, in its present use."""
        assert self.header is not None, f"{self.path} has no header"
        return self.header.seed(page)

    def reset(self, epoch: int, segment_bytes: int) -> None:
        """Begin a new use: all records that it holds are void."""
        header = SegmentHeader(epoch, secrets.randbits(64), segment_bytes)
        pages = aligned_buffer(SEGMENT_HEADER_PAGES * PAGE_BYTES)
        packed = pack_segment(header)
        for number in range(SEGMENT_HEADER_PAGES):
            start = number * PAGE_BYTES
            pages[start : start + len(packed)] = np.frombuffer(packed, dtype=np.uint8)
        self.write(pages, 0)
        self.header = header

    def write(self, pages: Bytes, page: int) -> None:
        """Write whole, aligned pages from page number ``page`` on."""
        done = 0
        while done < len(pages):
            done += os.pwrite(self.fd, pages[done:].data, page * PAGE_BYTES + done)

    def write_header(self, header: RecordHeader, page: int, scratch: Bytes) -> None:
        """Write a record's first page alone.

        Through the page cache: a page so written survives the process, and costs a tenth of the
        time. The kernel keeps both ways in agreement.
        """
        buffer = scratch[:PAGE_BYTES]
        put_header(buffer, header, self.seed(page))
        if os.pwrite(self._cached_fd, buffer.data, page * PAGE_BYTES) != PAGE_BYTES:
            raise OSError(errno.ENOSPC, f"a page of {self.path} was written in part")

    def read_pages(self, out: Bytes, page: int) -> bool:
        """Fill ``out`` (aligned, whole pages) from ``page`` on; False if the file ends before."""
        done = 0
        while done < len(out):
            count = os.preadv(self.fd, [out[done:].data], page * PAGE_BYTES + done)
            if count == 0:
                return False
            done += count
        return True

    def salvage(self, out: Bytes, page: int) -> int:
        """Fill ``out`` as ``read_pages`` does, but with zeros for what cannot be read.

        Returns:
            How many pages the disk refused; those beyond the end of the file are not counted.
        """
        with contextlib.suppress(OSError):
            if self.read_pages(out, page):
                return 0
        refused_count = 0
        for start in range(0, len(out), PAGE_BYTES):
            part = out[start : start + PAGE_BYTES]
            is_whole = False
            try:
                is_whole = self.read_pages(part, page + start // PAGE_BYTES)
            except OSError:
                refused_count += 1
            if not is_whole:
                part[:] = 0
        return refused_count

    def read_value(self, out: Bytes, page: int, scratch: Bytes) -> int | None:
        """Fill ``out`` with what lies from ``page`` on; its xxh3-64, None if the file ends before.

        Args:
            out: any memory. Whole pages of it are read without a copy if it begins on a page.
            scratch: aligned memory of ``PIECE_BYTES``.
        """
        digest = xxhash.xxh3_64()
        in_place = is_aligned(out) or not self.direct
        for start in range(0, len(out), PIECE_BYTES):
            part = out[start : start + PIECE_BYTES]
            at = page + start // PAGE_BYTES
            whole_bytes = len(part) if not self.direct else len(part) // PAGE_BYTES * PAGE_BYTES
            if not in_place:
                whole_bytes = 0
            if whole_bytes and not self.read_pages(part[:whole_bytes], at):
                return None
            rest_bytes = len(part) - whole_bytes
            if rest_bytes:
                rest = scratch[: -(-rest_bytes // PAGE_BYTES) * PAGE_BYTES]
                if not self.read_pages(rest, at + whole_bytes // PAGE_BYTES):
                    return None
                np.copyto(part[whole_bytes:], rest[:rest_bytes])
            digest.update(part.data)
        return int(digest.intdigest())

    def sync(self) -> None:
        """Have all that was written survive a power cut."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        for fd in {self.fd, self._cached_fd} - {-1}:
            os.close(fd)
        self.fd = self._cached_fd = -1


def put_header(buffer: Bytes, header: RecordHeader, seed: int) -> None:
    """Write a record's header and key, and zeros, into the first page of ``buffer``."""
    packed = pack_record(header, seed)
    buffer[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
    buffer[len(packed) : PAGE_BYTES] = 0


def _sync_directory(directory: Path) -> None:
    """Have a new file's name survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(path: Path, *, direct: bool) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if direct:
        with contextlib.suppress(OSError):
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
            if _reads_direct(fd):
                return fd, True
            os.close(fd)
    return os.open(path, flags, 0o600), False


def _reads_direct(fd: int) -> bool:
    """Some file systems take the flag and refuse the first transfer."""
    try:
        os.preadv(fd, [aligned_buffer(PAGE_BYTES).data], 0)
    except OSError as error:
        return error.errno != errno.EINVAL
    return True
