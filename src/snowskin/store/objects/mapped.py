"""Reading a node of the same host: its memory in our address space, and leases on what we view."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from snowskin.store.objects.channels import NodeChannel
from snowskin.store.objects.store import Place, cut
from snowskin.store.objects.wire import (
    REPLY_BYTES,
    Operation,
    Request,
    Status,
    pack_request,
    unpack_reply,
)
from snowskin.store.objects.words import NodeAddress
from snowskin.transfer.memory import Segment, SegmentLayout

PLACES_LIMIT = 65_536
"""Places of objects that are remembered for each node."""
RENEW_S = 5.0
"""Much less than ``serving.LEASE_S``."""
ENDED_LIMIT = 64
ENDED_BYTES = 16 << 20
"""Ended leases are told to the node within a second, and at once when there are so many, or they
hold so many bytes."""

_decode_place = msgspec.msgpack.Decoder(Place).decode
_decode_layout = msgspec.msgpack.Decoder(SegmentLayout).decode


class OnDisk(Exception):
    """The node has the object, but not in its memory: read it as from any other node."""


class NodeGone(ConnectionError):
    """The node's process has ended."""


class MappedNode:
    """A node's memory, mapped to read, and one connection to it. Safe to use from any thread."""

    def __init__(self, channel: NodeChannel, segment: Segment) -> None:
        self._channel = channel
        self._segment = segment
        self._bytes = segment.data.reshape(-1).data.cast("B").toreadonly()
        self._generation = segment.generation.data.cast("B").cast("Q")
        self._lock = threading.Lock()
        self._places: OrderedDict[str, Place] = OrderedDict()
        self._numbers = itertools.count(1)
        self._live: dict[int, int] = {}
        """Lease → bytes that it holds."""
        self._ended: list[int] = []
        self._renewed_s = time.monotonic()

    @classmethod
    def open(cls, address: NodeAddress, cluster_key: bytes) -> MappedNode:
        """Ask a node for its memory.

        Raises:
            OSError, TransferFailed, InvalidInput: it could not be had.
        """
        channel = NodeChannel.open(address, cluster_key, unix=True)
        try:
            connection = channel.connection
            connection.sendall(pack_request(Request(Operation.MAP, "")))
            packed, fds, _, _ = socket.recv_fds(connection, REPLY_BYTES + 4096, 1)
            if len(fds) != 1:
                raise ConnectionError(f"{address.name} handed over no memory")
            try:
                reply = unpack_reply(packed[:REPLY_BYTES])
                layout = _decode_layout(packed[REPLY_BYTES : REPLY_BYTES + reply.length_bytes])
            except BaseException:
                os.close(fds[0])
                raise
            return cls(channel, Segment.attach(fds[0], layout))
        except BaseException:
            channel.close()
            raise

    def is_alive(self) -> bool:
        """Whether its process still runs."""
        try:
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            return self._channel.connection.recv(1, flags) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def copy(self, key: str, first: int, count: int | None) -> bytearray | bytes | None:
        """Bytes of an object, copied; None if it is not here.

        Raises:
            OnDisk: see there.
            NodeGone, OSError: the node died.
        """
        for place in self._tries(key):
            left = max(0, place.size_bytes - first)
            wanted = left if count is None else min(count, left)
            pieces = cut(place.extents, first, wanted)
            if len(pieces) == 1:
                offset, length = pieces[0]
                copied: bytes | bytearray = bytes(self._bytes[offset : offset + length])
            else:
                copied = b"".join(self._bytes[at : at + length] for at, length in pieces)
            if self._generation[place.slot] == place.generation:
                return copied
        return None

    def copy_into(self, key: str, target: memoryview) -> int | None:
        """Copy an object to ``target``, which has its size; its size, or None: not here.

        Raises:
            OnDisk: see there.
            NodeGone, OSError: the node died.
        """
        for place in self._tries(key):
            if place.size_bytes != len(target):
                return None  # The key has other content now: ask again.
            at = 0
            for offset, length in cut(place.extents, 0, place.size_bytes):
                target[at : at + length] = self._bytes[offset : offset + length]
                at += length
            if self._generation[place.slot] == place.generation:
                return place.size_bytes
        return None

    def view(self, key: str) -> memoryview | None:
        """An object as it lies there, leased for as long as the view or a part of it lives.

        None: it is not here, or lies in several pieces.

        Raises:
            OnDisk: see there.
            NodeGone, OSError: the node died.
        """
        number = next(self._numbers)
        place = self._ask_place(Operation.LEASE, key, number)
        if place is None:
            return None
        self._live[number] = place.size_bytes
        pieces = cut(place.extents, 0, place.size_bytes)
        if len(pieces) > 1:
            self._ended.append(number)
            return None
        offset, length = pieces[0] if pieces else (0, 0)
        array = np.frombuffer(self._bytes[offset : offset + length], dtype=np.uint8)
        # Lists only grow here: a finalizer may run in the middle of anything.
        weakref.finalize(array, self._ended.append, number).atexit = False
        return array.data

    def renew(self) -> None:
        """Renew what is leased and end what is not used any more, when it is time.

        Raises:
            OSError: the node died; what is viewed stays as it is.
        """
        now_s = time.monotonic()
        due = bool(self._live) and now_s - self._renewed_s >= RENEW_S
        if due or self._ended:
            with self._lock:
                self._renew()

    def close(self) -> None:
        """Let go. Views stay valid, as the pages stay as long as they are viewed, but a living
        node may use the memory for something else from now on."""
        self._channel.close()
        self._segment.close()

    def _tries(self, key: str) -> Sequence[Place]:
        """The remembered place if it is valid, else the one that the node names."""
        if not self.is_alive():
            raise NodeGone("the node's process has ended")
        place = self._places.get(key)
        if place is not None:
            if self._generation[place.slot] == place.generation:
                return (place,)
            self._places.pop(key, None)
        place = self._ask_place(Operation.PLACE, key, 0)
        if place is None:
            return ()
        self._places[key] = place
        while len(self._places) > PLACES_LIMIT:
            self._places.popitem(last=False)
        return (place,)

    def _ask_place(self, operation: Operation, key: str, number: int) -> Place | None:
        with self._lock:
            if self._ended and self._is_much_ended():
                self._renew()
            reply = self._channel.ask(pack_request(Request(operation, key, number)))
            packed = self._channel.body(reply)
        if reply.status == Status.ON_DISK:
            raise OnDisk
        return _decode_place(packed) if reply.status == Status.OK else None

    def _is_much_ended(self) -> bool:
        ended = self._ended[:ENDED_LIMIT]
        held_bytes = sum(self._live.get(number, 0) for number in ended)
        return len(ended) >= ENDED_LIMIT or held_bytes >= ENDED_BYTES

    def _renew(self) -> None:
        ended = self._ended[:]
        del self._ended[: len(ended)]  # More may have come meanwhile.
        for number in ended:
            self._live.pop(number, None)
        packed = struct.pack(f"<{len(ended)}Q", *ended)
        request = pack_request(Request(Operation.RENEW, "", 0, len(packed)))
        self._channel.ask(request + packed)
        self._renewed_s = time.monotonic()
