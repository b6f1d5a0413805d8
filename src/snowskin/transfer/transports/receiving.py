"""One request over one connection: what is asked for, and taking what comes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import xxhash

from snowskin.transfer.paths import Flight, Path
from snowskin.transfer.progress import PullProgress
from snowskin.transfer.slicing import Batch, Range, SliceBoard
from snowskin.transfer.transports.striping import Stopped
from snowskin.transfer.wire import (
    COMPUTE,
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
)

CHUNK_BYTES = 512 << 10
"""So much is received before it is hashed, while it is still in the processor's cache."""
SLOWEST_BYTES_PER_S = 4 << 20
"""A path that carries less is given up if there is another one."""


class PullState:
    """What the workers of one pull share; changed under the progress's lock.

    Args:
        attempts_limit: a range that has arrived damaged so often is given up.

    Attributes:
        checksums: stored ones of sealed blocks, as far as the peer has told them.
    """

    def __init__(self, progress: PullProgress, board: SliceBoard, attempts_limit: int) -> None:
        self.progress = progress
        self.attempts_limit = attempts_limit
        self.board = board
        self.bytes = progress.segment.data.reshape(-1).data
        self.checksums: dict[int, int] = {}
        self.damaged_ranges = 0
        """Ranges that arrived damaged and were asked for again."""
        self.suspects: dict[int, Path] = {}
        """Of sealed blocks that arrived damaged, over which path: it or the source is to blame."""
        self.guilty: set[Path] = set()
        """Paths that damaged what the source had right."""


class Receiving:
    """One request. Indices are of its ranges.

    Args:
        patience: how long the peer may be silent, asked anew at each silence.

    Attributes:
        waited_s: how long nothing came.
        latency_s: until the first frame of what was ready; None where there was none.
        heard: whether anything came at all.
    """

    def __init__(
        self,
        connection: socket.socket,
        flight: Flight,
        state: PullState,
        batch: Batch,
        patience: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._flight = flight
        self._state = state
        self._progress = state.progress
        self._batch = batch
        self._patience = patience
        self._at = [one.start for one in batch.ranges]
        """The next byte of each range that is not here."""
        self._open = [True] * len(batch.ranges)
        self._damaged: set[int] = set()
        self._frame = bytearray(FRAME_BYTES)
        self._frame_view = memoryview(self._frame)
        self.waited_s = 0.0
        self.latency_s: float | None = None
        self.heard = False

    def run(self) -> None:
        """Ask, then take frames until every range has ended.

        Raises:
            Stopped: see there.
            OSError: the connection broke or fell silent, or the server sent what makes no sense.
        """
        begin_s = time.monotonic()
        self._ask(begin_s)
        left = len(self._open)
        while left:
            self._fill(self._frame_view)
            frame = Frame.unpack(self._frame)
            if not self.heard:
                self.heard = True
                if frame.kind in {FrameKind.SLICE, FrameKind.WHOLE}:
                    self.latency_s = time.monotonic() - begin_s
            if frame.kind == FrameKind.IDLE:
                self._flight.is_waiting = True
                continue
            self._flight.is_waiting = False
            if frame.range >= len(self._open) or not self._open[frame.range]:
                raise ConnectionError(f"a frame names range {frame.range}")
            if frame.kind == FrameKind.WHOLE:
                self._take_whole(frame)
                left -= 1
            elif frame.kind == FrameKind.SLICE:
                self._take_slice(frame)
            elif frame.kind == FrameKind.END:
                self._take_end(frame)
                left -= 1
            else:
                raise ConnectionError(f"a frame of kind {frame.kind}")

    def unfinished(self) -> tuple[Range, ...]:
        """What has not arrived of the ranges that have not ended."""
        return tuple(
            self._rest(index)
            for index, is_open in enumerate(self._open)
            if is_open and self._at[index] < self._batch.ranges[index].stop
        )

    def _ask(self, now_s: float) -> None:
        progress = self._progress
        wait_s = 0.0
        if self._batch.follow:
            wait_s = min(max(0.0, progress.deadline_s - now_s), WAIT_LIMIT_S)
        blocks = progress.blocks
        wanted = b"".join(
            WANTED.pack(
                blocks[one.block].remote_slot,
                COMPUTE if one.attempt else 0,
                blocks[one.block].remote_generation,
                one.start,
                one.stop,
            )
            for one in self._batch.ranges
        )
        count = len(self._batch.ranges)
        crc = request_crc(count, wait_s, wanted)
        try:
            self._connection.sendall(REQUEST.pack(REQUEST_MAGIC, count, wait_s, crc) + wanted)
        except BlockingIOError as error:
            raise TimeoutError("the peer takes no request") from error

    def _take_slice(self, frame: Frame) -> None:
        """Receive the next bytes of a range; they count if their checksum is right."""
        index, start, stop = frame.range, frame.start, frame.start + frame.length
        one = self._batch.ranges[index]
        in_order = start == self._at[index] or index in self._damaged
        if not in_order or not one.start <= start < stop <= one.stop:
            raise ConnectionError(f"bytes {start} to {stop} of range {index} are out of order")
        if self._receive(one.block, start, stop) != frame.checksum:
            self._damaged.add(index)
        elif index not in self._damaged:
            self._at[index] = stop
            with self._progress.lock:
                self._land(one.block, start, stop)

    def _take_whole(self, frame: Frame) -> None:
        """Receive a sealed block, which ends its range."""
        index = frame.range
        one = self._batch.ranges[index]
        if self._at[index] or frame.length != one.stop or one.stop != self._block_bytes:
            raise ConnectionError(f"range {index} is not a whole block")
        received = self._receive(one.block, 0, one.stop)
        self._open[index] = False
        with self._progress.lock:
            if received != frame.checksum:
                self._state.suspects[one.block] = self._flight.path
                self._again(index)
                return
            self._at[index] = one.stop
            self._land(one.block, 0, one.stop)

    def _take_end(self, frame: Frame) -> None:
        index, status = frame.range, frame.status
        one = self._batch.ranges[index]
        board, progress = self._state.board, self._progress
        with progress.lock:
            if status == EndStatus.MISSED:
                progress.miss(one.block)
                board.drop(self._rest(index))
            elif index in self._damaged:
                # Freshly computed, and the slot was still the same afterwards: it was the wire.
                self._state.guilty.add(self._flight.path)
                self._again(index)
            elif status == EndStatus.LATER:
                board.defer([self._rest(index)])
            elif self._at[index] < one.stop:
                raise ConnectionError(f"range {index} ended before its last byte")
            elif status == EndStatus.SEALED:
                self._state.checksums[one.block] = frame.checksum
                self._verify(one.block)
        self._open[index] = False

    def _again(self, index: int) -> None:
        """A range arrived damaged: have it asked for again, or give its block up."""
        rest = self._rest(index)
        if rest.attempt + 1 < self._state.attempts_limit:
            self._state.damaged_ranges += 1
            self._state.board.give_back([rest._replace(attempt=rest.attempt + 1)])
            return
        if not self._progress.missed[rest.block]:
            self._progress.reject(rest.block)
        self._state.board.drop(rest)

    def _land(self, block: int, start: int, stop: int) -> None:
        self._flight.landed_bytes += stop - start
        self._progress.land_bytes(block, start, stop)
        self._state.board.land(block, stop - start)

    def _verify(self, block: int) -> None:
        """Compare a block that came in pieces with its stored checksum, once all of it is here."""
        progress = self._progress
        if progress.parts[block] < progress.part_count or progress.missed[block]:
            return
        checksum = self._state.checksums.pop(block)
        if progress.segment.compute_checksum(progress.blocks[block].local_slot) != checksum:
            progress.reject(block)
        elif block in self._state.suspects:
            self._state.guilty.add(self._state.suspects.pop(block))

    def _rest(self, index: int) -> Range:
        return self._batch.ranges[index]._replace(start=self._at[index])

    @property
    def _block_bytes(self) -> int:
        return self._progress.segment.layout.slot_bytes

    def _receive(self, block: int, start: int, stop: int) -> int:
        """Receive bytes into their place in our segment; their checksum."""
        base = self._progress.blocks[block].local_slot * self._block_bytes
        content = self._state.bytes[base + start : base + stop]
        if stop - start <= CHUNK_BYTES:
            self._fill(content)
            return int(xxhash.xxh3_64_intdigest(content))
        hasher = xxhash.xxh3_64()
        for at in range(0, stop - start, CHUNK_BYTES):
            chunk = content[at : at + CHUNK_BYTES]
            self._fill(chunk)
            hasher.update(chunk)
        return int(hasher.intdigest())

    def _fill(self, buffer: memoryview) -> None:
        progress = self._progress
        if progress.must_stop():
            raise Stopped
        size_bytes = len(buffer)
        received = self._receive_some(buffer)
        if received == size_bytes:
            return
        begin_s = heard_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if received:
                buffer = buffer[received:]
                heard_s = now_s
                if not buffer:
                    return
            patience_s = self._patience()
            if now_s - heard_s > patience_s:
                raise TimeoutError(f"nothing came for {patience_s:.2f} s")
            if now_s - begin_s > patience_s + size_bytes / SLOWEST_BYTES_PER_S:
                raise TimeoutError(f"{size_bytes} bytes took longer than {now_s - begin_s:.2f} s")
            if progress.must_stop():
                raise Stopped
            received = self._receive_some(buffer)

    def _receive_some(self, buffer: memoryview) -> int:
        """Bytes received until the buffer is full or the socket's tick is over."""
        begin_s = time.monotonic()
        try:
            received = self._connection.recv_into(buffer, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            self.waited_s += time.monotonic() - begin_s
            self._flight.is_waiting = True
            return 0
        if received == 0:
            raise ConnectionEnded("the peer closed the connection")
        return received
