"""Transfers of a node under way: each on a worker thread, each with a way to stop it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import RequestId
from snowskin.transfer.engine import BlockPull, PullResult

Work = Callable[[threading.Event], None]
"""What a transfer does; the event tells it that it is no longer wanted."""


class Transfers:
    """At most one transfer for each request; those beyond ``threads`` wait their turn.

    Args:
        fail: told of an error that a transfer did not expect; the node cannot go on.
    """

    def __init__(self, threads: int, *, fail: Callable[[BaseException], None]) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="transfer")
        self._fail = fail
        self._lock = threading.Lock()
        self._cancelled: dict[RequestId, threading.Event] = {}

    def __len__(self) -> int:
        return len(self._cancelled)

    def start(self, request: RequestId, work: Work) -> None:
        """Do ``work`` on a worker thread."""
        cancelled = threading.Event()
        with self._lock:
            assert request not in self._cancelled, f"{request} has a transfer under way"
            self._cancelled[request] = cancelled
        self._threads.submit(self._run, request, work, cancelled)

    def cancel(self, request: RequestId) -> None:
        """Stop the request's transfer, if there is one, soon."""
        with self._lock:
            cancelled = self._cancelled.get(request)
        if cancelled is not None:
            cancelled.set()

    def close(self) -> None:
        """Stop all of them, without waiting."""
        with self._lock:
            for cancelled in self._cancelled.values():
                cancelled.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, request: RequestId, work: Work, cancelled: threading.Event) -> None:
        try:
            work(cancelled)
        except BaseException as error:  # A pool would keep it to itself, and the request hang.
            self._fail(error)
        finally:
            with self._lock:
                del self._cancelled[request]


def pulls(remote: tuple[PlacedBlock, ...], local: tuple[PlacedBlock, ...]) -> tuple[BlockPull, ...]:
    """Pair the blocks of a peer with the slots that receive them."""
    return tuple(
        BlockPull(remote_slot=there.slot, remote_generation=there.generation, local_slot=here.slot)
        for there, here in zip(remote, local, strict=True)
    )


def landed_prefix(result: PullResult) -> int:
    """Blocks that landed before the first that did not."""
    return result.landed.index(False) if False in result.landed else len(result.landed)
