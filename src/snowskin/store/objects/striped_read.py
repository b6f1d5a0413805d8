"""Reading a node over several paths: pieces of an object, each over whichever path works.

Which path, and what of it, is decided as for pulls of blocks: by ``transfer.transports.striping``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from snowskin.store.objects.channels import Known, NodeChannel, read_request
from snowskin.store.objects.words import NodeAddress
from snowskin.terms.errors import TransferFailed
from snowskin.transfer.paths import Flight
from snowskin.transfer.slicing import Batch, Range, SliceBoard
from snowskin.transfer.transports.striping import Stopped, Striping
from snowskin.transfer.transports.tcp import TcpTransport
from snowskin.transfer.wire import limit_blocking


class StripedRead(Striping):
    """Fills ``target`` with bytes of an object, from byte ``first`` on.

    Every piece is of the content that is known, and verified for itself, so all of them are.

    Attributes:
        missing: the node does not hold it (any more); nothing in ``target`` counts.
    """

    def __init__(
        self,
        transport: TcpTransport,
        address: NodeAddress,
        known: Known,
        first: int,
        target: memoryview,
    ) -> None:
        board = SliceBoard(1, len(target), slice_bytes=transport.settings.slice_bytes)
        self.lock = threading.Lock()
        super().__init__(transport, transport.paths(address), board, self.lock)
        self.board = board
        self.address = address
        self.known = known
        self.first = first
        self.target = target
        self.missing = False

    def fill(self) -> bool:
        """Read it; False if it is missing.

        Raises:
            TransferFailed: no path goes to the node any more.
        """
        self.run()
        if not self.missing and self.board.landed_bytes < len(self.target):
            raise TransferFailed(f"{self.address.name} broke off over every path")
        return not self.missing

    def _carrier(
        self,
        connection: socket.socket,
        flight: Flight,
        batch: Batch,
        patience: Callable[[], float],
    ) -> _Carrier:
        return _Carrier(connection, flight, batch, patience(), self)

    def _must_stop(self) -> bool:
        return self.missing


class _Carrier:
    """Reads the ranges of one batch, one after the other."""

    latency_s: float | None = None

    def __init__(
        self,
        connection: socket.socket,
        flight: Flight,
        batch: Batch,
        patience_s: float,
        read: StripedRead,
    ) -> None:
        self._channel = NodeChannel(connection)
        self._flight = flight
        self._left = list(batch.ranges)
        self._patience_s = patience_s
        self._read = read
        self.heard = False
        self.waited_s = 0.0

    def run(self) -> None:
        """See ``striping.Carrier``; a piece that arrives damaged is the path's failure."""
        limit_blocking(
            self._channel.connection, receive_s=self._patience_s, send_s=self._patience_s
        )
        while self._left:
            begin_s = time.monotonic()
            try:
                self._fetch(self._left[0])
            except BlockingIOError as error:
                self.waited_s = time.monotonic() - begin_s
                raise TimeoutError(f"nothing came for {self._patience_s:.2f} s") from error
            del self._left[0]

    def unfinished(self) -> tuple[Range, ...]:
        """See ``striping.Carrier``."""
        return tuple(self._left)

    def _fetch(self, one: Range) -> None:
        read, length_bytes = self._read, one.stop - one.start
        request = read_request(
            read.known.key, read.first + one.start, length_bytes, read.known.digest
        )
        _, is_here = self._channel.read_ahead(request, read.target[one.start : one.stop])
        self.heard = True
        if not is_here:
            read.missing = True
            raise Stopped
        self._flight.landed_bytes += length_bytes
        with read.lock:
            read.board.land(one.block, length_bytes)
