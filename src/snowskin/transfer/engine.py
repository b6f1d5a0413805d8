"""The Transfer Engine: pulls blocks from peers' segments into this node's own.

It reads only, as the owner of a segment is the one who writes it: a slot that was freed can then
never be overwritten by a writer who has not heard of it yet, which no lock across hosts could
promise at this price. A *write* to a peer is therefore a message that asks it to reserve slots and
pull from here; whoever owns the reservation (store, decode node) has such a message already, so
there is no ``write`` below that would hide it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.links import Links
from snowskin.transfer.memory import Segment
from snowskin.transfer.paths import LinkEstimate, Path, PathStat
from snowskin.transfer.peer import Peer, local_host_id
from snowskin.transfer.progress import BlockPull, PullProgress, PullResult
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.topology import LocalNic
from snowskin.transfer.transports.local import LocalTransport
from snowskin.transfer.transports.nixl import NixlTransport
from snowskin.transfer.transports.shm import ShmTransport
from snowskin.transfer.transports.tcp import TcpTransport
from snowskin.transfer.wire import BLOCKS_LIMIT

__all__ = [
    "BlockPull",
    "LinkEstimate",
    "PathStat",
    "PullResult",
    "TransferEngine",
    "TransferSettings",
    "TransferStat",
]

TRANSPORTS = ("auto", "local", "shm", "tcp", "nixl")
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
    local_bytes: int = 0
    """From segments of this process."""
    nixl_bytes: int = 0
    striped_pulls: int = 0
    """Pulls that used more than one connection at once."""
    retried_bytes: int = 0
    """Asked for over a path that failed, so that another one had to be asked."""
    failed_paths: int = 0
    """Times that a path was cut, fell silent or could not be had, and was left alone since."""
    damaged_ranges: int = 0
    """Pieces of blocks that arrived damaged and were asked for again."""
    evicted_paths: int = 0
    """Whose idle connections were closed to make room."""


class _Transport(Protocol):
    def pull(self, peer: Peer, progress: PullProgress) -> None: ...


class TransferEngine:
    """Pulls from any number of threads at once. ``close`` when no pull runs any more.

    Args:
        segment: where pulled blocks go; the caller has reserved the slots.
        transport: "local" (registered segments of this process), "shm", "tcp" and "nixl" use only
            that; "auto" takes the first of "local", "shm" and "tcp" that can be had.
        cluster_key: what all nodes of the cluster share.
        nics: our own addresses that paths to peers may begin at, see ``Topology.nics``; without
            them the kernel's routes decide.

    Raises:
        InvalidInput: no such transport, or it is not installed.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        transport: str = "auto",
        cluster_key: bytes,
        settings: TransferSettings | None = None,
        nics: Sequence[LocalNic] = (),
    ) -> None:
        if transport not in TRANSPORTS:
            raise InvalidInput(
                f"no transport {transport!r}; choose from {', '.join(TRANSPORTS)}",
                parameter="transport",
            )
        settings = settings or TransferSettings()
        self._segment = segment
        self._transport = transport
        self._host_id = local_host_id()
        self._links = Links(settings.stall_s)
        self._local = LocalTransport()
        self._shm = ShmTransport(cluster_key)
        self._tcp = TcpTransport(cluster_key, self._links, settings, nics)
        self._nixl = NixlTransport(segment) if transport == "nixl" else None
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(TransferStat.__struct_fields__, 0)
        self._shm_retry_s: dict[str, float] = {}

    def register(self, peer: Peer, segment: Segment) -> None:
        """Read ``peer`` from its segment in this process, without any transport in between."""
        self._local.register(peer, segment)

    def unregister(self, peer: Peer) -> None:
        """Undo ``register``, before the segment is closed. Idempotent."""
        self._local.unregister(peer)

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
            timeout_s: when to stop with what has landed.
            cancelled: set by any thread to stop within about 20 ms.
            on_part: called with the number of leading parts that have landed in every block,
                whenever it rises; on this thread or a helper's, one call at a time. It must not
                block, as the bytes wait for it.

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
            used = self._carry(peer, progress)
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
            **{f"{used}_bytes": result.kv_bytes},
        )
        return result

    def stat(self) -> TransferStat:
        """Counts since the start. Also lets go of the memory of peers that have died."""
        self._shm.drop_dead()
        tcp = msgspec.structs.asdict(self._tcp.stat())
        with self._lock:
            return TransferStat(**{**self._counts, **tcp})

    def path_stat(self) -> tuple[PathStat, ...]:
        """Load, speed and health of every path that was used."""
        return self._links.path_stat()

    def link_stat(self) -> tuple[LinkEstimate, ...]:
        """How busy and how fast the link from each peer is, for whoever predicts transfers."""
        return self._links.link_stat()

    def close(self) -> None:
        """Let go of connections and mappings. No pull may be running."""
        self._shm.close()
        self._tcp.close()
        if self._nixl is not None:
            self._nixl.close()

    def _carry(self, peer: Peer, progress: PullProgress) -> str:
        """Run the pull over the right transport; its name."""
        if self._transport == "local" or (self._transport == "auto" and self._local.has(peer)):
            self._over_one_path(peer, progress, "local", self._local)
            return "local"
        if self._nixl is not None:
            self._over_one_path(peer, progress, "nixl", self._nixl)
            return "nixl"
        if self._transport == "shm" or self._may_map(peer):
            try:
                self._over_one_path(peer, progress, "shm", self._shm)
                return "shm"
            except TransferFailed:
                if self._transport == "shm":
                    raise
                with self._lock:
                    _make_room(self._shm_retry_s)
                    self._shm_retry_s[peer.shm_address] = time.monotonic() + SHM_RETRY_S
                self._count(fallbacks=1)
        self._tcp.pull(peer, progress)
        return "tcp"

    def _may_map(self, peer: Peer) -> bool:
        if self._transport != "auto" or peer.host_id != self._host_id:
            return False
        with self._lock:
            return self._shm_retry_s.get(peer.shm_address, 0.0) <= time.monotonic()

    def _over_one_path(
        self, peer: Peer, progress: PullProgress, name: str, transport: _Transport
    ) -> None:
        """Pull over a transport that has but one path to a peer, and measure it."""
        paths = (Path(peer.node, name, peer.shm_address, 0),)
        asked_bytes = len(progress.blocks) * self._segment.layout.slot_bytes
        flight = progress.flight = self._links.begin(paths, asked_bytes)
        if flight is None:
            raise self._links.all_cool_down(paths)
        try:
            transport.pull(peer, progress)
        except TransferFailed:
            self._links.fail(flight, cost_s=time.monotonic() - progress.begin_s)
            raise
        except BaseException:
            self._links.cancel(flight)
            raise
        flight.landed_bytes = int(progress.parts.sum()) * self._segment.layout.part_bytes
        active_s = time.monotonic() - progress.begin_s - progress.waited_s
        self._links.end(flight, active_s=active_s)

    def _check_shape(self, peer: Peer) -> None:
        ours, theirs = self._segment.layout, peer.layout
        if (ours.slot_bytes, ours.part_count) != (theirs.slot_bytes, theirs.part_count):
            raise TransferFailed(
                f"blocks of {peer.node} have {theirs.part_count} parts in {theirs.slot_bytes} "
                f"bytes, ours {ours.part_count} in {ours.slot_bytes}; both must run one model"
            )

    def _count(self, **increments: int) -> None:
        with self._lock:
            for name, by in increments.items():
                self._counts[name] += by


def _make_room(table: dict[Any, Any]) -> None:
    """Forget the oldest entry of a table that is full."""
    if len(table) >= PEERS_LIMIT:
        del table[next(iter(table))]
