"""A node's Messenger: a process of its own that serves the node's segment to its peers.

It maps the segment to read, so serving costs the engine no time. Peers of other hosts read over
TCP; peers of the same host are handed the segment's descriptor once, over an abstract unix socket
(no file, so nothing is left behind), and read it themselves from then on. Everyone authenticates
first. It lives as long as its parent: the pipe between them is its standard input.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from snowskin.terms.errors import TransferFailed
from snowskin.terms.ids import NodeId
from snowskin.transfer.authentication import (
    HANDSHAKE_TIMEOUT_S,
    NotAuthenticated,
    authenticate_as_server,
)
from snowskin.transfer.child import Child, Parent
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.peer import NixlAddress, Peer, local_host_id
from snowskin.transfer.serving import BadRequest, MessengerStat, Tally, serve_requests
from snowskin.transfer.topology import Address, LocalNic
from snowskin.transfer.transports.nixl import NixlServer, import_nixl
from snowskin.transfer.wire import tune

__all__ = ["MessengerProcess", "MessengerStat", "Peer"]

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3.0
ACCEPT_PAUSE_S = 0.05
_ALL_ADDRESSES = {"0.0.0.0", "::"}


class MessengerConfig(msgspec.Struct, frozen=True):
    """What a Messenger is told at its start, over its standard input and never by arguments.

    Args:
        hosts: addresses to listen on.
        segment_fd: inherited descriptor of the segment.
        nixl: serve it to NIXL agents too.
        connections_limit: most peers' connections of each kind at once; more are closed at once.
        idle_timeout_s: a connection without a request for so long is closed.
        send_timeout_s: a client that takes no byte for so long is given up.
    """

    hosts: tuple[str, ...]
    cluster_key: bytes
    segment_fd: int
    layout: SegmentLayout
    nixl: bool = False
    connections_limit: int = 256
    idle_timeout_s: float = 600.0
    send_timeout_s: float = 30.0


class _Ready(msgspec.Struct, frozen=True):
    ports: tuple[int, ...]
    shm_address: str
    nixl: NixlAddress | None


class MessengerProcess:
    """The parent's handle. It ends with ``stop``, or by itself when this process dies."""

    def __init__(self, child: Child, peer: Peer) -> None:
        self._child = child
        self.peer = peer

    @classmethod
    def start(
        cls,
        segment: Segment,
        *,
        node: NodeId,
        host: str = "127.0.0.1",
        cluster_key: bytes,
        nics: Sequence[LocalNic] = (),
        nixl: bool = False,
    ) -> MessengerProcess:
        """Start a Messenger for ``segment`` and wait until it listens.

        Args:
            host: address to listen on. For all of them (``0.0.0.0``), peers are told the host
                name, which they must be able to resolve, unless ``nics`` are given.
            nics: addresses to listen on besides; peers read over all of them at once. See
                ``Topology.nics``.
            nixl: serve NIXL agents too, which authenticates nobody, see ``transports.nixl``.

        Raises:
            InvalidInput: NIXL is wanted and not installed.
            TransferFailed: it did not come up, e.g. ``host`` is no address of this machine.
        """
        if nixl:
            import_nixl()
        listens_on_all = host in _ALL_ADDRESSES
        further = [] if listens_on_all else [nic.host for nic in nics if nic.host != host]
        config = MessengerConfig(
            hosts=(host, *further),
            cluster_key=cluster_key,
            segment_fd=segment.fd,
            layout=segment.layout,
            nixl=nixl,
        )
        child = Child(
            "snowskin.transfer.messenger",
            config,
            pass_fds=(segment.fd,),
            environment={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        try:
            ready = child.hear(_Ready, timeout_s=START_TIMEOUT_S)
        except OSError as error:
            child.stop(grace_s=0)
            raise TransferFailed(
                f"the Messenger did not start on {', '.join(config.hosts)} "
                f"(its own message is above): {error}"
            ) from error
        ports = dict(zip(config.hosts, ready.ports, strict=True))
        tiers = {nic.host: nic.tier for nic in nics}
        reached = tiers if listens_on_all else {name: tiers.get(name, 0) for name in ports}
        addresses = tuple(
            Address(name, ports.get(name, ready.ports[0]), tier) for name, tier in reached.items()
        )
        peer = Peer(
            node=node,
            host=_reachable(host),
            port=ready.ports[0],
            shm_address=ready.shm_address,
            host_id=local_host_id(),
            layout=segment.layout,
            addresses=addresses if len(addresses) > 1 or listens_on_all else (),
            nixl=ready.nixl,
        )
        return cls(child, peer)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._child.alive()

    def stat(self) -> MessengerStat:
        """What it has served so far.

        Raises:
            TransferFailed: it has died.
        """
        try:
            return self._child.ask(MessengerStat, timeout_s=STOP_TIMEOUT_S)
        except OSError as error:
            raise TransferFailed(f"the Messenger of {self.peer.node} is gone: {error}") from error

    def stop(self) -> None:
        """End it, and wait until it has ended. Idempotent."""
        self._child.stop(grace_s=STOP_TIMEOUT_S)


class _Listener:
    """Accepts, authenticates and serves connections, each on a thread, up to a limit."""

    def __init__(
        self,
        listening: socket.socket,
        config: MessengerConfig,
        tally: Tally,
        places: threading.BoundedSemaphore,
        serve: Callable[[socket.socket], None],
    ) -> None:
        self._listening = listening
        self._config = config
        self._tally = tally
        self._serve = serve
        self._places = places

    def start(self) -> None:
        """Begin to accept on a thread."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                # The caller went away again, or descriptors ran out, which takes a while to pass.
                time.sleep(ACCEPT_PAUSE_S)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                self._tally.add(refused_connections=1)
                continue
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(HANDSHAKE_TIMEOUT_S)
                authenticate_as_server(connection, self._config.cluster_key)
                self._serve(connection)
        except NotAuthenticated:
            self._tally.add(failed_handshakes=1)
        except (OSError, BadRequest):
            # The connection is closed: that is all that a caller who errs is told.
            self._tally.add(broken_connections=1)
        finally:
            self._places.release()


def _hand_over(connection: socket.socket, segment: Segment) -> None:
    """Give the segment's descriptor, then keep the connection: its end tells that we died."""
    socket.send_fds(connection, [b"F"], [segment.fd])
    connection.settimeout(None)
    connection.recv(1)


def _listen_tcp(host: str) -> socket.socket:
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.bind((host, 0))
    listening.listen(128)
    return listening


def _reachable(host: str) -> str:
    """What peers call us by: an address to listen on, unless that means all addresses."""
    return socket.gethostname() if host in _ALL_ADDRESSES else host


def _listen_unix() -> tuple[socket.socket, str]:
    name = f"snowskin-{secrets.token_hex(12)}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0{name}")
    listening.listen(128)
    return listening, name


def main() -> None:
    """The Messenger's process: serve until the parent's end of standard input closes."""
    parent = Parent()
    config = parent.hear(MessengerConfig)
    segment = Segment.attach(config.segment_fd, config.layout)
    tally = Tally()
    listening = [_listen_tcp(host) for host in config.hosts]
    unix, name = _listen_unix()

    def serve_reads(connection: socket.socket) -> None:
        tune(connection)
        serve_requests(
            connection,
            segment,
            tally,
            idle_timeout_s=config.idle_timeout_s,
            send_timeout_s=config.send_timeout_s,
        )

    def serve_mappings(connection: socket.socket) -> None:
        tally.add(mappings=1)
        _hand_over(connection, segment)

    places = threading.BoundedSemaphore(config.connections_limit)
    for tcp in listening:
        _Listener(tcp, config, tally, places, serve_reads).start()
    mappings = threading.BoundedSemaphore(config.connections_limit)
    _Listener(unix, config, tally, mappings, serve_mappings).start()
    ports = tuple(tcp.getsockname()[1] for tcp in listening)
    nixl = NixlServer(segment) if config.nixl else None
    address = nixl.address if nixl is not None else None
    parent.say(_Ready(ports=ports, shm_address=name, nixl=address))
    parent.answer(tally.stat)
    # Threads may be in the middle of a send; there is nothing to be tidied up.
    os._exit(0)


if __name__ == "__main__":
    main()
