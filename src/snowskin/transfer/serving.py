"""The server's side of one connection: wait for parts to be ready, send them, say how it ended."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from snowskin.transfer.memory import Segment, SlotState
from snowskin.transfer.table import Table
from snowskin.transfer.wire import (
    BLOCKS_LIMIT,
    COMPUTE,
    FRAME_BYTES,
    HEARTBEAT_S,
    REQUEST,
    REQUEST_MAGIC,
    WAIT_LIMIT_S,
    WANTED,
    ConnectionEnded,
    EndStatus,
    Frame,
    FrameKind,
    limit_blocking,
    receive_exactly,
    request_crc,
    send_buffers,
)

POLL_LEAST_S = 50e-6
POLL_MOST_S = 1e-3
RUN_BYTES_LIMIT = 1 << 20
"""Slices that lie side by side are sent as one frame of at most so much, with one checksum."""
BATCH_BYTES = 4 << 20
"""So much is gathered for one system call."""
BATCH_BUFFERS = 512
_FIRST_READ_BYTES = 16 << 10
_IDLE = Frame(FrameKind.IDLE).pack()


class MessengerStat(msgspec.Struct, frozen=True):
    """What a Messenger has served since its start."""

    pulls: int = 0
    sent_blocks: int = 0
    """Ranges of blocks (mostly whole ones) sent to their end."""
    missed_blocks: int = 0
    """Ranges asked for that were not there (any more), or did not become ready in time."""
    sent_bytes: int = 0
    mappings: int = 0
    """Times that the segment was handed to a process of this host."""
    refused_connections: int = 0
    """Beyond the bound on connections."""
    failed_handshakes: int = 0
    """Callers of another protocol or with another cluster key."""
    broken_connections: int = 0
    """Cut, timed out or ended by a caller that wanted no more, or that sent no valid request."""


class Tally:
    """A ``MessengerStat`` that threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(MessengerStat.__struct_fields__, 0)

    def add(self, **increments: int) -> None:
        """Raise counts by name."""
        with self._lock:
            for name, by in increments.items():
                self._counts[name] += by

    def stat(self) -> MessengerStat:
        """The counts now."""
        with self._lock:
            return MessengerStat(**self._counts)


class BadRequest(Exception):
    """The client, though authenticated, sent what is no request."""


def serve_requests(
    connection: socket.socket,
    segment: Segment,
    tally: Tally,
    *,
    idle_timeout_s: float,
    send_timeout_s: float,
) -> None:
    """Serve pulls one after the other until the client closes the connection or errs.

    Raises:
        BadRequest, OSError: the caller closes the connection.
    """
    limit_blocking(connection, receive_s=idle_timeout_s, send_s=send_timeout_s)
    table = Table(segment)
    request = memoryview(bytearray(_FIRST_READ_BYTES))
    while True:
        try:
            received = connection.recv_into(request)
        except BlockingIOError:
            return
        if received == 0:
            return
        wait_s, wanted = _read_request(connection, request[:received], send_timeout_s)
        serving = Serving(connection, table, wanted)
        try:
            serving.run(wait_s)
        finally:
            tally.add(
                pulls=1,
                sent_blocks=serving.sent_ranges,
                missed_blocks=serving.missed_ranges,
                sent_bytes=serving.sent_bytes,
            )


def _read_request(
    connection: socket.socket, begun: memoryview, timeout_s: float
) -> tuple[float, Sequence[tuple[int, ...]]]:
    """Seconds to wait and wanted ranges, from what was received of a request and its rest.

    Raises:
        BadRequest: it is none.
        OSError: its rest does not come.
    """
    deadline_s = time.monotonic() + timeout_s
    packed = bytes(begun)
    if len(packed) < REQUEST.size:
        packed += _rest(connection, REQUEST.size - len(packed), deadline_s)
    magic, count, wait_s, crc = REQUEST.unpack_from(packed)
    if magic != REQUEST_MAGIC or not 1 <= count <= BLOCKS_LIMIT or not 0 <= wait_s <= WAIT_LIMIT_S:
        raise BadRequest
    missing_bytes = REQUEST.size + count * WANTED.size - len(packed)
    if missing_bytes < 0:
        raise BadRequest
    if missing_bytes:
        packed += _rest(connection, missing_bytes, deadline_s)
    wanted = packed[REQUEST.size :]
    if crc != request_crc(count, wait_s, wanted):
        raise BadRequest
    return wait_s, list(WANTED.iter_unpack(wanted))


def _rest(connection: socket.socket, length_bytes: int, deadline_s: float) -> bytes:
    try:
        return receive_exactly(connection, length_bytes, deadline_s=deadline_s)
    finally:
        connection.settimeout(None)


class Serving:
    """One request. Indices are of its ranges."""

    def __init__(
        self, connection: socket.socket, table: Table, wanted: Sequence[tuple[int, ...]]
    ) -> None:
        self._connection = connection
        self._table = table
        self._wanted = wanted
        self._at = [start for _, _, _, start, _ in wanted]
        """The next byte of each range to be sent."""
        self._batch: list[bytes | memoryview] = []
        self._batch_bytes = 0
        self._unconfirmed: list[int] = []
        """Ranges whose last slice is queued, and whose end is not."""
        self.sent_ranges = 0
        self.missed_ranges = 0
        self.sent_bytes = 0

    def run(self, wait_s: float) -> None:
        """Send all that becomes ready within ``wait_s``, and an end for every range."""
        deadline_s = time.monotonic() + wait_s
        waiting = [index for index in range(len(self._wanted)) if self._advance(index)]
        self._flush()
        while waiting:
            changed = self._wait_for_change(waiting, deadline_s) if wait_s else ()
            if not changed:
                for index in waiting:
                    self._end(index, EndStatus.LATER)
                self.missed_ranges += len(waiting) if wait_s else 0
                break
            ended = {index for index in changed if not self._advance(index)}
            if ended:
                waiting = [index for index in waiting if index not in ended]
            self._flush()
        self._flush()

    def _advance(self, index: int) -> bool:
        """Queue what is newly ready of a range; whether more is to come.

        A checksum counts only if the generation is still right after it was read or computed:
        then it is of the bytes meant, and bytes that change before they are sent fail it there.
        """
        table, layout = self._table, self._table.layout
        slot, flags, generation, start, stop = self._wanted[index]
        if (
            slot >= layout.slot_count
            or not generation % 2  # A free slot.
            or not start < stop <= layout.slot_bytes
            or table.generation[slot] != generation
        ):
            return self._end(index, EndStatus.MISSED)
        # Read after the generation: a newer use of the slot has cleared it before it became live.
        ready = min(table.parts_ready[slot] * layout.part_bytes, stop)
        at = self._at[index]
        if at >= ready:
            return True
        base = slot * layout.slot_bytes
        whole = ready - at == layout.slot_bytes and not flags & COMPUTE
        if whole and table.state[slot] == SlotState.SEALED:
            checksum = table.checksum[slot]
            if table.generation[slot] != generation:
                return self._end(index, EndStatus.MISSED)
            self._queue(FrameKind.WHOLE, index, 0, table.bytes[base : base + ready], checksum)
            self.sent_ranges += 1
            return False
        while at < ready:
            end = min(at + RUN_BYTES_LIMIT, ready)
            piece = table.bytes[base + at : base + end]
            checksum = xxhash.xxh3_64_intdigest(piece)
            if table.generation[slot] != generation:
                return self._end(index, EndStatus.MISSED)
            self._queue(FrameKind.SLICE, index, at, piece, checksum)
            at = self._at[index] = end
        if at < stop:
            return True
        self._unconfirmed.append(index)
        return False

    def _wait_for_change(self, waiting: list[int], deadline_s: float) -> list[int]:
        """Sleep until the table shows something new; of what, or nothing by the deadline.

        Raises:
            ConnectionEnded: the client closed the connection (or broke the protocol by talking).
        """
        segment, part_bytes = self._table.segment, self._table.layout.part_bytes
        slots = np.array([self._wanted[index][0] for index in waiting], dtype=np.intp)
        generations = np.array([self._wanted[index][2] for index in waiting], dtype=np.uint64)
        parts = np.array([self._at[index] // part_bytes for index in waiting], dtype=np.uint32)
        pause_s = POLL_LEAST_S
        heard_s = time.monotonic()
        while (now_s := time.monotonic()) < deadline_s:
            changed = (segment.parts_ready[slots] > parts) | (
                segment.generation[slots] != generations
            )
            if changed.any():
                return [waiting[position] for position in np.flatnonzero(changed)]
            if now_s - heard_s >= HEARTBEAT_S:
                send_buffers(self._connection, [memoryview(_IDLE)])
                heard_s = now_s
            if select.select([self._connection], [], [], pause_s)[0]:
                raise ConnectionEnded("the client wants no more")
            pause_s = min(2 * pause_s, POLL_MOST_S)
        return []

    def _confirm(self) -> None:
        """Queue the ends of ranges whose bytes have left: were they right until then?"""
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        table = self._table
        for index in unconfirmed:
            slot, _, generation, _, _ = self._wanted[index]
            sealed = table.state[slot] == SlotState.SEALED
            checksum = table.checksum[slot] if sealed else 0
            if table.generation[slot] != generation:
                self._end(index, EndStatus.MISSED)
            else:
                self._end(index, EndStatus.SEALED if sealed else EndStatus.SENT, checksum)

    def _end(self, index: int, status: EndStatus, checksum: int = 0) -> bool:
        """Queue a range's end; that nothing more is to come."""
        if status in {EndStatus.SENT, EndStatus.SEALED}:
            self.sent_ranges += 1
        elif status == EndStatus.MISSED:
            self.missed_ranges += 1
        self._queue(FrameKind.END, index, 0, None, checksum, status)
        return False

    def _queue(
        self,
        kind: FrameKind,
        index: int,
        start: int,
        content: memoryview | None,
        checksum: int,
        status: int = 0,
    ) -> None:
        length_bytes = len(content) if content is not None else 0
        self._batch.append(Frame(kind, status, index, start, length_bytes, checksum).pack())
        self._batch_bytes += FRAME_BYTES + length_bytes
        if content is not None:
            self._batch.append(content)
        if self._batch_bytes >= BATCH_BYTES or len(self._batch) >= BATCH_BUFFERS:
            self._flush()

    def _flush(self) -> None:
        """Send what is queued, and the ends that follow from its having been sent."""
        while self._batch or self._unconfirmed:
            batch, self._batch = self._batch, []
            sent_bytes, self._batch_bytes = self._batch_bytes, 0
            send_buffers(self._connection, batch)
            self.sent_bytes += sent_bytes
            # The kernel has its own copy now, so what is still live was sent right.
            self._confirm()
