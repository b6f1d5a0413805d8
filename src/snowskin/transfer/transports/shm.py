"""Reading the segment of a peer on the same host: map it once, then copy.

A Messenger hands over its segment's descriptor on a connection that both keep open. The end of
that connection means that the peer is dead, and what it had not finished never will be.
"""

from __future__ import annotations

import os
import socket
import threading
import time

from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.authentication import HANDSHAKE_TIMEOUT_S, authenticate_as_client
from snowskin.transfer.memory import Segment
from snowskin.transfer.peer import Peer
from snowskin.transfer.progress import PullProgress
from snowskin.transfer.transports.copying import Copying

ATTACHMENTS_LIMIT = 128
SWEEP_S = 1.0


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
        self._sweep_s = 0.0
        """When to look for dead peers again."""

    def pull(self, peer: Peer, progress: PullProgress) -> None:
        """Copy until every block has landed or missed, or the pull must stop.

        Raises:
            TransferFailed: the segment cannot be had.
        """
        attachment = self._enter(peer)
        try:
            Copying(attachment.segment, attachment.is_alive, progress).run()
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
            if time.monotonic() >= self._sweep_s:
                self._drop_dead_and_spare()
            attachment = self._attachments.get(peer)
            if attachment is not None and peer not in self._in_use and not attachment.is_alive():
                self._attachments.pop(peer).close()
                attachment = None
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
        self._sweep_s = time.monotonic() + SWEEP_S
        idle = [peer for peer in self._attachments if peer not in self._in_use]
        excess = len(self._attachments) - ATTACHMENTS_LIMIT
        for position, peer in enumerate(idle):
            if position < excess or not self._attachments[peer].is_alive():
                self._attachments.pop(peer).close()
