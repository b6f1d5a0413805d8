"""The ways to nodes: idle connections, by process and kind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial

from snowskin.store.objects.channels import Known, NodeChannel
from snowskin.store.objects.words import NodeAddress
from snowskin.transfer.transports.tcp import TcpTransport

IDLE_LIMIT = 16
"""Idle connections kept to one node."""


class Route:
    """Idle connections to one process of a node. Safe to use from any thread.

    Args:
        connect: opens another one.
    """

    __slots__ = ("_connect", "_idle", "address", "is_open")

    def __init__(self, address: NodeAddress, connect: Callable[[], NodeChannel]) -> None:
        self.address = address
        self.is_open = True
        self._connect = connect
        self._idle: list[NodeChannel] = []

    def take(self) -> NodeChannel:
        """A connection; an idle one may turn out to be dead.

        Raises:
            OSError, TransferFailed: the node cannot be reached.
        """
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def read_known(self, known: Known, target: memoryview) -> bool:
        """See ``NodeChannel.read_known``; here without ado, as it is what clients do most.

        Raises:
            OSError, TransferFailed: the node cannot be reached, or broke off.
        """
        channel = self.take()
        try:
            found = channel.read_known(known, target)
        except BaseException:
            channel.close()
            raise
        self.give_back(channel)
        return found

    def read_ahead(self, request: bytes, target: memoryview) -> bool:
        """Fill ``target`` with what a request asks; False if it is not there.

        Raises:
            OSError, TransferFailed: the node cannot be reached, or broke off.
        """
        channel = self.take()
        try:
            _, found = channel.read_ahead(request, target)
        except BaseException:
            channel.close()
            raise
        self.give_back(channel)
        return found

    def give_back(self, channel: NodeChannel) -> None:
        """Keep a connection that is between two requests."""
        if len(self._idle) < IDLE_LIMIT:
            self._idle.append(channel)
            if self.is_open:
                return
            self.close()  # It may have been closed since, and what is idle must be closed then.
        else:
            channel.close()

    def close(self) -> None:
        """Close what is idle, and whatever is given back from now on. Idempotent."""
        self.is_open = False
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()


class Routes:
    """The ways to all nodes.

    Args:
        transport: knows the paths to them and their health.
    """

    def __init__(self, cluster_key: bytes, transport: TcpTransport) -> None:
        self._cluster_key = cluster_key
        self._transport = transport
        self._routes: dict[tuple[str, bool], Route] = {}
        self._is_open = True
        self._lock = threading.Lock()

    def to(self, address: NodeAddress, *, unix: bool) -> Route:
        """The way to a node, over its unix socket or TCP."""
        route = self._routes.get((address.session, unix))
        if route is None:
            made = Route(address, partial(self._connect, address, unix=unix))
            with self._lock:
                if not self._is_open:
                    made.close()  # It keeps no connection.
                    return made
                route = self._routes.setdefault((address.session, unix), made)
        return route

    def forget(self, address: NodeAddress) -> None:
        """A process of a node failed: close what was open to it."""
        with self._lock:
            gone = [self._routes.pop((address.session, unix), None) for unix in (False, True)]
        for route in gone:
            if route is not None:
                route.close()
        for path in self._transport.paths(address):
            self._transport.forget(path)

    def close(self) -> None:
        """Close all idle connections, and keep none from now on."""
        with self._lock:
            self._is_open = False
            routes, self._routes = self._routes, {}
        for route in routes.values():
            route.close()
        self._transport.close()

    def _connect(self, address: NodeAddress, *, unix: bool) -> NodeChannel:
        links = self._transport.links
        paths = links.in_order(self._transport.paths(address))
        return NodeChannel.open(
            address, self._cluster_key, unix=unix, paths=paths, failed=links.blame
        )
