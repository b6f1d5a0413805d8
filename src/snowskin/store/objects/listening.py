"""How the store's processes listen: bounded, and everyone authenticates first."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable

from snowskin.store.objects.errors import StoreRefused
from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.authentication import HANDSHAKE_TIMEOUT_S, authenticate_as_server
from snowskin.transfer.wire import tune

_ACCEPT_PAUSE_S = 0.05


def check_exposure(host: str, cluster_key: bytes) -> None:
    """Without a cluster key, only this machine may call.

    Raises:
        InvalidInput: anyone who reaches ``host`` could read and write.
    """
    if cluster_key or all(map(_is_own, split_hosts(host))):
        return
    raise InvalidInput(
        f"{host} can be reached from other machines: give the same --cluster-key to master, nodes "
        "and clients (or set SNOWSKIN_CLUSTER_KEY), or listen on 127.0.0.1",
        parameter="host",
    )


def split_hosts(hosts: str) -> tuple[str, ...]:
    """Addresses that were given as one word, separated by commas.

    Raises:
        InvalidInput: one is missing, or there twice: it would count as two paths.
    """
    addresses = tuple(host.strip() for host in hosts.split(","))
    if "" in addresses or len(set(addresses)) < len(addresses):
        raise InvalidInput(
            f"--host {hosts!r}: give one address, or several different ones with commas between",
            parameter="host",
        )
    return addresses


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0: any.

    Raises:
        StoreRefused: it is taken, or no address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(256)
    except OSError as error:
        raise StoreRefused(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    return listening


def _is_own(host: str) -> bool:
    """Whether only this machine reaches an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen_unix() -> tuple[socket.socket, str]:
    """Listen on an abstract unix socket (no file, so nothing is left behind); its name."""
    name = f"snowskin-store-{secrets.token_hex(12)}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0{name}")
    listening.listen(256)
    return listening, name


def run_handshakes(
    listening: socket.socket,
    cluster_key: bytes,
    admit: Callable[[socket.socket], None],
    *,
    limit: int,
) -> None:
    """Accept on a thread until ``listening`` is closed; ``admit`` those who know the key.

    Each handshake, and ``admit``, runs on a thread of its own; at most ``limit`` at a time, and
    more are turned away.
    """
    places = threading.BoundedSemaphore(limit)

    def attend(connection: socket.socket) -> None:
        try:
            connection.settimeout(HANDSHAKE_TIMEOUT_S)
            if connection.family != socket.AF_UNIX:
                tune(connection)
            authenticate_as_server(connection, cluster_key)
            admit(connection)
        except (OSError, TransferFailed):
            connection.close()  # That is all that a stranger is told.
        finally:
            places.release()

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                if listening.fileno() < 0:
                    return
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            if not places.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=attend, args=(connection,), daemon=True).start()
            except RuntimeError:  # The system has no room for another thread just now.
                places.release()
                connection.close()
                time.sleep(_ACCEPT_PAUSE_S)

    threading.Thread(target=accept, name="accept", daemon=True).start()
