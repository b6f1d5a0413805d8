"""Reading a peer's segment over TCP, straight into our own: see ``transfer.wire``.

A pull has one worker or several, each with one connection at a time, and each free to take any
path at any time: which, ``transfer.paths`` decides by load and health; what, ``transfer.slicing``.
The first worker is the caller's own thread, so a small pull starts no other and costs one round
trip. A path that is cut, falls silent or damages bytes is left alone for a while, and what it had
not brought is taken by the next worker to come, over another path.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from snowskin.terms.errors import TransferFailed
from snowskin.transfer.authentication import HANDSHAKE_TIMEOUT_S, authenticate_as_client
from snowskin.transfer.endpoints import EndpointPool
from snowskin.transfer.links import Links
from snowskin.transfer.paths import Path
from snowskin.transfer.peer import Peer
from snowskin.transfer.progress import PullProgress
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.slicing import Batch, Range, SliceBoard, worker_count
from snowskin.transfer.topology import LocalNic, pair_paths
from snowskin.transfer.transports.receiving import PullState, Receiving, Stopped
from snowskin.transfer.wire import limit_blocking, tune

TICK_S = 0.02
"""A silent connection looks so often for cancellation and deadline."""
IDLE_LIMIT = 512
IDLE_PER_PATH_LIMIT = 4
HELPERS_LIMIT = 16
"""Threads beside those of the callers, for all pulls together."""


class TcpStat(msgspec.Struct, frozen=True):
    """Counts since the start."""

    opened_connections: int = 0
    evicted_paths: int = 0
    """Whose idle connections were closed to make room."""
    striped_pulls: int = 0
    """Pulls that used more than one connection at once."""
    retried_bytes: int = 0
    """Asked for over a path that failed, so that another one had to be asked."""
    failed_paths: int = 0
    """Times that a path was cut, fell silent or could not be had, and was left alone since."""
    damaged_ranges: int = 0
    """Ranges that arrived damaged and were asked for again."""


class TcpTransport:
    """Connections to peers, of which idle ones are kept for the next pull.

    Args:
        links: the health of paths; shared with the other transports.
        nics: our own NICs that paths may begin at; empty: what the kernel's routes say.
    """

    def __init__(
        self,
        cluster_key: bytes,
        links: Links,
        settings: TransferSettings,
        nics: Sequence[LocalNic] = (),
    ) -> None:
        self.settings = settings
        self.links = links
        self._cluster_key = cluster_key
        self._nics = tuple(nics)
        self._lock = threading.Lock()
        self._pool: EndpointPool[Path, socket.socket] = EndpointPool(
            IDLE_LIMIT, max(IDLE_PER_PATH_LIMIT, self.settings.connections_per_path)
        )
        self._paths: dict[Peer, tuple[Path, ...]] = {}
        self._counts = dict.fromkeys(TcpStat.__struct_fields__, 0)
        self._helpers = ThreadPoolExecutor(HELPERS_LIMIT, thread_name_prefix="pull")
        self._helper_places = threading.BoundedSemaphore(HELPERS_LIMIT)

    def pull(self, peer: Peer, progress: PullProgress) -> None:
        """Receive until every block has landed or missed, or the pull must stop.

        Raises:
            TransferFailed: the peer cannot be reached over any path.
        """
        _Pull(self, peer, progress).run()

    def stat(self) -> TcpStat:
        """Counts since the start."""
        with self._lock:
            return TcpStat(**{**self._counts, "evicted_paths": self._pool.evicted_total})

    def close(self) -> None:
        """Close the idle connections. No pull may be running."""
        self._helpers.shutdown()
        with self._lock:
            for connection in self._pool.clear():
                connection.close()

    def paths(self, peer: Peer) -> tuple[Path, ...]:
        """The ways to a peer."""
        with self._lock:
            known = self._paths.get(peer)
            if known is None:
                if len(self._paths) >= IDLE_LIMIT:
                    del self._paths[next(iter(self._paths))]
                known = self._paths[peer] = pair_paths(peer.node, peer.every_address, self._nics)
            return known

    def start_helpers(self, wanted: int, work: Callable[[], None]) -> list[Future[None]]:
        """As many further workers as there are places for, at most so many."""
        helpers: list[Future[None]] = []
        while len(helpers) < wanted and self._helper_places.acquire(blocking=False):
            future = self._helpers.submit(work)
            future.add_done_callback(lambda _: self._helper_places.release())
            helpers.append(future)
        return helpers

    def count(self, **increments: int) -> None:
        """Raise counts by name."""
        with self._lock:
            for name, by in increments.items():
                self._counts[name] += by

    def forget(self, path: Path) -> None:
        """Close the idle connections of a path: what ended one of them has ended all."""
        with self._lock:
            stale = self._pool.drop(path)
        for connection in stale:
            connection.close()

    def take(self, path: Path) -> socket.socket | None:
        """An idle connection. It may have been closed at the other end, which its use will show."""
        with self._lock:
            return self._pool.take(path)

    def give(self, path: Path, connection: socket.socket) -> None:
        """Keep a connection for the next pull."""
        with self._lock:
            spare = self._pool.give(path, connection)
        for one in spare:
            one.close()

    def open(self, path: Path, timeout_s: float) -> socket.socket:
        """A new connection.

        Raises:
            TransferFailed: it cannot be had.
        """
        origin = (path.local_host, 0) if path.local_host is not None else None
        try:
            connection = socket.create_connection((path.host, path.port), timeout_s, origin)
        except OSError as error:
            raise TransferFailed(
                f"cannot reach {path.node} at {path.host}:{path.port}: {error}"
            ) from error
        try:
            tune(connection)
            authenticate_as_client(connection, self._cluster_key)
            limit_blocking(connection, receive_s=TICK_S, send_s=HANDSHAKE_TIMEOUT_S)
        except (OSError, TransferFailed) as error:
            connection.close()
            raise TransferFailed(
                f"{path.node} at {path.host}:{path.port} did not authenticate: {error}"
            ) from error
        self.count(opened_connections=1)
        return connection


class _Pull:
    """One pull by one or several workers."""

    def __init__(self, transport: TcpTransport, peer: Peer, progress: PullProgress) -> None:
        self._transport = transport
        self._links = transport.links
        self._paths = transport.paths(peer)
        self._progress = progress
        self._board = SliceBoard(
            len(progress.blocks),
            progress.segment.layout.slot_bytes,
            slice_bytes=transport.settings.slice_bytes,
        )
        self._state = PullState(progress, self._board)
        self._changed = threading.Condition(progress.lock)
        """The board has changed, so that a worker without work should look again."""
        self._workers = 1
        self._waits_s: list[float] = []
        self._reached = False
        self._error: TransferFailed | None = None

    def run(self) -> None:
        """See ``TcpTransport.pull``."""
        transport, settings = self._transport, self._transport.settings
        ways = self._links.usable_count(self._paths) * settings.connections_per_path
        wanted = worker_count(self._board.total_bytes, ways, settings.stripe_least_bytes)
        helpers: list[Future[None]] = []
        if wanted > 1:
            with self._progress.lock:  # Nobody takes a batch before it is known how many there are.
                helpers = transport.start_helpers(wanted - 1, self.work)
                self._workers += len(helpers)
            transport.count(striped_pulls=1 if helpers else 0)
        try:
            self.work()
        finally:
            for helper in helpers:
                helper.result()
        self._progress.waited_s = min(self._waits_s, default=0.0)
        if self._state.damaged_ranges:
            transport.count(damaged_ranges=self._state.damaged_ranges)
        if not self._reached and self._error is not None:
            raise self._take_error()
        self._error = None

    def work(self) -> None:
        """Fetch until nothing is left that could be had; any number of threads may."""
        waited_s: float | None = None
        try:
            while (batch := self._next()) is not None:
                path = self._links.begin(self._paths, batch.size_bytes)
                if path is None:
                    self._error = self._error or self._links.all_cool_down(self._paths)
                    self._give_back(batch.ranges)
                    return
                waited_s = (waited_s or 0.0) + self._carry(path, batch)
        finally:
            with self._changed:
                self._workers -= 1
                if waited_s is not None:
                    self._waits_s.append(waited_s)
                self._changed.notify_all()

    def _next(self) -> Batch | None:
        """Work, perhaps after others have failed at it; None if there will be none."""
        while not self._progress.must_stop():
            with self._changed:
                batch = self._board.take(self._workers)
                if batch is not None:
                    return batch
                if not self._board.is_open:
                    return None
                self._changed.wait(TICK_S)
        return None

    def _carry(self, path: Path, batch: Batch) -> float:
        """Fetch a batch over a path, as far as it goes; how long nothing came."""
        transport, asked_bytes = self._transport, batch.size_bytes
        begin_s = time.monotonic()
        connection = transport.take(path)
        is_reused = connection is not None
        try:
            connection = connection or self._open(path)
        except TransferFailed as error:
            self._error = error
            self._give_back(batch.ranges)
            self._fail(path, asked_bytes, 0, time.monotonic() - begin_s)
            return 0.0
        receiving = Receiving(
            connection, self._state, batch, lambda: self._links.patience_s(path, self._paths)
        )
        try:
            receiving.run()
        except (Stopped, OSError) as error:
            connection.close()  # Landed blocks stay; the server sees the end and stops sending.
            landed_bytes = receiving.landed_bytes
            if isinstance(error, Stopped) or (is_reused and not receiving.heard):
                # Stopped by us; or closed (or forgotten on the way) while it lay idle.
                self._links.cancel(path, asked_bytes=asked_bytes, landed_bytes=landed_bytes)
                if is_reused:
                    transport.forget(path)
            else:
                self._reached = True
                self._fail(path, asked_bytes, landed_bytes, receiving.waited_s)
        except BaseException:
            connection.close()
            raise
        else:
            self._reached = True
            self._end(path, connection, receiving, asked_bytes, begin_s)
        self._give_back(receiving.unfinished())
        return receiving.waited_s

    def _open(self, path: Path) -> socket.socket:
        patience_s = self._links.patience_s(path, self._paths)
        return self._transport.open(path, min(HANDSHAKE_TIMEOUT_S, patience_s))

    def _end(
        self,
        path: Path,
        connection: socket.socket,
        receiving: Receiving,
        asked_bytes: int,
        begin_s: float,
    ) -> None:
        """Every range has ended, if not all of them well."""
        if receiving.path_erred and self._links.has_other(path, self._paths):
            connection.close()
            self._fail(path, asked_bytes, receiving.landed_bytes, 0.0)
            return
        self._transport.give(path, connection)
        self._links.end(
            path,
            asked_bytes=asked_bytes,
            landed_bytes=receiving.landed_bytes,
            active_s=time.monotonic() - begin_s - receiving.waited_s,
            latency_s=receiving.latency_s,
        )

    def _fail(self, path: Path, asked_bytes: int, landed_bytes: int, cost_s: float) -> None:
        self._links.fail(path, asked_bytes=asked_bytes, landed_bytes=landed_bytes, cost_s=cost_s)
        self._transport.forget(path)
        self._transport.count(retried_bytes=asked_bytes - landed_bytes, failed_paths=1)

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


__all__ = ["TcpStat", "TcpTransport"]
