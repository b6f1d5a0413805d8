"""Both ends of a fresh connection prove that they know the cluster key, without sending it.

Challenge and response with HMAC-SHA256 over both ends' random challenges and the role of who
answers, so that an answer can be neither replayed nor reflected. It says who is there; it hides
nothing: bytes travel in the clear, as on any storage network, so the network must be trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time

from snowskin.terms.errors import TransferFailed
from snowskin.transfer.wire import receive_exactly

_MAGIC = b"SNOWSKN1"
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
HANDSHAKE_TIMEOUT_S = 5.0


class NotAuthenticated(TransferFailed):
    """The other end speaks another protocol or holds another cluster key."""


def _proof(cluster_key: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(cluster_key, _MAGIC + role + client + server, hashlib.sha256)


def authenticate_as_client(
    connection: socket.socket, cluster_key: bytes, *, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> None:
    """Prove ourselves to a server, and have it prove itself first, all within a time.

    Raises:
        NotAuthenticated: it is no Messenger of this cluster.
        OSError: the connection broke or timed out.
    """
    deadline_s = time.monotonic() + timeout_s
    challenge = os.urandom(_CHALLENGE_BYTES)
    connection.sendall(_MAGIC + challenge)
    answer = receive_exactly(connection, _CHALLENGE_BYTES + _PROOF_BYTES, deadline_s=deadline_s)
    theirs, proof = answer[:_CHALLENGE_BYTES], answer[_CHALLENGE_BYTES:]
    if not hmac.compare_digest(proof, _proof(cluster_key, b"server", challenge, theirs)):
        raise NotAuthenticated("the peer holds another cluster key; give all nodes the same one")
    connection.sendall(_proof(cluster_key, b"client", challenge, theirs))


def authenticate_as_server(connection: socket.socket, cluster_key: bytes) -> None:
    """Prove ourselves to a client that asked, then have it prove itself.

    Raises:
        NotAuthenticated: it is no node of this cluster.
        OSError: the connection broke or timed out.
    """
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    hello = receive_exactly(connection, len(_MAGIC) + _CHALLENGE_BYTES, deadline_s=deadline_s)
    if hello[: len(_MAGIC)] != _MAGIC:
        raise NotAuthenticated("the caller does not speak this protocol")
    theirs = hello[len(_MAGIC) :]
    challenge = os.urandom(_CHALLENGE_BYTES)
    connection.sendall(challenge + _proof(cluster_key, b"server", theirs, challenge))
    proof = receive_exactly(connection, _PROOF_BYTES, deadline_s=deadline_s)
    if not hmac.compare_digest(proof, _proof(cluster_key, b"client", theirs, challenge)):
        raise NotAuthenticated("the caller holds another cluster key")
