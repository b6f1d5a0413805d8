from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from snowskin.terms.errors import InvalidInput
from snowskin.trace.describe import describe
from snowskin.trace.formats import read_trace
from snowskin.trace.record import TraceRecorder
from snowskin.trace.records import TraceRequest

FIRST = TraceRequest(0.0, 10, 7, (1, 2))
SECOND = TraceRequest(1.0, 12, 7, (1, 2, 3))
THIRD = TraceRequest(2.0, 9, 7, (8, 9))


def test_a_recording_reads_as_a_trace_with_the_sharing_that_there_was(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with TraceRecorder(path, block_tokens=4, name="live") as recorder:
        # The second request ends before the first.
        recorder.write([SECOND, FIRST])
        recorder.write([])
        recorder.write([THIRD])
        assert recorder.count == 3
    trace = read_trace(path)
    assert trace.name == "live"
    assert list(trace) == [FIRST, SECOND, THIRD]
    assert describe(trace).hit_ratio_blocks == pytest.approx(2 / 7)


def test_what_was_written_can_be_read_while_recording_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    recorder = TraceRecorder(path, block_tokens=4, name="live")
    recorder.write([FIRST])
    assert len(read_trace(path)) == 1
    recorder.close()
    recorder.close()
    assert len(read_trace(path)) == 1


def test_a_recording_never_takes_the_place_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("a year's work")
    with pytest.raises(InvalidInput, match="precious exists already; name a new file"):
        TraceRecorder(path, block_tokens=4, name="live")
    assert path.read_text() == "a year's work"


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file or directory"):
        TraceRecorder(tmp_path / "nowhere" / "t", block_tokens=4, name="live")


def test_a_recording_without_a_request_leaves_no_file(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t", block_tokens=4, name="live"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_disk_without_any_room_is_told_at_once_and_no_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with file_limit(10), pytest.raises(InvalidInput, match=r"live\.jsonl: File too large"):
        TraceRecorder(path, block_tokens=4, name="live")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    recorder = TraceRecorder(path, block_tokens=4, name="live")
    recorder.write([FIRST])
    with file_limit(path.stat().st_size + 10), pytest.raises(OSError, match="File too large"):
        recorder.write([SECOND])
    recorder.close()
    assert list(read_trace(path)) == [FIRST]


@contextlib.contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
