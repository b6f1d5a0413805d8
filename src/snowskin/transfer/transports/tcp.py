"""Reading a peer's segment over TCP, straight into our own: see ``transfer.wire``.

Each pull has a connection to itself, taken from a small pool of idle ones. The server sends what
is ready without being asked again, so that a pull costs one round trip, however long it follows a
block that is still being written.
"""

from __future__ import annotations

import socket
import struct
import threading
import time

import numpy as np
import xxhash

from snowskin.terms.errors import TransferFailed
from snowskin.transfer.authentication import HANDSHAKE_TIMEOUT_S, authenticate_as_client
from snowskin.transfer.peer import Peer
from snowskin.transfer.progress import PullProgress
from snowskin.transfer.wire import (
    FRAME_BYTES,
    REQUEST,
    REQUEST_MAGIC,
    WAIT_LIMIT_S,
    WANTED,
    ConnectionEnded,
    EndStatus,
    Frame,
    FrameKind,
    request_crc,
    tune,
)

TICK_S = 0.02
"""A silent connection looks so often for cancellation and deadline."""
CHUNK_BYTES = 256 << 10
"""So much is received before it is hashed, while it is still in the processor's cache."""
IDLE_PER_PEER_LIMIT = 4
IDLE_PEERS_LIMIT = 128


class TcpTransport:
    """Connections to peers; idle ones are kept for the next pull."""

    def __init__(self, cluster_key: bytes) -> None:
        self._cluster_key = cluster_key
        self._idle: dict[tuple[str, int], list[socket.socket]] = {}
        self._lock = threading.Lock()
        self.opened_total = 0
        """Connections made since the start."""

    def pull(self, peer: Peer, progress: PullProgress) -> None:
        """Receive until every block has landed or missed, or the pull must stop.

        Raises:
            TransferFailed: the peer cannot be reached.
        """
        connection = self._take(peer) or self._open(peer)
        try:
            _Receiving(connection, progress).run()
        except (_Stopped, OSError):
            connection.close()  # Landed blocks stay; the server sees the end and stops sending.
        except BaseException:
            connection.close()
            raise
        else:
            self._give_back(peer, connection)

    def close(self) -> None:
        """Close the idle connections. No pull may be running."""
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _take(self, peer: Peer) -> socket.socket | None:
        while True:
            with self._lock:
                idle = self._idle.get((peer.host, peer.port))
                if not idle:
                    return None
                connection = idle.pop()
            if _is_quiet(connection):
                return connection
            connection.close()

    def _open(self, peer: Peer) -> socket.socket:
        try:
            connection = socket.create_connection((peer.host, peer.port), HANDSHAKE_TIMEOUT_S)
        except OSError as error:
            raise TransferFailed(
                f"cannot reach {peer.node} at {peer.host}:{peer.port}: {error}"
            ) from error
        try:
            tune(connection)
            authenticate_as_client(connection, self._cluster_key)
            # A blocking socket with the kernel's own timeout: one system call for each receive,
            # and MSG_WAITALL counts.
            connection.settimeout(None)
            tick = struct.pack("@ll", 0, int(TICK_S * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        except (OSError, TransferFailed) as error:
            connection.close()
            raise TransferFailed(
                f"{peer.node} at {peer.host}:{peer.port} did not authenticate: {error}"
            ) from error
        with self._lock:
            self.opened_total += 1
        return connection

    def _give_back(self, peer: Peer, connection: socket.socket) -> None:
        address = (peer.host, peer.port)
        with self._lock:
            idle = self._idle.setdefault(address, [])
            surplus = [connection] if len(idle) >= IDLE_PER_PEER_LIMIT else []
            if not surplus:
                idle.append(connection)
            if len(self._idle) > IDLE_PEERS_LIMIT:
                surplus += self._idle.pop(next(iter(self._idle)))
        for spare in surplus:
            spare.close()


def _is_quiet(connection: socket.socket) -> bool:
    """Whether an idle connection is open and has nothing left over."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class _Stopped(Exception):
    """The pull was cancelled or its time is over."""


class _Receiving:
    """One pull over one connection."""

    def __init__(self, connection: socket.socket, progress: PullProgress) -> None:
        self._connection = connection
        self._progress = progress
        self._frame = bytearray(FRAME_BYTES)
        self._frame_view = memoryview(self._frame)
        count = len(progress.parts)
        self._failed = np.zeros(count, dtype=np.bool_)
        """Blocks with a slice whose checksum was wrong; why, their end will tell."""
        self._whole_checksum: dict[int, int] = {}
        """Of blocks that came in one slice, its checksum, which was right."""

    def run(self) -> None:
        """Ask, then take frames until the server is done.

        Raises:
            _Stopped: see there.
            OSError: the connection broke, or the server sent what makes no sense.
        """
        self._ask()
        while True:
            self._fill(self._frame_view)
            frame = Frame.unpack(self._frame)
            if frame.kind == FrameKind.DONE:
                return
            if frame.block >= len(self._failed):
                raise ConnectionError(f"a frame names block {frame.block}")
            if frame.kind == FrameKind.SLICE:
                self._take_slice(frame.block, frame.first, frame.parts, frame.checksum)
            elif frame.kind == FrameKind.END:
                self._take_end(frame.block, frame.status, frame.checksum)
            else:
                raise ConnectionError(f"a frame of kind {frame.kind}")

    def _ask(self) -> None:
        progress = self._progress
        wanted = np.empty(len(self._failed), dtype=WANTED)
        wanted["slot"] = progress.remote_slots
        wanted["generation"] = progress.generations
        wait_s = min(max(0.0, progress.deadline_s - time.monotonic()), WAIT_LIMIT_S)
        packed = wanted.tobytes()
        crc = request_crc(len(wanted), wait_s, packed)
        self._connection.sendall(REQUEST.pack(REQUEST_MAGIC, len(wanted), wait_s, crc) + packed)

    def _take_slice(self, index: int, first: int, count: int, checksum: int) -> None:
        progress = self._progress
        in_order = first == progress.parts[index] or self._failed[index]
        if not in_order or not 1 <= count <= progress.part_count - first:
            raise ConnectionError(f"parts {first}+{count} of block {index} are out of order")
        slot = progress.local_slots[index]
        parts = progress.segment.data[slot, first : first + count].reshape(-1).data
        hasher = xxhash.xxh3_64()
        for start in range(0, len(parts), CHUNK_BYTES):
            chunk = parts[start : start + CHUNK_BYTES]
            self._fill(chunk)
            hasher.update(chunk)
        if hasher.intdigest() != checksum:
            self._failed[index] = True
        elif not self._failed[index]:
            if count == progress.part_count:
                self._whole_checksum[index] = checksum
            progress.land(index, first + count)

    def _take_end(self, index: int, status: int, checksum: int) -> None:
        progress = self._progress
        whole = not self._failed[index] and progress.parts[index] == progress.part_count
        if whole and status == EndStatus.SEALED and self._whole_checksum.get(index) != checksum:
            slot = int(progress.local_slots[index])
            if progress.segment.compute_checksum(slot) != checksum:
                whole = False
                self._failed[index] = True
        if whole:
            return
        progress.missed[index] = True
        # A checksum that failed because the slot was given away meanwhile is a plain miss.
        if self._failed[index] and status != EndStatus.MISSED:
            progress.checksum_failures += 1
            progress.segment.publish(int(progress.local_slots[index]), 0)

    def _fill(self, buffer: memoryview) -> None:
        progress = self._progress
        if progress.must_stop():
            raise _Stopped
        while buffer:
            begin_s = time.monotonic()
            try:
                received = self._connection.recv_into(buffer, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                progress.waited_s += time.monotonic() - begin_s
                if progress.must_stop():
                    raise _Stopped from None
                continue
            if received == 0:
                raise ConnectionEnded("the peer closed the connection")
            buffer = buffer[received:]
