"""The master's process: carries the catalog to and from clients and nodes, in one thread.

A lean loop on ``epoll`` with sockets that never block. It is faster here than asyncio, and needs
no locks. Callers authenticate on threads of their own before the loop hears of them.
"""

from __future__ import annotations

import contextlib
import heapq
import queue
import random
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

import msgspec

from snowskin.store.objects.catalog import Catalog, CatalogConfig, Output, Say, Send
from snowskin.store.objects.changes import ReplicaChanges
from snowskin.store.objects.frames import FRAME_LIMIT_BYTES, LENGTH, decode_question, frame
from snowskin.store.objects.listening import listen_tcp, run_handshakes
from snowskin.store.objects.words import (
    BATCH_LIMIT,
    Answer,
    AskNodes,
    AskPrefix,
    AskStat,
    AskTransfer,
    ChangeReplica,
    CommandEnded,
    Done,
    Exists,
    ExistsMany,
    Flags,
    Found,
    Join,
    Joined,
    Keys,
    ListKeys,
    Lookup,
    Nodes,
    Prefixes,
    PutEnd,
    PutStart,
    Question,
    Remove,
    Reply,
    Report,
    SetPin,
    StoreStat,
    Usage,
    Warming,
)

DEFAULT_PORT = 7411
TICK_S = 0.25
RECEIVE_BYTES = 1 << 20
UNSENT_LIMIT_BYTES = 64 << 20
"""A caller that does not take its answers is cut off."""


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the master is told.

    Args:
        recovery_s: for so long after the start nodes that were here before may come back and
            report; until then a key that is not known is not called missing.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    cluster_key: bytes = b""
    recovery_s: float = 1.0
    connections_limit: int = 1024
    catalog: CatalogConfig = CatalogConfig()


class _Caller:
    """A client's or node's connection."""

    __slots__ = ("connection", "node", "received", "unsent")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = bytearray()
        self.unsent = bytearray()
        self.node: str | None = None


class _BadCaller(Exception):
    """Sent what a client or node would not send."""


class Master:
    """Serves until ``stop``."""

    def __init__(self, config: MasterConfig) -> None:
        self._config = config
        self._listening = listen_tcp(config.host, config.port)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self.catalog = Catalog(config.catalog, rng=random.Random(secrets.randbits(64)))
        self._changes = ReplicaChanges(self.catalog, prefix=f"t{secrets.token_hex(3)}")
        self._poll = select.epoll()
        self._callers: dict[int, _Caller] = {}
        self._of_node: dict[str, _Caller] = {}
        self._arrived: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._stopping = threading.Event()
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._start_s = time.monotonic()
        self._is_warm = config.recovery_s <= 0

    def run(self) -> None:
        """Serve until ``stop`` is called from another thread or a signal handler."""
        self._start_s = time.monotonic()
        run_handshakes(
            self._listening,
            self._config.cluster_key,
            self._admit,
            limit=self._config.connections_limit,
        )
        self._poll.register(self._woken.fileno(), select.EPOLLIN)
        tick_s = self._start_s
        try:
            while not self._stopping.is_set():
                for fd, mask in self._poll.poll(TICK_S):
                    caller = self._callers.get(fd)
                    if caller is not None:
                        self._attend(caller, mask)
                    elif fd == self._woken.fileno():
                        self._welcome()
                now_s = time.monotonic()
                if now_s - tick_s >= TICK_S:
                    tick_s = now_s
                    self._tick(now_s)
        finally:
            self._close()

    def stop(self) -> None:
        """End ``run``. Idempotent; may be called in a signal handler."""
        self._stopping.set()
        self._wake.send(b".")

    def _admit(self, connection: socket.socket) -> None:
        self._arrived.put(connection)
        self._wake.send(b".")

    def _welcome(self) -> None:
        try:
            self._woken.recv(4096)
        except BlockingIOError:
            return
        while not self._arrived.empty():
            connection = self._arrived.get()
            if len(self._callers) >= self._config.connections_limit:
                connection.close()
                continue
            connection.setblocking(False)
            self._callers[connection.fileno()] = _Caller(connection)
            self._poll.register(connection.fileno(), select.EPOLLIN)

    def _tick(self, now_s: float) -> None:
        if not self._is_warm and now_s - self._start_s >= self._config.recovery_s:
            self._is_warm = True
        self._carry_out(self.catalog.expire(now_s=now_s))
        self._changes.expire(now_s=now_s)

    def _attend(self, caller: _Caller, mask: int) -> None:
        try:
            if mask & select.EPOLLOUT:
                self._send_rest(caller)
            if mask & ~select.EPOLLOUT:
                self._receive(caller)
        except (_BadCaller, OSError, msgspec.MsgspecError):
            self._drop(caller)

    def _receive(self, caller: _Caller) -> None:
        try:
            count = caller.connection.recv_into(self._buffer)
        except BlockingIOError:
            return
        if count == 0:
            raise _BadCaller
        if caller.received:
            caller.received += self._view[:count]
            with memoryview(bytes(caller.received)) as view:
                done = self._answer_frames(caller, view)
            del caller.received[:done]
        else:
            done = self._answer_frames(caller, self._view[:count])
            if done < count:
                caller.received += self._view[done:count]

    def _answer_frames(self, caller: _Caller, view: memoryview) -> int:
        """Answer all whole frames; how many bytes they were."""
        start, end = 0, len(view)
        while end - start >= 4:
            (length,) = LENGTH.unpack_from(view, start)
            if length > FRAME_LIMIT_BYTES:
                raise _BadCaller
            stop = start + 4 + length
            if stop > end:
                break
            self._handle(caller, decode_question(view[start + 4 : stop]))
            start = stop
        return start

    def _handle(self, caller: _Caller, question: Question) -> None:
        if type(question) is Exists:
            if question.key in self.catalog.readable:
                self._send(caller, _YES)
            elif self._is_warm:
                self._send(caller, _NO)
            else:
                self._say(caller, Warming())
            return
        if type(question) in _OF_NODES:
            self._hear_node(caller, question)
            return
        reply = self._answer(caller, question)
        if reply is not None:
            self._say(caller, reply)

    def _answer(self, caller: _Caller, question: Question) -> Reply | None:
        """The answer, or None where it comes later."""
        catalog, now_s = self.catalog, time.monotonic()
        match question:
            case ExistsMany(keys=keys):
                flags = bytes(map(catalog.readable.__contains__, keys))
                return Flags(flags) if self._is_warm or 0 not in flags else Warming()
            case Lookup(keys=keys):
                found = tuple(map(catalog.locate, keys))
                return Found(found) if self._is_warm or None not in found else Warming()
            case PutStart():
                if not self._is_warm and question.key not in catalog.readable:
                    return Warming()
                return catalog.start_put(question, caller, now_s=now_s)
            case PutEnd(key=key):
                catalog.end_put(key, caller)
                return Done()
            case ListKeys():
                return self._list(question) if self._is_warm else Warming()
            case AskTransfer(transfer=transfer):
                return self._changes.status(transfer)
            case AskPrefix(keys=keys):
                return Prefixes(catalog.longest_prefix(keys)) if self._is_warm else Warming()
            case AskNodes():
                return Nodes(tuple(node.address for node in catalog.nodes.values()))
            case AskStat():
                return self._stat(now_s)
            case Remove(key=key) | SetPin(key=key) | ChangeReplica(key=key):
                if not self._is_warm and key not in catalog.readable:
                    return Warming()
                return self._change(caller, question, now_s)
            case _:
                raise _BadCaller

    def _change(self, caller: _Caller, question: Question, now_s: float) -> Reply | None:
        match question:
            case Remove(key=key):
                self._carry_out(self.catalog.remove(key, caller, now_s=now_s))
                return None
            case SetPin(key=key, pin=pin):
                self._carry_out(self.catalog.set_pin(key, pin, caller, now_s=now_s))
                return None
            case ChangeReplica():
                status, sends = self._changes.start(question, now_s=now_s)
                self._carry_out(sends)
                return status
            case _:
                raise _BadCaller

    def _hear_node(self, caller: _Caller, message: Question) -> None:
        if isinstance(message, Join) and caller.node is None:
            refusal = self.catalog.join(message.address, message.dram_bytes + message.ssd_bytes)
            if refusal is None:
                caller.node = message.address.name
                self._of_node[caller.node] = caller
            self._say(caller, refusal or Done())
            return
        if caller.node is None or isinstance(message, Join):
            raise _BadCaller
        match message:
            case Report(number=number, committed=committed, dropped=dropped):
                accepted, outputs = self.catalog.report(caller.node, number, committed, dropped)
                self._say(caller, accepted)
                self._carry_out(outputs)
            case Usage(usage=usage):
                self.catalog.nodes[caller.node].usage = usage
            case CommandEnded(number=number, failure=failure):
                self._changes.command_ended(number, failure)
                self._carry_out(self.catalog.command_ended(number))
            case _:
                assert isinstance(message, Joined), message

    def _list(self, ask: ListKeys) -> Keys:
        wanted = max(1, min(ask.limit, BATCH_LIMIT))
        after = ask.after
        fitting = (
            key
            for key in self.catalog.readable
            if key.startswith(ask.prefix) and (after is None or key > after)
        )
        keys = heapq.nsmallest(wanted + 1, fitting)
        return Keys(tuple(keys[:wanted]), len(keys) > wanted)

    def _stat(self, now_s: float) -> StoreStat:
        catalog = self.catalog
        return StoreStat(
            objects=len(catalog.readable),
            replicas=sum(len(node.keys) for node in catalog.nodes.values()),
            object_bytes=sum(held.size_bytes for held in catalog.readable.values()),
            reservations=catalog.reservations(),
            transfers_running=self._changes.running(),
            reclaimed_total=catalog.reclaimed_total,
            conflicts_total=catalog.conflicts_total,
            uptime_s=now_s - self._start_s,
            nodes=catalog.node_stats(),
        )

    def _carry_out(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            match output:
                case Send(node=node, message=message):
                    caller = self._of_node.get(node)
                    if caller is not None:
                        self._say(caller, message)
                case Say(ticket=ticket, message=message):
                    assert isinstance(ticket, _Caller)
                    self._say(ticket, message)

    def _say(self, caller: _Caller, message: Reply) -> None:
        """Send without waiting; what the caller does not take now goes later."""
        self._send(caller, frame(message))

    def _send(self, caller: _Caller, packed: bytes) -> None:
        if caller.unsent:
            caller.unsent += packed
            if len(caller.unsent) > UNSENT_LIMIT_BYTES:
                with contextlib.suppress(OSError):  # It may be gone already.
                    # What the kernel still holds for it goes as well, when the connection closes.
                    linger = (socket.SOL_SOCKET, socket.SO_LINGER)
                    caller.connection.setsockopt(*linger, struct.pack("ii", 1, 0))
                    caller.connection.shutdown(socket.SHUT_RDWR)
            return
        try:
            sent = caller.connection.send(packed)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # Its end comes by epoll.
        if sent < len(packed):
            caller.unsent += packed[sent:]
            self._poll.modify(caller.connection.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _send_rest(self, caller: _Caller) -> None:
        try:
            sent = caller.connection.send(caller.unsent)
        except BlockingIOError:
            return
        del caller.unsent[:sent]
        if not caller.unsent:
            self._poll.modify(caller.connection.fileno(), select.EPOLLIN)

    def _drop(self, caller: _Caller) -> None:
        """A caller is gone; a node with it at once."""
        fd = caller.connection.fileno()
        if self._callers.pop(fd, None) is None:
            return
        self._poll.unregister(fd)
        caller.connection.close()
        self.catalog.end_owner(caller)
        if caller.node is not None:
            del self._of_node[caller.node]
            self._changes.lose(caller.node)
            self._carry_out(self.catalog.lose(caller.node))

    def _close(self) -> None:
        self._listening.close()
        for caller in list(self._callers.values()):
            caller.connection.close()
        self._poll.close()


_YES, _NO = frame(Answer(True)), frame(Answer(False))
_OF_NODES = frozenset({Join, Report, Joined, Usage, CommandEnded})
