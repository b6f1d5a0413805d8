"""Reading a peer's segment over TCP, straight into our own: see ``transfer.wire``.

How a pull is shared out among paths, ``transfer.transports.striping`` tells. A small pull has one
worker, which is the caller's own thread, and costs one round trip.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec

from snowskin.terms.errors import TransferFailed
from snowskin.terms.ids import NodeId
from snowskin.transfer.authentication import HANDSHAKE_TIMEOUT_S, authenticate_as_client
from snowskin.transfer.endpoints import EndpointPool
from snowskin.transfer.links import Links
from snowskin.transfer.paths import Path
from snowskin.transfer.peer import Peer
from snowskin.transfer.progress import PullProgress
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.slicing import worker_count
from snowskin.transfer.topology import Address, LocalNic, pair_paths
from snowskin.transfer.transports.striped_pull import StripedPull
from snowskin.transfer.wire import limit_blocking, tune

TICK_S = 0.02
"""A silent connection looks so often for cancellation and deadline."""
IDLE_LIMIT = 512
IDLE_PER_PATH_LIMIT = 4
HELPERS_LIMIT = 16
"""Threads beside those of the callers, for all pulls together."""


class Reachable(Protocol):
    """Whoever can be reached over TCP."""

    @property
    def node(self) -> NodeId:
        """Its name."""

    @property
    def every_address(self) -> tuple[Address, ...]:
        """Where it listens."""

    def __hash__(self) -> int: ...


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
        self._is_open = True
        self._pool: EndpointPool[Path, socket.socket] = EndpointPool(
            IDLE_LIMIT, max(IDLE_PER_PATH_LIMIT, self.settings.connections_per_path)
        )
        self._paths: dict[Reachable, tuple[Path, ...]] = {}
        self._counts = dict.fromkeys(TcpStat.__struct_fields__, 0)
        self._helpers = ThreadPoolExecutor(HELPERS_LIMIT, thread_name_prefix="pull")
        self._helper_places = threading.BoundedSemaphore(HELPERS_LIMIT)

    def pull(self, peer: Peer, progress: PullProgress) -> None:
        """Receive until every block has landed or missed, or the pull must stop.

        Raises:
            TransferFailed: the peer cannot be reached over any path.
        """
        StripedPull(self, peer, progress).run()

    def stat(self) -> TcpStat:
        """Counts since the start."""
        with self._lock:
            return TcpStat(**{**self._counts, "evicted_paths": self._pool.evicted_total})

    def close(self) -> None:
        """Close the idle connections. Pulls that run end first, without further workers."""
        self._helpers.shutdown()
        with self._lock:
            self._is_open = False
            for connection in self._pool.clear():
                connection.close()

    def paths(self, peer: Reachable) -> tuple[Path, ...]:
        """The ways to a peer."""
        with self._lock:
            known = self._paths.get(peer)
            if known is None:
                if len(self._paths) >= IDLE_LIMIT:
                    del self._paths[next(iter(self._paths))]
                known = self._paths[peer] = pair_paths(peer.node, peer.every_address, self._nics)
            return known

    def worker_count(self, peer: Reachable, total_bytes: int) -> int:
        """How many connections to a peer are worth while for so much."""
        ways = len(self.paths(peer)) * self.settings.connections_per_path
        return worker_count(total_bytes, ways, self.settings.stripe_least_bytes)

    def start_helpers(self, wanted: int, work: Callable[[], None]) -> list[Future[None]]:
        """As many further workers as there are places for, at most so many."""
        helpers: list[Future[None]] = []
        while len(helpers) < wanted and self._helper_places.acquire(blocking=False):
            try:
                future = self._helpers.submit(work)
            except RuntimeError:  # It was closed meanwhile.
                self._helper_places.release()
                break
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
            spare = self._pool.give(path, connection) if self._is_open else (connection,)
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
