"""One pull over TCP, shared out among workers and paths."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from snowskin.transfer.paths import Flight, Path
from snowskin.transfer.peer import Peer
from snowskin.transfer.progress import PullProgress
from snowskin.transfer.slicing import ATTEMPTS_LIMIT, Batch, SliceBoard
from snowskin.transfer.transports.receiving import PullState, Receiving
from snowskin.transfer.transports.striping import Striping

if TYPE_CHECKING:
    from snowskin.transfer.transports.tcp import TcpTransport


class StripedPull(Striping):
    """One pull by one or several workers."""

    def __init__(self, transport: TcpTransport, peer: Peer, progress: PullProgress) -> None:
        board = SliceBoard(
            len(progress.blocks),
            progress.segment.layout.slot_bytes,
            slice_bytes=transport.settings.slice_bytes,
        )
        paths = transport.paths(peer)
        super().__init__(transport, paths, board, progress.lock)
        self._progress = progress
        self._state = PullState(progress, board, ATTEMPTS_LIMIT * len(paths))

    def run(self) -> None:
        """See ``TcpTransport.pull``.

        Raises:
            TransferFailed: the peer cannot be reached over any path.
        """
        try:
            super().run()
        finally:
            self._progress.waited_s = min(self._waits_s, default=0.0)
            if self._state.damaged_ranges:
                self._transport.count(damaged_ranges=self._state.damaged_ranges)

    def _carrier(
        self,
        connection: socket.socket,
        flight: Flight,
        batch: Batch,
        patience: Callable[[], float],
    ) -> Receiving:
        return Receiving(connection, flight, self._state, batch, patience)

    def _must_stop(self) -> bool:
        return self._progress.must_stop()

    def _take_guilty(self) -> set[Path]:
        guilty, self._state.guilty = self._state.guilty, set()
        return guilty
