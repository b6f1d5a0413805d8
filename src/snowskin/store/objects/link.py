"""A node's connection to the master: reports go up, commands come down; its end means death.

While the master is away, the node goes on serving and tries to reach it again; then it reports
everything that it holds.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from snowskin.store.objects.errors import StoreRefused
from snowskin.store.objects.frames import FrameReader, decode_reply, frame
from snowskin.store.objects.wire import Status
from snowskin.store.objects.words import (
    BATCH_LIMIT,
    Accepted,
    CommandEnded,
    Copy,
    Done,
    Drop,
    Join,
    Joined,
    NodeUsage,
    ObjectFact,
    PinHere,
    Question,
    Refusal,
    Reply,
    Report,
    Usage,
)
from snowskin.terms.errors import TransferFailed
from snowskin.transfer.authentication import HANDSHAKE_TIMEOUT_S, authenticate_as_client
from snowskin.transfer.wire import tune

RETRY_S = 0.1
USAGE_S = 1.0
REPORT_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Holdings(msgspec.Struct, frozen=True):
    """What the link needs of its node, as functions."""

    facts: Callable[[], Iterable[ObjectFact]]
    fact: Callable[[str], ObjectFact | None]
    remove: Callable[[str], object]
    obey: Callable[[Copy | PinHere | Drop], str | None]
    """Carry a command out; what failed, if something did."""
    usage: Callable[[], NodeUsage]


class MasterLink:
    """Keeps the connection. Start it with ``start``; it ends with ``stop``."""

    def __init__(
        self, address: tuple[str, int], cluster_key: bytes, join: Join, holdings: Holdings
    ) -> None:
        self._address = address
        self._cluster_key = cluster_key
        self._join = join
        self._holdings = holdings
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        """Guards sending, and the fields below."""
        self._number = 0
        self._waiting: dict[int, queue.SimpleQueue[Accepted | None]] = {}
        self._commands: queue.SimpleQueue[Copy | PinHere | Drop | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self.joined = threading.Event()
        """Set while the master knows us and all that we hold."""
        self.refusal: str | None = None
        """Why the master does not take us, if so."""

    def start(self) -> None:
        """Begin to connect, report and obey, on threads."""
        for run in (self._keep_connected, self._keep_reporting_usage, self._obey, self._obey):
            threading.Thread(target=run, name=run.__name__, daemon=True).start()

    def wait_joined(self, timeout_s: float) -> bool:
        """Wait until the master knows us; False if it does not (it is still tried).

        Raises:
            StoreRefused: the master does not take us, and says why.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.joined.wait(RETRY_S):
            if self.refusal is not None:
                raise StoreRefused(self.refusal)
            if time.monotonic() >= deadline_s:
                return False
        return True

    def stop(self) -> None:
        """Leave the master. Idempotent."""
        self._stopping.set()
        self._commands.put(None)
        self._commands.put(None)
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def committed(self, key: str) -> Status:
        """Have the master know of an object, and wait until it does."""
        deadline_s = time.monotonic() + REPORT_TIMEOUT_S
        while not self._stopping.is_set() and time.monotonic() < deadline_s:
            if not self.joined.wait(min(RETRY_S, max(0.0, deadline_s - time.monotonic()))):
                continue
            accepted = self._report_now(key)
            if accepted is not None:
                return Status.CONFLICT if key in accepted.rejected else Status.OK
        return Status.AWAY

    def changed(self, key: str) -> None:
        """Have the master know that an object is gone, or on another tier; does not wait.

        If the master is away, it will be told everything when it is back.
        """
        with self._lock:
            if self._connection is None:
                return
            # What is true now counts: it may be here again since.
            fact = self._holdings.fact(key)
            self._number += 1
            if fact is None:
                self._send(Report(self._number, (), (key,)))
            else:
                self._send(Report(self._number, (fact,)))

    def _report_now(self, key: str) -> Accepted | None:
        """Report an object; None if the connection is or went away."""
        answer: queue.SimpleQueue[Accepted | None] = queue.SimpleQueue()
        with self._lock:
            fact = self._holdings.fact(key)
            if fact is None or self._connection is None:
                return Accepted(0) if fact is None else None
            self._number += 1
            number = self._number
            self._waiting[number] = answer
            self._send(Report(number, (fact,)))
        try:
            accepted = answer.get(timeout=REPORT_TIMEOUT_S)
        except queue.Empty:
            accepted = None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if accepted is not None and key in accepted.rejected:
            self._holdings.remove(key)
        return accepted

    def _send(self, message: Question) -> None:
        """Under the lock. A connection that breaks is noticed by its reader."""
        assert self._connection is not None
        with contextlib.suppress(OSError):
            self._connection.sendall(frame(message))

    def _keep_connected(self) -> None:
        told = False
        while not self._stopping.is_set():
            try:
                self._serve_once()
                told = False
            except (OSError, TransferFailed, msgspec.MsgspecError) as error:
                if not told and not self._stopping.is_set():
                    _log.warning("no word with the master at %s:%d: %s", *self._address, error)
                    told = True
            finally:
                self._forget_connection()
            self._stopping.wait(RETRY_S)

    def _serve_once(self) -> None:
        connection = socket.create_connection(self._address, HANDSHAKE_TIMEOUT_S)
        with connection:
            tune(connection)
            authenticate_as_client(connection, self._cluster_key)
            reader = FrameReader(connection)
            connection.sendall(frame(self._join))
            answer = decode_reply(reader.receive())
            if isinstance(answer, Refusal):
                self.refusal = answer.message
                raise ConnectionError(answer.message)
            if not isinstance(answer, Done):
                raise ConnectionError("that is no master")
            self.refusal = None
            connection.settimeout(None)
            threading.Thread(target=self._introduce, args=(connection,), daemon=True).start()
            while not self._stopping.is_set():
                self._hear(decode_reply(reader.receive()))

    def _introduce(self, connection: socket.socket) -> None:
        """Report everything that is held, then let commits be reported one by one.

        Under the lock, so that what is dropped meanwhile is told after it was reported.
        """
        with self._lock, contextlib.suppress(OSError):
            self._connection = connection
            facts = tuple(self._holdings.facts())
            for start in range(0, len(facts), BATCH_LIMIT):
                self._number += 1
                connection.sendall(frame(Report(self._number, facts[start : start + BATCH_LIMIT])))
            connection.sendall(frame(Joined()))
            _log.info("joined the master with %d objects", len(facts))
        self.joined.set()

    def _hear(self, message: Reply) -> None:
        match message:
            case Accepted(number=number, rejected=rejected):
                with self._lock:
                    waiting = self._waiting.get(number)
                if waiting is not None:
                    waiting.put(message)
                else:
                    for key in rejected:
                        _log.warning("dropped %r: the key has other content elsewhere", key)
                        self._holdings.remove(key)
            case Copy() | PinHere() | Drop():
                self._commands.put(message)
            case _:
                raise ConnectionError(f"the master says {type(message).__name__}")

    def _obey(self) -> None:
        while (command := self._commands.get()) is not None:
            self._tell(CommandEnded(command.number, self._holdings.obey(command)))

    def _keep_reporting_usage(self) -> None:
        while not self._stopping.wait(USAGE_S):
            if self.joined.is_set():
                self._tell(Usage(self._holdings.usage()))

    def _tell(self, message: Question) -> None:
        with self._lock:
            if self._connection is not None:
                self._send(message)

    def _forget_connection(self) -> None:
        self.joined.clear()
        with self._lock:
            self._connection = None
            waiting = list(self._waiting.values())
        for answer in waiting:
            answer.put(None)
