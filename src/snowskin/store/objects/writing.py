"""How a client puts an object: a reservation at the master, the bytes to the nodes, and its end."""

from __future__ import annotations

import time
from typing import Literal, NoReturn

import msgspec

from snowskin.store.objects.asking import RETRY_S, MasterChannel
from snowskin.store.objects.entries import conflict_message
from snowskin.store.objects.errors import (
    KeyConflict,
    PoolFullError,
    ReplicaUnreachable,
    StoreTimeout,
)
from snowskin.store.objects.reading import Reading
from snowskin.store.objects.wire import Status
from snowskin.store.objects.words import (
    Located,
    Pin,
    PutBusy,
    PutEnd,
    PutExists,
    PutGranted,
    PutStart,
)
from snowskin.terms.errors import TransferFailed


class PutResult(msgspec.Struct, frozen=True):
    """How a put ended.

    Attributes:
        status: "stored", or "exists" if the same content was there already (nothing was sent).
        replicas: how many nodes hold it now; best effort, perhaps fewer than wanted.
    """

    status: Literal["stored", "exists"]
    replicas: int
    wanted_replicas: int


class Writing:
    """Puts objects, each with as many tries as its time allows."""

    def __init__(self, master: MasterChannel, reading: Reading, timeout_s: float) -> None:
        self._master = master
        self._reading = reading
        self._timeout_s = timeout_s

    def put(self, start: PutStart, view: memoryview, pin: Pin) -> PutResult:
        """See ``StoreClient.put``."""
        deadline_s = time.monotonic() + self._timeout_s
        avoid: tuple[str, ...] = ()
        failure: Exception | None = None
        status = Status.BUSY
        while True:
            if time.monotonic() >= deadline_s:
                self._raise_unwritten(start.key, failure, status)
            try:
                reply = self._master.ask_any(msgspec.structs.replace(start, avoid=avoid))
            except PoolFullError:
                if failure is None:
                    raise
                avoid = ()  # Not full, but out of reach: they may come back.
                time.sleep(RETRY_S)
                continue
            if isinstance(reply, PutExists):
                return PutResult("exists", len(reply.nodes), start.replicas)
            if isinstance(reply, PutBusy):
                status = Status.BUSY
                time.sleep(RETRY_S)
                continue
            assert isinstance(reply, PutGranted), reply
            stored: tuple[str, ...] = ()
            try:
                for name in reply.nodes:
                    try:
                        status = self._reading.write(name, start, view, pin)
                    except (OSError, TransferFailed) as error:
                        failure = error
                        avoid += (name,)
                        continue
                    if status == Status.OK:
                        stored += (name,)
                    elif status == Status.FULL:
                        avoid += (name,)
            finally:
                if stored != reply.nodes:  # Else the master knows by the nodes' reports.
                    self._master.ask_any(PutEnd(start.key))
            if stored:
                self._reading.remember(start.key, Located(len(view), start.digest, stored))
                return PutResult("stored", len(stored), start.replicas)
            if failure is None:
                # It arrived damaged; or another writes it to the same node; or the node has other
                # content, which the master will know in a moment, or have it drop.
                time.sleep(RETRY_S)

    def _raise_unwritten(self, key: str, failure: Exception | None, status: Status) -> NoReturn:
        if status == Status.CONFLICT:
            raise KeyConflict(conflict_message(key))
        if failure is not None:
            raise ReplicaUnreachable(f"could not write {key!r} to any node: {failure}") from failure
        why = {
            Status.CORRUPT: "its bytes changed while they were sent; keep the buffer as it is",
            Status.AWAY: "the nodes have no word with the master; see whether it runs",
        }.get(status, "another client is writing it; try again later, or choose another key")
        raise StoreTimeout(f"could not write {key!r} within {self._timeout_s} s: {why}")
