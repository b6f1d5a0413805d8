"""The Transfer Engine: pulls blocks from peers' segments into this node's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.memory import Segment
from snowskin.transfer.peer import Peer, local_host_id
from snowskin.transfer.progress import BlockPull, PullProgress, PullResult
from snowskin.transfer.transports.shm import ShmTransport
from snowskin.transfer.transports.tcp import TcpTransport
from snowskin.transfer.wire import BLOCKS_LIMIT

__all__ = ["BlockPull", "PullResult", "TransferEngine", "TransferStat"]

TRANSPORTS = ("auto", "shm", "tcp")
COOLDOWN_LEAST_S = 0.1
COOLDOWN_MOST_S = 2.0
SHM_RETRY_S = 30.0
PEERS_LIMIT = 1024


class TransferStat(msgspec.Struct, frozen=True):
    """Counts since the start."""

    pulls: int = 0
    failed_pulls: int = 0
    """The peer could not be reached at all."""
    incomplete_pulls: int = 0
    """Some blocks did not land: gone at the source, cancelled, too late, or the peer died."""
    landed_blocks: int = 0
    missed_blocks: int = 0
    checksum_failures: int = 0
    shm_bytes: int = 0
    tcp_bytes: int = 0
    fallbacks: int = 0
    """Pulls that went over TCP because a segment of this host could not be mapped."""
    opened_connections: int = 0


class _Health:
    """What we remember of a peer that failed."""

    __slots__ = ("cooldown_s", "retry_s")

    def __init__(self) -> None:
        self.cooldown_s = COOLDOWN_LEAST_S
        self.retry_s = 0.0


class TransferEngine:
    """Pulls from any number of threads at once. ``close`` when no pull runs any more.

    Args:
        segment: where pulled blocks go; the caller has reserved the slots.
        transport: "shm" and "tcp" use only that; "auto" maps the segments of peers on this host
            and falls back to TCP where that fails.
        cluster_key: what all nodes of the cluster share.

    Raises:
        InvalidInput: no such transport.
    """

    def __init__(self, segment: Segment, *, transport: str = "auto", cluster_key: bytes) -> None:
        if transport not in TRANSPORTS:
            raise InvalidInput(
                f"no transport {transport!r}; choose from {', '.join(TRANSPORTS)}",
                parameter="transport",
            )
        self._segment = segment
        self._transport = transport
        self._host_id = local_host_id()
        self._shm = ShmTransport(cluster_key)
        self._tcp = TcpTransport(cluster_key)
        self._lock = threading.Lock()
        self._stat = TransferStat()
        self._health: dict[tuple[str, int], _Health] = {}
        self._shm_retry_s: dict[str, float] = {}

    def pull(
        self,
        peer: Peer,
        blocks: Sequence[BlockPull],
        *,
        timeout_s: float,
        cancelled: threading.Event | None = None,
        on_part: Callable[[int], None] | None = None,
    ) -> PullResult:
        """Read blocks from a peer, following those that are still being written; blocks.

        A part that has landed is published in our own segment at once. Nothing is sealed: that is
        for the caller to commit. After the return no slot is written any more.

        Args:
            timeout_s: when to stop with what has landed; over TCP an hour at most.
            cancelled: set by any thread to stop within about 20 ms.
            on_part: called on this thread with the number of leading parts that have landed in
                every block, whenever it rises.

        Raises:
            TransferFailed: the peer cannot be reached at all, or failed a moment ago, or its
                blocks have another shape. What is lost later only shows in ``landed``.
        """
        self._check_shape(peer)
        if len(blocks) > BLOCKS_LIMIT:
            raise InvalidInput(f"{len(blocks)} blocks in one pull; at most {BLOCKS_LIMIT}")
        progress = PullProgress(
            self._segment, blocks, timeout_s=timeout_s, cancelled=cancelled, on_part=on_part
        )
        if not blocks:
            return progress.result()
        try:
            self._check_health(peer)
            over_shm = self._carry(peer, progress)
        except TransferFailed:
            self._count(pulls=1, failed_pulls=1, missed_blocks=len(blocks))
            raise
        result = progress.result()
        landed_count = sum(result.landed)
        self._count(
            pulls=1,
            incomplete_pulls=int(landed_count < len(blocks)),
            landed_blocks=landed_count,
            missed_blocks=len(blocks) - landed_count,
            checksum_failures=result.checksum_failures,
            shm_bytes=result.kv_bytes if over_shm else 0,
            tcp_bytes=0 if over_shm else result.kv_bytes,
        )
        return result

    def stat(self) -> TransferStat:
        """Counts since the start. Also lets go of the memory of peers that have died."""
        self._shm.drop_dead()
        with self._lock:
            return msgspec.structs.replace(self._stat, opened_connections=self._tcp.opened_total)

    def close(self) -> None:
        """Let go of connections and mappings. No pull may be running."""
        self._shm.close()
        self._tcp.close()

    def _carry(self, peer: Peer, progress: PullProgress) -> bool:
        """Run the pull over the right transport; whether that was shared memory."""
        if self._transport == "shm" or self._may_map(peer):
            try:
                self._attempt(peer, progress, self._shm)
                return True
            except TransferFailed:
                if self._transport == "shm":
                    raise
                with self._lock:
                    _make_room(self._shm_retry_s)
                    self._shm_retry_s[peer.shm_address] = time.monotonic() + SHM_RETRY_S
                self._count(fallbacks=1)
        self._attempt(peer, progress, self._tcp)
        return False

    def _may_map(self, peer: Peer) -> bool:
        if self._transport != "auto" or peer.host_id != self._host_id:
            return False
        with self._lock:
            return self._shm_retry_s.get(peer.shm_address, 0.0) <= time.monotonic()

    def _attempt(
        self, peer: Peer, progress: PullProgress, transport: ShmTransport | TcpTransport
    ) -> None:
        address = (peer.host, peer.port)
        try:
            transport.pull(peer, progress)
        except TransferFailed:
            if self._transport == "auto" and transport is self._shm:
                raise  # TCP has still to be tried.
            with self._lock:
                _make_room(self._health)
                health = self._health.setdefault(address, _Health())
                health.retry_s = time.monotonic() + health.cooldown_s
                health.cooldown_s = min(2 * health.cooldown_s, COOLDOWN_MOST_S)
            raise
        with self._lock:
            self._health.pop(address, None)

    def _check_health(self, peer: Peer) -> None:
        """Fail at once while a peer that could not be reached cools down."""
        with self._lock:
            health = self._health.get((peer.host, peer.port))
        if health is not None and (left_s := health.retry_s - time.monotonic()) > 0:
            raise TransferFailed(
                f"{peer.node} could not be reached; tried again at the earliest in {left_s:.2f} s"
            )

    def _check_shape(self, peer: Peer) -> None:
        ours, theirs = self._segment.layout, peer.layout
        if (ours.slot_bytes, ours.part_count) != (theirs.slot_bytes, theirs.part_count):
            raise TransferFailed(
                f"blocks of {peer.node} have {theirs.part_count} parts in {theirs.slot_bytes} "
                f"bytes, ours {ours.part_count} in {ours.slot_bytes}; both must run one model"
            )

    def _count(self, **increments: int) -> None:
        with self._lock:
            self._stat = msgspec.structs.replace(
                self._stat,
                **{name: getattr(self._stat, name) + by for name, by in increments.items()},
            )


def _make_room(table: dict[Any, Any]) -> None:
    """Forget the oldest entry of a table that is full."""
    if len(table) >= PEERS_LIMIT:
        del table[next(iter(table))]
