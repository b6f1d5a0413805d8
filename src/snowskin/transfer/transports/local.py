"""Reading a segment of this very process: nothing has to be mapped, and nobody can be dead."""

from __future__ import annotations

import threading

from snowskin.terms.errors import TransferFailed
from snowskin.transfer.memory import Segment
from snowskin.transfer.peer import Peer
from snowskin.transfer.progress import PullProgress
from snowskin.transfer.transports.copying import Copying

SEGMENTS_LIMIT = 1024


class LocalTransport:
    """The segments of this process that were registered, by the name of their unix socket."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}
        self._lock = threading.Lock()

    def register(self, peer: Peer, segment: Segment) -> None:
        """Let ``peer`` be read from its segment itself.

        Raises:
            TransferFailed: too many are registered.
        """
        with self._lock:
            if len(self._segments) >= SEGMENTS_LIMIT and peer.shm_address not in self._segments:
                raise TransferFailed(f"more than {SEGMENTS_LIMIT} segments registered")
            self._segments[peer.shm_address] = segment

    def unregister(self, peer: Peer) -> None:
        """Forget a segment, before it is closed. Pulls from it must have ended. Idempotent."""
        with self._lock:
            self._segments.pop(peer.shm_address, None)

    def has(self, peer: Peer) -> bool:
        """Whether the peer's segment is registered."""
        with self._lock:
            return peer.shm_address in self._segments

    def pull(self, peer: Peer, progress: PullProgress) -> None:
        """Copy until every block has landed or missed, or the pull must stop.

        Raises:
            TransferFailed: the segment is not registered.
        """
        with self._lock:
            segment = self._segments.get(peer.shm_address)
        if segment is None:
            raise TransferFailed(f"{peer.node} has no segment registered in this process")
        Copying(segment, lambda: True, progress).run()
