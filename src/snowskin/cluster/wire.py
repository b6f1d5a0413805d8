"""The control wire: zmq ROUTER at the front, DEALER at each node, encrypted by CURVE.

Both ends know the cluster key. The front's CURVE key pair is derived from it, and a node cannot
begin the handshake without the front's public key, so only who knows the cluster key gets in
(our choice: one secret for the control wire and the Messengers, and nothing to distribute).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from snowskin.cluster.messages import FromNode, ToNode
from snowskin.terms.errors import InvalidInput

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A longer control message closes its connection."""
HIGH_WATER_MESSAGES = 100_000
"""Messages kept for a slow peer before further ones are dropped and the peer counts as lost."""


def _front_secret(cluster_key: bytes) -> bytes:
    digest = hashlib.blake2b(cluster_key, digest_size=32, person=b"snowskin-front").digest()
    return z85.encode(digest)


def _bound(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)


def _outcome(sent: Awaitable[object]) -> BaseException | None:
    """A send without waiting has succeeded or failed by now; there is nothing to await."""
    assert isinstance(sent, asyncio.Future)
    assert sent.done()
    return sent.exception()


class FrontWire:
    """The front's end. ``identity`` names one incarnation of one node.

    Raises:
        InvalidInput: nothing can listen on ``host``.
    """

    def __init__(self, *, host: str, cluster_key: bytes) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _bound(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.curve_server = True
        self._socket.curve_secretkey = _front_secret(cluster_key)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        try:
            port = self._socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self.close()
            raise InvalidInput(
                f"--node-host {host}: nodes cannot be heard there: {error.strerror}; "
                "give an address of this machine",
                parameter="--node-host",
            ) from error
        self.address = f"tcp://{host}:{port}"
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromNode)

    async def receive(self) -> tuple[str, FromNode]:
        """The next message and the identity of its sender.

        Raises:
            msgspec.DecodeError: the message is not one of ours; the caller counts and drops it.
        """
        identity, body = await self._socket.recv_multipart()
        return identity.decode(errors="replace"), self._decoder.decode(body)

    def send(self, identity: str, message: ToNode) -> bool:
        """Hand a message to the wire; False where that node is not connected."""
        error = _outcome(
            self._socket.send_multipart(
                [identity.encode(), self._encoder.encode(message)], flags=zmq.NOBLOCK
            )
        )
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError) and error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            return False
        raise error

    def close(self) -> None:
        """Close at once; what was not sent is dropped."""
        self._socket.close()
        self._context.term()


class NodeWire:
    """A node's end."""

    def __init__(self, *, address: str, identity: str, cluster_key: bytes) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _bound(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        public, secret = zmq.curve_keypair()
        self._socket.curve_publickey = public
        self._socket.curve_secretkey = secret
        self._socket.curve_serverkey = zmq.curve_public(_front_secret(cluster_key))
        if "[" in address:
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToNode)

    async def receive(self) -> ToNode:
        """The front's next message."""
        return self._decoder.decode(await self._socket.recv())

    def send(self, message: FromNode) -> None:
        """Send to the front, in order.

        Raises:
            zmq.Again: the front has taken nothing for a very long time; the node gives up.
        """
        error = _outcome(self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK))
        if error is not None:
            raise error

    def close(self) -> None:
        """Close at once."""
        self._socket.close()
        self._context.term()
