"""The server's side of one connection: wait for parts to be ready, send them, say how it ended."""

from __future__ import annotations

import select
import socket
import threading
import time

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from snowskin.transfer.memory import Segment, SlotState
from snowskin.transfer.wire import (
    BLOCKS_LIMIT,
    REQUEST,
    REQUEST_MAGIC,
    WAIT_LIMIT_S,
    WANTED,
    ConnectionEnded,
    EndStatus,
    Frame,
    FrameKind,
    receive_exactly,
    request_crc,
    send_buffers,
)

POLL_LEAST_S = 50e-6
POLL_MOST_S = 1e-3
SLICE_BYTES_LIMIT = 1 << 20
"""A slice of an unsealed block is at most so long (but at least one part)."""
BATCH_BYTES = 4 << 20
"""So much is gathered for one system call."""
BATCH_BUFFERS = 512


class MessengerStat(msgspec.Struct, frozen=True):
    """What a Messenger has served since its start."""

    pulls: int = 0
    sent_blocks: int = 0
    """Blocks sent whole."""
    missed_blocks: int = 0
    """Blocks asked for that were not there (any more), or never became ready in time."""
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
        self._stat = MessengerStat()

    def add(self, **increments: int) -> None:
        """Raise counts by name."""
        with self._lock:
            raised = {name: getattr(self._stat, name) + by for name, by in increments.items()}
            self._stat = msgspec.structs.replace(self._stat, **raised)

    def stat(self) -> MessengerStat:
        """The counts now."""
        with self._lock:
            return self._stat


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
    while True:
        connection.settimeout(idle_timeout_s)
        try:
            header = receive_exactly(connection, REQUEST.size)
        except (ConnectionEnded, TimeoutError):
            return
        connection.settimeout(send_timeout_s)
        magic, count, wait_s, crc = REQUEST.unpack(header)
        if (
            magic != REQUEST_MAGIC
            or not 1 <= count <= BLOCKS_LIMIT
            or not 0 <= wait_s <= WAIT_LIMIT_S
        ):
            raise BadRequest
        wanted = receive_exactly(connection, count * WANTED.itemsize)
        if crc != request_crc(count, wait_s, wanted):
            raise BadRequest
        serving = _Serving(connection, segment, np.frombuffer(wanted, dtype=WANTED))
        try:
            serving.run(wait_s)
        finally:
            tally.add(
                pulls=1,
                sent_blocks=serving.sent_blocks,
                missed_blocks=serving.missed_blocks,
                sent_bytes=serving.sent_bytes,
            )


class _Serving:
    """One pull. Indices are of the request's blocks."""

    def __init__(
        self, connection: socket.socket, segment: Segment, wanted: npt.NDArray[np.void]
    ) -> None:
        self._connection = connection
        self._segment = segment
        self._part_bytes = segment.layout.part_bytes
        self._part_count = segment.layout.part_count
        self._slots = wanted["slot"].astype(np.intp)
        self._generations = wanted["generation"].astype(np.uint64)
        self._sent = np.zeros(len(wanted), dtype=np.int64)
        self._open = np.arange(len(wanted), dtype=np.intp)
        self._batch: list[memoryview] = []
        self._unconfirmed: list[int] = []
        """Blocks whose last slice is queued, and whose end is not."""
        self._batch_bytes = 0
        self.sent_blocks = 0
        self.missed_blocks = 0
        self.sent_bytes = 0

    def run(self, wait_s: float) -> None:
        """Send all that becomes ready within ``wait_s``, and an end for every block."""
        deadline_s = time.monotonic() + wait_s
        # An index out of range, or an even generation (a free slot), is a miss from the start.
        possible = (self._slots < self._segment.layout.slot_count) & (self._generations % 2 == 1)
        self._end_blocks(self._open[~possible], EndStatus.MISSED)
        self._open = self._open[possible]
        while len(self._open):
            if self._send_ready():
                continue
            self._flush()
            if not self._wait_for_change(deadline_s):
                self._end_blocks(self._open, EndStatus.MISSED)
                break
        self._flush()
        self._queue(Frame(FrameKind.DONE).pack())
        self._flush()

    def _wait_for_change(self, deadline_s: float) -> bool:
        """Sleep until the table shows something new; False if it does not by the deadline.

        Raises:
            ConnectionEnded: the client closed the connection (or broke the protocol by talking).
        """
        table, slots = self._segment, self._slots[self._open]
        generations = self._generations[self._open].tobytes()
        parts = self._sent[self._open].astype(np.uint32).tobytes()
        pause_s = POLL_LEAST_S
        while time.monotonic() < deadline_s:
            if (
                table.parts_ready[slots].tobytes() != parts
                or table.generation[slots].tobytes() != generations
            ):
                return True
            if select.select([self._connection], [], [], pause_s)[0]:
                raise ConnectionEnded("the client wants no more")
            pause_s = min(2 * pause_s, POLL_MOST_S)
        return False

    def _send_ready(self) -> bool:
        """One look at the table and all slices that it allows; whether anything moved."""
        table, slots = self._segment, self._slots[self._open]
        live = table.generation[slots] == self._generations[self._open]
        # Read after the generation: a newer use of the slot has cleared it before it became live.
        ready = table.parts_ready[slots].astype(np.int64)
        self._end_blocks(self._open[~live], EndStatus.MISSED)
        open_now, ready = self._open[live], ready[live]
        moving = open_now[ready > self._sent[open_now]]
        for index, parts in zip(moving, ready[ready > self._sent[open_now]], strict=True):
            self._send_block(int(index), int(parts))
        still = live.copy()
        still[live] = self._sent[open_now] < self._part_count
        moved = len(moving) > 0 or not live.all()
        self._open = self._open[still]
        return moved

    def _send_block(self, index: int, ready: int) -> None:
        """Queue a block's newly ready parts as slices, each with a checksum.

        A checksum counts only if the generation is still right after it was read or computed:
        then it is of the bytes meant, and bytes that change before they are sent fail it there.
        """
        slot = int(self._slots[index])
        first = int(self._sent[index])
        ready = min(ready, self._part_count)
        stored = self._stored_checksum(slot)
        whole = first == 0 and ready == self._part_count and stored is not None
        step = ready if whole else max(1, SLICE_BYTES_LIMIT // self._part_bytes)
        self._sent[index] = ready
        for start in range(first, ready, step):
            stop = min(start + step, ready)
            if whole and stored is not None:
                checksum = stored
            else:
                of_parts = self._segment.data[slot, start:stop]
                checksum = xxhash.xxh3_64_intdigest(of_parts.data)
            if not self._is_live(index):
                self._sent[index] = self._part_count
                self._end_blocks([index], EndStatus.MISSED)
                return
            self._queue_slice(index, start, stop - start, checksum)
        if ready == self._part_count:
            self._unconfirmed.append(index)

    def _confirm(self) -> None:
        """Queue the ends of whole blocks, whose bytes have left: were they right until then?"""
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for index in unconfirmed:
            checksum = self._stored_checksum(int(self._slots[index]))
            if not self._is_live(index):
                self._end_blocks([index], EndStatus.MISSED)
            elif checksum is None:
                self._end_blocks([index], EndStatus.SENT)
            else:
                self._end_blocks([index], EndStatus.SEALED, checksum)

    def _is_live(self, index: int) -> bool:
        live: bool = self._segment.generation[self._slots[index]] == self._generations[index]
        return live

    def _stored_checksum(self, slot: int) -> int | None:
        if self._segment.state[slot] != SlotState.SEALED:
            return None
        return int(self._segment.checksum[slot])

    def _queue_slice(self, index: int, first: int, count: int, checksum: int) -> None:
        self._queue(Frame(FrameKind.SLICE, 0, index, first, count, checksum).pack())
        parts = self._segment.data[self._slots[index], first : first + count]
        self._queue(parts.reshape(-1).data)

    def _end_blocks(
        self, indices: npt.NDArray[np.intp] | list[int], status: EndStatus, checksum: int = 0
    ) -> None:
        if status == EndStatus.MISSED:
            self.missed_blocks += len(indices)
        else:
            self.sent_blocks += len(indices)
        for index in indices:
            self._queue(Frame(FrameKind.END, status, int(index), checksum=checksum).pack())

    def _queue(self, buffer: bytes | memoryview) -> None:
        self._batch.append(memoryview(buffer))
        self._batch_bytes += len(buffer)
        if self._batch_bytes >= BATCH_BYTES or len(self._batch) >= BATCH_BUFFERS:
            self._flush()

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        send_buffers(self._connection, batch)
        self.sent_bytes += self._batch_bytes
        self._batch_bytes = 0
        # The kernel has its own copy now, so what is still live was sent right.
        self._confirm()
