"""The paths of one engine, for all its transports and threads: ``transfer.paths`` with a lock and
a clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from snowskin.terms.errors import TransferFailed
from snowskin.transfer.paths import Flight, LinkEstimate, Path, PathStat, PathTable
from snowskin.transfer.wire import SILENCE_LIMIT_S


class Links:
    """Health and load of every path.

    Args:
        stall_s: how long a path may be silent if there is another one.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._table = PathTable()

    def usable_count(self, paths: Sequence[Path]) -> int:
        """How many paths may be used now."""
        if len(paths) == 1:
            return 1
        with self._lock:
            return len(self._table.usable(paths, time.monotonic()))

    def in_order(self, paths: Sequence[Path]) -> tuple[Path, ...]:
        """Those that may be used now, then the others."""
        with self._lock:
            usable = self._table.usable(paths, time.monotonic())
        return (*usable, *(path for path in paths if path not in usable))

    def begin(self, paths: Sequence[Path], length_bytes: int) -> Flight | None:
        """Choose a path and ask for so much over it; None where all of them cool down.

        Whoever got one must call ``end``, ``cancel`` or ``fail``.
        """
        with self._lock:
            path = self._table.choose(paths, length_bytes, time.monotonic())
            return self._table.begin(path, length_bytes) if path is not None else None

    def end(
        self, flight: Flight, *, active_s: float | None, latency_s: float | None = None
    ) -> None:
        """It went well, see ``PathTable.end``."""
        with self._lock:
            self._table.end(flight, time.monotonic(), active_s=active_s, latency_s=latency_s)

    def cancel(self, flight: Flight) -> None:
        """It was given up, and the path is not to blame."""
        with self._lock:
            self._table.cancel(flight)

    def fail(self, flight: Flight, *, cost_s: float) -> None:
        """The path failed, see ``PathTable.fail``."""
        with self._lock:
            self._table.fail(flight, time.monotonic(), cost_s=cost_s)

    def blame(self, path: Path) -> None:
        """A path did what it should not, as turned out after it had done it."""
        with self._lock:
            self._table.fail(self._table.begin(path, 0), time.monotonic(), cost_s=0.0)

    def has_other(self, path: Path, paths: Sequence[Path]) -> bool:
        """Whether another one than this may be used now."""
        if len(paths) == 1:
            return False
        with self._lock:
            return self._table.has_other(path, paths, time.monotonic())

    def patience_s(self, path: Path, paths: Sequence[Path]) -> float:
        """How long a path may be silent now."""
        return self._stall_s if self.has_other(path, paths) else float(SILENCE_LIMIT_S)

    def all_cool_down(self, paths: Sequence[Path]) -> TransferFailed:
        """The error that says so."""
        with self._lock:
            left_s = self._table.usable_in_s(paths, time.monotonic())
        return TransferFailed(
            f"{paths[0].node} could not be reached; tried again at the earliest in {left_s:.2f} s"
        )

    def path_stat(self) -> tuple[PathStat, ...]:
        """What is known of every path."""
        with self._lock:
            return self._table.path_stat(time.monotonic())

    def link_stat(self) -> tuple[LinkEstimate, ...]:
        """How fast and how busy the link from each peer is."""
        with self._lock:
            return self._table.link_stat(time.monotonic())
