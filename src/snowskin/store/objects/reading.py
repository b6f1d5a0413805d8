"""How a client reads and writes objects on nodes: where they are, which way, and what if not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from snowskin.store.objects.asking import RETRY_S, MasterChannel
from snowskin.store.objects.channels import Known, read_request
from snowskin.store.objects.entries import missing_message
from snowskin.store.objects.errors import KeyMissing, ReplicaUnreachable
from snowskin.store.objects.mapped import MappedNode, OnDisk
from snowskin.store.objects.routes import Route, Routes
from snowskin.store.objects.striped_read import StripedRead
from snowskin.store.objects.wire import Operation, Request, Status
from snowskin.store.objects.words import (
    BATCH_LIMIT,
    AskNodes,
    Found,
    Located,
    Lookup,
    NodeAddress,
    Nodes,
    Pin,
    PutStart,
)
from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.transports.tcp import TcpTransport
from snowskin.transfer.wire import is_silence

REMEMBERED_LIMIT = 65_536
"""Objects whose nodes are remembered."""
VIEW_LEAST_BYTES = 128 << 10
"""Smaller objects of this host are copied, which costs less than a lease."""
BATCH_KEYS = 32
BATCH_BYTES = 16 << 20
"""Objects that are asked for in one go: so few, and about so many bytes. They share memory, as to
have the system clear many pages for each costs more than to receive it."""
CLEARED_BYTES = 16 << 10
"""Less fresh memory than so much comes cleared, which costs less than asking not to."""
COOLDOWN_S = 1.0
SILENT_COOLDOWN_S = 15.0
"""A node that failed, or fell silent, is the last to be tried for so long."""

_T = TypeVar("_T")
_Act = Callable[[NodeAddress, Known], _T | None]


class Reading:
    """Remembers where objects are. What it remembers may be wrong: nodes know better.

    Args:
        transport: the paths to nodes; where there are several to one, large objects come over all.
        host_id: nodes with the same one are read through their memory; None: none are.
        timeout_s: how long a read waits for nodes that do not answer.
    """

    def __init__(
        self,
        master: MasterChannel,
        cluster_key: bytes,
        transport: TcpTransport,
        *,
        host_id: str | None,
        timeout_s: float,
    ) -> None:
        self._master = master
        self._cluster_key = cluster_key
        self._host_id = host_id
        self._timeout_s = timeout_s
        self._transport = transport
        self._routes = Routes(cluster_key, transport)
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._book: dict[str, NodeAddress] = {}
        self._mapped: dict[str, MappedNode] = {}
        self._shunned_s: dict[str, float] = {}
        self._unmappable: dict[str, None] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> memoryview:
        """See ``StoreClient.get``."""
        known = self._known.get(key)
        if known is not None and known.route is not None:
            target = _fresh(known.size_bytes)
            if self._read_again(known, known.route, target):
                return target.toreadonly()

        def read(address: NodeAddress, known: Known) -> memoryview | None:
            size = known.size_bytes
            if self._is_here(address):
                with contextlib.suppress(OnDisk):
                    return _from_memory(self._mapping(address), key, size)
            target = _fresh(size)
            return target.toreadonly() if self._read(address, known, target) else None

        return self._from_any(key, read)

    def get_into(self, key: str, view: memoryview) -> int:
        """See ``StoreClient.get_into``."""
        known = self._known.get(key)
        if known is not None and known.route is not None:
            size, room = known.size_bytes, len(view)
            if size <= room and self._read_again(
                known, known.route, view if size == room else view[:size]
            ):
                return size

        def read(address: NodeAddress, known: Known) -> int | None:
            size = known.size_bytes
            if size > len(view):
                raise InvalidInput(f"{key!r} has {size} bytes, the buffer only {len(view)}")
            if self._is_here(address):
                with contextlib.suppress(OnDisk):
                    return self._mapping(address).copy_into(key, view[:size])
            return size if self._read(address, known, view[:size]) else None

        return self._from_any(key, read)

    def get_range(self, key: str, first: int, count: int) -> memoryview:
        """See ``StoreClient.get_range``."""

        def read(address: NodeAddress, known: Known) -> memoryview | None:
            size = known.size_bytes
            if first > size:
                raise InvalidInput(f"{key!r} has {size} bytes; there is no byte {first}")
            if self._is_here(address):
                with contextlib.suppress(OnDisk):
                    copied = self._mapping(address).copy(key, first, count)
                    return None if copied is None else memoryview(copied).toreadonly()
            target = _fresh(min(count, size - first))
            return target.toreadonly() if self._read(address, known, target, first) else None

        return self._from_any(key, read)

    def write(self, name: str, start: PutStart, value: memoryview, pin: Pin) -> Status:
        """Send an object to a node.

        Raises:
            OSError, TransferFailed: the node cannot be reached, or broke off.
        """
        address = self._address(name)
        if address is None:
            raise ConnectionError(f"{name} is not up any more")
        request = Request(Operation.WRITE, start.key, 0, len(value), start.digest, pin)
        route = self._routes.to(address, unix=self._is_here(address))
        try:
            channel = route.take()
            try:
                status = channel.write(request, value)
            except BaseException:
                channel.close()
                raise
        except (OSError, TransferFailed) as error:
            self._note_failure(address, error)
            raise
        route.give_back(channel)
        return status

    def forget(self, key: str) -> None:
        """Ask the master at the next read."""
        self._known.pop(key, None)

    def get_early(self, keys: Sequence[str]) -> dict[str, memoryview]:
        """Those of the objects that can be had at the first try, from other hosts many at a time.

        What is missing in the answer is to be had one by one, or not at all.
        """
        self._locate_many(keys)
        of_node: dict[NodeAddress, dict[str, Known]] = {}
        for key in keys:
            known = self._known.get(key)
            if known is None:
                continue
            address = self._address(self._in_order(known.located.nodes)[0])
            if address is not None and not self._is_here(address):
                of_node.setdefault(address, {})[key] = known
        found: dict[str, memoryview] = {}
        for address, wanted in of_node.items():
            for batch in _batches(wanted):
                try:
                    found.update(self._read_many(address, batch))
                except (OSError, TransferFailed) as error:
                    self._note_failure(address, error)
                    break
        return found

    def _read_many(self, address: NodeAddress, wanted: dict[str, Known]) -> dict[str, memoryview]:
        targets = list(_cut(_fresh(sum(known.size_bytes for known in wanted.values())), wanted))
        route = self._routes.to(address, unix=False)
        channel = route.take()
        try:
            found = channel.read_many(tuple(wanted.values()), targets)
        except BaseException:
            channel.close()
            raise
        route.give_back(channel)
        return {
            key: target.toreadonly()
            for key, target, is_there in zip(wanted, targets, found, strict=True)
            if is_there
        }

    def _locate_many(self, keys: Sequence[str]) -> None:
        """Learn where objects are that are not remembered."""
        unknown = [key for key in keys if key not in self._known]
        questions = [
            Lookup(tuple(unknown[start : start + BATCH_LIMIT]))
            for start in range(0, len(unknown), BATCH_LIMIT)
        ]
        if not questions:
            return
        replies = self._master.ask_all(questions)
        for question, reply in zip(questions, replies, strict=True):
            assert isinstance(reply, Found), reply
            for key, located in zip(question.keys, reply.objects, strict=True):
                if located is not None:
                    self.remember(key, located)

    def renew(self) -> None:
        """Keep the leases of all views alive; let go of nodes that died."""
        for session, mapped in list(self._mapped.items()):
            try:
                mapped.renew()
                if mapped.is_alive():
                    continue
            except OSError:
                pass  # It died; so that its memory can be freed, we let go of it.
            self._let_go(session)

    def close(self) -> None:
        """Close everything, and know nothing any more that could be read without the master."""
        self._known.clear()
        self._routes.close()
        with self._lock:
            mapped, self._mapped = self._mapped, {}
        for node in mapped.values():
            node.close()

    def _from_any(self, key: str, act: _Act[_T]) -> _T:
        """What ``act`` gives on the first node that holds the object and can be read."""
        deadline_s = time.monotonic() + self._timeout_s
        failure: Exception | None = None
        known = self._known.get(key)
        is_fresh = False
        silent: set[str] = set()
        while True:
            if known is None:
                known = self._locate(key)
                is_fresh = True
            for name in self._in_order(known.located.nodes):
                address = self._address(name)
                if address is None or (name in silent and time.monotonic() >= deadline_s):
                    continue
                try:
                    result = act(address, known)
                except (OSError, TransferFailed) as error:
                    failure = error
                    self._note_failure(address, error)
                    if is_silence(error):
                        silent.add(name)
                    continue
                if result is not None:
                    return result
            self.forget(key)
            known = None
            if is_fresh:
                if time.monotonic() >= deadline_s:
                    raise ReplicaUnreachable(
                        f"{key!r} exists, but its nodes cannot be read: "
                        f"{failure or 'they have just lost it'}; try again, or look at "
                        "`snowskin store stat`"
                    ) from failure
                time.sleep(RETRY_S)

    def _locate(self, key: str) -> Known:
        located = self._master.ask(Lookup((key,)), Found).objects[0]
        if located is None:
            raise KeyMissing(missing_message(key))
        return self.remember(key, located)

    def remember(self, key: str, located: Located) -> Known:
        """Read it there next time."""
        known = self._known[key] = Known(key, located)
        while len(self._known) > REMEMBERED_LIMIT:
            with contextlib.suppress(KeyError):
                self._known.popitem(last=False)
        return known

    def _in_order(self, names: tuple[str, ...]) -> Sequence[str]:
        """Nodes of this host first, those that failed a moment ago last."""
        if len(names) == 1:
            return names
        now_s = time.monotonic()

        def rank(name: str) -> tuple[bool, bool]:
            address = self._book.get(name)
            return now_s < self._shunned_s.get(
                name, 0.0
            ), address is None or address.host_id != self._host_id

        return sorted(names, key=rank)

    def _address(self, name: str) -> NodeAddress | None:
        address = self._book.get(name)
        if address is None:
            nodes = self._master.ask(AskNodes(), Nodes).nodes
            self._book = {node.name: node for node in nodes}
            address = self._book.get(name)
        return address

    def _note_failure(self, address: NodeAddress, error: Exception) -> None:
        """A node failed: forget its connections and where it was."""
        cooldown_s = SILENT_COOLDOWN_S if is_silence(error) else COOLDOWN_S
        if len(self._shunned_s) > REMEMBERED_LIMIT:
            self._shunned_s.clear()
        self._shunned_s[address.name] = time.monotonic() + cooldown_s
        if self._book.get(address.name) == address:
            self._book.pop(address.name, None)
        self._routes.forget(address)
        self._let_go(address.session)

    def _let_go(self, session: str) -> None:
        """Unmap a node's memory; views of it stay."""
        mapped = self._mapped.pop(session, None)
        if mapped is not None:
            mapped.close()

    def _is_here(self, address: NodeAddress) -> bool:
        """Whether a node is on this host, and lets us map its memory."""
        return address.host_id == self._host_id and address.session not in self._unmappable

    def _mapping(self, address: NodeAddress) -> MappedNode:
        mapped = self._mapped.get(address.session)
        if mapped is not None:
            return mapped
        with self._lock:
            mapped = self._mapped.get(address.session)
            if mapped is None:
                try:
                    mapped = MappedNode.open(address, self._cluster_key)
                except (MemoryError, OSError, InvalidInput) as error:
                    if isinstance(error, ConnectionError | TimeoutError):
                        raise
                    # Reachable, but its memory does not fit here: take it for a remote one.
                    if len(self._unmappable) >= REMEMBERED_LIMIT:
                        self._unmappable.clear()
                    self._unmappable[address.session] = None
                    raise OnDisk from error
                self._mapped[address.session] = mapped
            return mapped

    def _read(self, address: NodeAddress, known: Known, target: memoryview, first: int = 0) -> bool:
        """Fill ``target`` with an object's bytes from ``first`` on; False if it is not there."""
        unix = self._is_here(address)
        if not unix and self._transport.worker_count(address, len(target)) > 1:
            return StripedRead(self._transport, address, known, first, target).fill()
        route = self._routes.to(address, unix=unix)
        if len(target) < known.size_bytes:
            request = read_request(known.key, first, len(target), known.digest)
            return route.read_ahead(request, target)
        found = route.read_known(known, target)
        if found and not any(map(self._is_here_by_name, known.located.nodes)):
            known.route = route
        return found

    def _read_again(self, known: Known, route: Route, target: memoryview) -> bool:
        """Read an object the way that it was read before; False if that does not do any more."""
        try:
            return route.is_open and route.read_known(known, target)
        except (OSError, TransferFailed) as error:
            self._note_failure(route.address, error)
            return False

    def _is_here_by_name(self, name: str) -> bool:
        address = self._book.get(name)
        return address is None or self._is_here(address)


def _fresh(size_bytes: int) -> memoryview:
    """Memory that will be filled, which is why it need not be cleared."""
    if size_bytes < CLEARED_BYTES:
        return memoryview(bytearray(size_bytes))
    return np.empty(size_bytes, dtype=np.uint8).data


def _cut(memory: memoryview, wanted: dict[str, Known]) -> Iterator[memoryview]:
    """A piece for each object."""
    start = 0
    for known in wanted.values():
        yield memory[start : start + known.size_bytes]
        start += known.size_bytes


def _batches(wanted: dict[str, Known]) -> Iterator[dict[str, Known]]:
    """Cut into runs of few keys and bytes, so that no request waits behind too much."""
    batch: dict[str, Known] = {}
    total_bytes = 0
    for key, known in wanted.items():
        batch[key] = known
        total_bytes += known.size_bytes
        if len(batch) >= BATCH_KEYS or total_bytes >= BATCH_BYTES:
            yield batch
            batch, total_bytes = {}, 0
    if batch:
        yield batch


def _from_memory(mapped: MappedNode, key: str, size_bytes: int) -> memoryview | None:
    if size_bytes >= VIEW_LEAST_BYTES:
        view = mapped.view(key)
        if view is not None:
            return view
    copied = mapped.copy(key, 0, None)
    return None if copied is None else memoryview(copied)
