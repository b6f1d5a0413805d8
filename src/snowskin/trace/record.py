"""Record what a live system serves as a trace to simulate: lengths and sharing, no text."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from snowskin.terms.errors import InvalidInput
from snowskin.trace.formats import header_line
from snowskin.trace.records import TraceRequest


class TraceRecorder:
    """Appends requests to a new file of our own format; each write is whole lines, at once.

    Requests may come in any order: a reader puts them in order of arrival. Nothing is buffered, so
    a process that is killed loses nothing that was written. Used as a context manager, or closed
    by hand.

    Args:
        path: of the file, which must not exist yet: a recording never takes another's place.

    Raises:
        InvalidInput: the file exists, or cannot be written.
    """

    def __init__(self, path: Path, *, block_tokens: int, name: str) -> None:
        self.path = path
        self.count = 0
        """Requests written so far."""
        self._encoder = msgspec.json.Encoder()
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise InvalidInput(
                f"{path} exists already; name a new file, or remove it first", parameter="record"
            ) from None
        except OSError as error:
            raise InvalidInput(
                f"cannot record into {path}: {error.strerror}", parameter="record"
            ) from error
        self._size = 0
        try:
            self._append(header_line(block_tokens=block_tokens, name=name))
        except OSError as error:
            self.close()
            raise InvalidInput(
                f"cannot record into {path}: {error.strerror}", parameter="record"
            ) from error

    def write(self, requests: Iterable[TraceRequest]) -> None:
        """Write requests that have ended.

        Raises:
            OSError: the disk is full or broken; none of these requests is in the file.
        """
        lines = [self._encoder.encode(request) + b"\n" for request in requests]
        if lines:
            self._append(b"".join(lines))
            self.count += len(lines)

    def close(self) -> None:
        """End the file; one without a request, which nobody could read, is removed. Idempotent."""
        if not self._file.closed and not self.count:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _append(self, whole: bytes) -> None:
        left = memoryview(whole)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            # Half a line would make all that follows unreadable.
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += len(whole)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
