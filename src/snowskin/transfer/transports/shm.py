"""Reading the segment of a peer on the same host: map it once, then copy.

A Messenger hands over its segment's descriptor on a connection that both keep open. The end of
that connection means that the peer is dead, and what it had not finished never will be.
"""

from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import numpy.typing as npt

from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.authentication import HANDSHAKE_TIMEOUT_S, authenticate_as_client
from snowskin.transfer.memory import Segment
from snowskin.transfer.peer import Peer
from snowskin.transfer.progress import PullProgress

POLL_LEAST_S = 50e-6
POLL_MOST_S = 1e-3
LOOKS_PER_LIFE_SIGN = 8
"""Whether the peer still lives is asked once in so many looks at its table."""
ROUND_BYTES = 8 << 20
"""At most about so much is copied between two looks at generations, cancellation and deadline."""
ATTACHMENTS_LIMIT = 128


class Attachment:
    """A peer's segment in our address space, and the connection that tells whether it lives."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        self.segment = segment
        self._connection = connection

    @classmethod
    def open(cls, peer: Peer, cluster_key: bytes) -> Attachment:
        """Ask the peer's Messenger for its segment.

        Raises:
            OSError, TransferFailed, InvalidInput: it could not be had.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(HANDSHAKE_TIMEOUT_S)
            connection.connect(f"\0{peer.shm_address}")
            authenticate_as_client(connection, cluster_key)
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            if len(fds) != 1:
                for fd in fds:
                    os.close(fd)
                raise TransferFailed(f"{peer.node} handed over no segment")
            segment = Segment.attach(fds[0], peer.layout)
            connection.setblocking(False)
            return cls(connection, segment)
        except BaseException:
            connection.close()
            raise

    def is_alive(self) -> bool:
        """Whether the peer's Messenger still runs."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Let go; a copy that still runs keeps the pages it reads."""
        self._connection.close()
        self.segment.close()


class ShmTransport:
    """Attachments to peers, each made at its first use and dropped when the peer has died."""

    def __init__(self, cluster_key: bytes) -> None:
        self._cluster_key = cluster_key
        self._attachments: dict[Peer, Attachment] = {}
        self._in_use: dict[Peer, int] = {}
        self._lock = threading.Lock()

    def pull(self, peer: Peer, progress: PullProgress) -> None:
        """Copy until every block has landed or missed, or the pull must stop.

        Raises:
            TransferFailed: the segment cannot be had.
        """
        attachment = self._enter(peer)
        try:
            _Copying(attachment, progress).run()
        finally:
            self._leave(peer)

    def drop_dead(self) -> None:
        """Unmap the segments of peers that have died, so that their memory is free again."""
        with self._lock:
            self._drop_dead_and_spare()

    def close(self) -> None:
        """Let go of all peers. No pull may be running."""
        with self._lock:
            for attachment in self._attachments.values():
                attachment.close()
            self._attachments.clear()

    def _enter(self, peer: Peer) -> Attachment:
        with self._lock:
            self._drop_dead_and_spare()
            attachment = self._attachments.get(peer)
            if attachment is not None:
                self._in_use[peer] = self._in_use.get(peer, 0) + 1
                return attachment
        try:
            opened = Attachment.open(peer, self._cluster_key)
        except (OSError, InvalidInput, TransferFailed) as error:
            raise TransferFailed(f"cannot map the segment of {peer.node}: {error}") from error
        with self._lock:
            attachment = self._attachments.setdefault(peer, opened)
            self._in_use[peer] = self._in_use.get(peer, 0) + 1
        if attachment is not opened:
            opened.close()  # Another thread was quicker.
        return attachment

    def _leave(self, peer: Peer) -> None:
        with self._lock:
            self._in_use[peer] -= 1
            if not self._in_use[peer]:
                del self._in_use[peer]

    def _drop_dead_and_spare(self) -> None:
        """Drop idle attachments of dead peers, and the oldest idle ones beyond the limit."""
        idle = [peer for peer in self._attachments if peer not in self._in_use]
        excess = len(self._attachments) - ATTACHMENTS_LIMIT
        for position, peer in enumerate(idle):
            if position < excess or not self._attachments[peer].is_alive():
                self._attachments.pop(peer).close()


class _Copying:
    """One pull by copying."""

    def __init__(self, attachment: Attachment, progress: PullProgress) -> None:
        self._attachment = attachment
        self._source = attachment.segment
        self._progress = progress
        part_bytes = progress.segment.layout.part_bytes
        self._round_parts = max(1, ROUND_BYTES // part_bytes)

    def run(self) -> None:
        """Copy what is ready, wait for more, until nothing is open or the pull must stop."""
        progress = self._progress
        in_range = progress.remote_slots < self._source.layout.slot_count
        progress.missed |= ~in_range | (progress.generations % 2 == 0)
        while len(indices := progress.open_indices()) and not progress.must_stop():
            if self._copy_ready(indices) or self._wait_for_change(indices):
                continue
            # Dead. It may have finished something between our last look and its end.
            if not self._copy_ready(indices):
                return

    def _wait_for_change(self, indices: npt.NDArray[np.intp]) -> bool:
        """Sleep until the table shows something new or the pull must stop; False if it is dead.

        A node may wait on several pulls while its engine computes, so a look must cost little:
        two gathers and two comparisons of bytes.
        """
        progress, table = self._progress, self._source
        slots = progress.remote_slots[indices]
        generations = progress.generations[indices].tobytes()
        parts = progress.parts[indices].astype(np.uint32).tobytes()
        begin_s = time.monotonic()
        pause_s = POLL_LEAST_S
        looks = 0
        try:
            while not progress.must_stop():
                if looks % LOOKS_PER_LIFE_SIGN == 0 and not self._attachment.is_alive():
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, POLL_MOST_S)
                looks += 1
                if (
                    table.parts_ready[slots].tobytes() != parts
                    or table.generation[slots].tobytes() != generations
                ):
                    return True
            return True
        finally:
            progress.waited_s += time.monotonic() - begin_s

    def _copy_ready(self, indices: npt.NDArray[np.intp]) -> bool:
        """One look at the peer's table and one round of copies; whether anything moved."""
        source, progress = self._source, self._progress
        slots = progress.remote_slots[indices]
        live = source.generation[slots] == progress.generations[indices]
        ready = np.minimum(source.parts_ready[slots], progress.part_count).astype(np.int64)
        progress.missed[indices[~live]] = True
        moving = live & (ready > progress.parts[indices])
        if not moving.any():
            return not live.all()
        self._copy_round(indices[moving], ready[moving])
        return True

    def _copy_round(self, indices: npt.NDArray[np.intp], ready: npt.NDArray[np.int64]) -> None:
        """Copy runs of neighbouring slots with equal progress, until the round has enough."""
        progress = self._progress
        begun = progress.parts[indices]
        broken = (
            (np.diff(progress.remote_slots[indices]) != 1)
            | (np.diff(progress.local_slots[indices]) != 1)
            | (np.diff(begun) != 0)
            | (np.diff(ready) != 0)
        )
        starts = np.concatenate(([0], np.flatnonzero(broken) + 1, [len(indices)]))
        budget_parts = self._round_parts
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            first, last = int(begun[start]), int(ready[start])
            at = start
            while at < end and budget_parts > 0:
                width = max(1, min(end - at, budget_parts // (last - first)))
                self._copy_run(indices[at : at + width], first, last)
                budget_parts -= width * (last - first)
                at += width
            if budget_parts <= 0:
                return

    def _copy_run(self, run: npt.NDArray[np.intp], first: int, last: int) -> None:
        """Copy parts ``first`` to ``last`` of neighbouring slots; land those that stayed live."""
        progress, source = self._progress, self._source
        here, there = int(progress.local_slots[run[0]]), int(progress.remote_slots[run[0]])
        count = len(run)
        ours = progress.segment.data[here : here + count, first:last]
        ours[:] = source.data[there : there + count, first:last]
        live = source.generation[there : there + count] == progress.generations[run]
        progress.missed[run[~live]] = True
        if live.any():
            progress.land(run[live], last)


__all__ = ["Attachment", "ShmTransport"]
