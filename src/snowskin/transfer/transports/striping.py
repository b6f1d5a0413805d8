"""Bytes that come over TCP, shared out among workers and paths, whatever they are.

There is one worker or several, each with one connection at a time, and each free to take any path
at any time: which, ``transfer.paths`` decides by load and health; what, ``transfer.slicing``. The
first worker is the caller's own thread. A path that is cut or falls silent is left alone for a
while, and what it had not brought is taken by the next worker to come, over another path.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from snowskin.terms.errors import TransferFailed
from snowskin.transfer.authentication import HANDSHAKE_TIMEOUT_S
from snowskin.transfer.paths import Flight, Path
from snowskin.transfer.slicing import Batch, Range, SliceBoard, worker_count

if TYPE_CHECKING:
    from snowskin.transfer.transports.tcp import TcpTransport

TICK_S = 0.02
"""A worker without work looks so often for cancellation and deadline."""


class Stopped(Exception):
    """It was cancelled or its time is over."""


class Carrier(Protocol):
    """One request over one connection.

    Attributes:
        heard: whether anything came at all.
        waited_s: how long nothing came.
        latency_s: until the first byte came, of what was ready; None: not known.
    """

    heard: bool
    waited_s: float
    latency_s: float | None

    def run(self) -> None:
        """Fetch, and tell the board of all that arrives.

        Raises:
            Stopped: see there.
            OSError: the path failed.
        """

    def unfinished(self) -> tuple[Range, ...]:
        """What the board has not been told of."""


class Striping(ABC):
    """Fetches what is on a board, by one or several workers.

    Args:
        paths: the ways there are.
        lock: guards the board.
    """

    def __init__(
        self,
        transport: TcpTransport,
        paths: Sequence[Path],
        board: SliceBoard,
        lock: threading.Lock,
    ) -> None:
        self._transport = transport
        self._links = transport.links
        self._paths = paths
        self._board = board
        self._lock = lock
        self._changed = threading.Condition(lock)
        """The board has changed, so that a worker without work should look again."""
        self._workers = 1
        self._followers = 0
        self._waits_s: list[float] = []
        self._reached = False
        self._error: TransferFailed | None = None

    @abstractmethod
    def _carrier(
        self,
        connection: socket.socket,
        flight: Flight,
        batch: Batch,
        patience: Callable[[], float],
    ) -> Carrier:
        """What fetches a batch over a connection that is silent for no longer than ``patience``."""

    @abstractmethod
    def _must_stop(self) -> bool:
        """Whether it was cancelled or its time is over."""

    def _take_guilty(self) -> set[Path]:
        """Paths that turned out to have damaged bytes. Under the lock."""
        return set()

    def run(self) -> None:
        """Fetch until nothing is left that could be had, or it must stop.

        Raises:
            TransferFailed: the peer cannot be reached over any path.
        """
        transport, settings = self._transport, self._transport.settings
        ways = self._links.usable_count(self._paths) * settings.connections_per_path
        wanted = worker_count(self._board.total_bytes, ways, settings.stripe_least_bytes)
        helpers: list[Future[None]] = []
        if wanted > 1:
            with self._lock:  # Nobody takes a batch before it is known how many there are.
                helpers = transport.start_helpers(wanted - 1, self.work)
                self._workers += len(helpers)
            transport.count(striped_pulls=1 if helpers else 0)
        try:
            self.work()
        finally:
            for helper in helpers:
                helper.result()
        if not self._reached and self._error is not None:
            raise self._take_error()
        self._error = None

    def work(self) -> None:
        """Fetch until nothing is left that could be had; any number of threads may."""
        waited_s: float | None = None
        try:
            while (batch := self._next()) is not None:
                flight = self._links.begin(self._paths, batch.size_bytes)
                if flight is None:
                    self._error = self._error or self._links.all_cool_down(self._paths)
                    self._give_back(batch.ranges)
                    return
                waited_s = (waited_s or 0.0) + self._carry(flight, batch)
                if batch.follow:
                    with self._changed:
                        self._followers -= 1
        finally:
            with self._changed:
                self._workers -= 1
                if waited_s is not None:
                    self._waits_s.append(waited_s)
                self._changed.notify_all()

    def _next(self) -> Batch | None:
        """Work, perhaps after others have failed at it; None if there will be none."""
        while not self._must_stop():
            with self._changed:
                # Those that follow blocks may do so for long, so others must not count on them.
                batch = self._board.take(self._workers - self._followers)
                if batch is not None:
                    self._followers += batch.follow
                    return batch
                if not self._board.is_open:
                    return None
                self._changed.wait(TICK_S)
        return None

    def _carry(self, flight: Flight, batch: Batch) -> float:
        """Fetch a batch over a path, as far as it goes; how long nothing came."""
        transport, path = self._transport, flight.path
        begin_s = time.monotonic()
        connection = transport.take(path)
        is_reused = connection is not None
        try:
            connection = connection or self._open(path)
        except TransferFailed as error:
            self._error = error
            self._fail(flight, time.monotonic() - begin_s)
            self._give_back(batch.ranges)
            return 0.0
        receiving = self._carrier(
            connection, flight, batch, lambda: self._links.patience_s(path, self._paths)
        )
        try:
            receiving.run()
        except (Stopped, OSError) as error:
            connection.close()  # Landed blocks stay; the server sees the end and stops sending.
            if isinstance(error, Stopped):
                self._links.cancel(flight)
            elif is_reused and not receiving.heard and self._may_be_stale(error, path):
                self._links.cancel(flight)
                transport.forget(path)
            else:
                self._reached = True
                self._fail(flight, receiving.waited_s)
        except BaseException:
            connection.close()
            self._links.cancel(flight)
            raise
        else:
            self._reached = True
            transport.give(path, connection)
            active_s = time.monotonic() - begin_s - receiving.waited_s
            self._links.end(flight, active_s=active_s, latency_s=receiving.latency_s)
            self._blame()
        self._give_back(receiving.unfinished())
        return receiving.waited_s

    def _may_be_stale(self, error: OSError, path: Path) -> bool:
        """Whether a fresh connection may do where one that had lain idle failed.

        It was closed meanwhile, or something on the way forgot it, so that it falls silent. If
        there is another path, silence is taken for the fault of this one.
        """
        return not isinstance(error, TimeoutError) or not self._links.has_other(path, self._paths)

    def _open(self, path: Path) -> socket.socket:
        patience_s = self._links.patience_s(path, self._paths)
        return self._transport.open(path, min(HANDSHAKE_TIMEOUT_S, patience_s))

    def _fail(self, flight: Flight, cost_s: float) -> None:
        self._links.fail(flight, cost_s=cost_s)
        self._transport.forget(flight.path)
        retried_bytes = flight.asked_bytes - flight.landed_bytes
        self._transport.count(retried_bytes=retried_bytes, failed_paths=1)

    def _blame(self) -> None:
        """Leave alone the paths that damaged bytes, if there are others."""
        with self._lock:
            guilty = self._take_guilty()
        for path in guilty:
            if self._links.has_other(path, self._paths):
                self._links.blame(path)
                self._transport.forget(path)
                self._transport.count(failed_paths=1)

    def _take_error(self) -> TransferFailed:
        """Forgotten here, since it leads back to this object, which would keep our segment."""
        error, self._error = self._error, None
        assert error is not None
        return error

    def _give_back(self, ranges: Sequence[Range]) -> None:
        if ranges:
            with self._changed:
                self._board.give_back(ranges)
                self._changed.notify_all()
