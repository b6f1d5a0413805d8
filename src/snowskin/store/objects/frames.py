"""Control messages in frames: four bytes of length (little-endian), then msgpack."""

from __future__ import annotations

import socket
import struct

import msgspec

from snowskin.store.objects.words import Question, Reply

LENGTH = struct.Struct("<I")
FRAME_LIMIT_BYTES = 16 << 20
RECEIVE_BYTES = 256 << 10

_encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the wire."""
    packed = _encode(message)
    return LENGTH.pack(len(packed)) + packed


class FrameReader:
    """Cuts what a connection receives into frames; one whole frame is usually one system call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def receive(self) -> memoryview:
        """Wait for the next frame; its content, valid until the next call.

        Raises:
            BlockingIOError: the socket's own receive timeout passed.
            ConnectionError: the connection ended, or sent what is no frame.
        """
        if self._start == self._end:
            self._start, self._end = 0, self._connection.recv_into(self._buffer)
            if not self._end:
                raise ConnectionError("the other end closed the connection")
        if self._end - self._start < 4:
            self._want(4)
        (length,) = LENGTH.unpack_from(self._buffer, self._start)
        if length > FRAME_LIMIT_BYTES:
            raise ConnectionError(f"a frame of {length} bytes is over the limit")
        if self._end - self._start < 4 + length:
            self._want(4 + length)
        begin = self._start + 4
        self._start = begin + length
        return self._view[begin : self._start]

    def _want(self, count: int) -> None:
        """Have so many unread bytes in one piece."""
        if self._start + count > len(self._buffer):
            unread = bytes(self._view[self._start : self._end])
            if count > len(self._buffer):
                self._buffer = bytearray(count)
                self._view = memoryview(self._buffer)
            self._view[: len(unread)] = unread
            self._start, self._end = 0, len(unread)
        while self._end - self._start < count:
            received = self._connection.recv_into(self._view[self._end :])
            if received == 0:
                raise ConnectionError("the other end closed the connection")
            self._end += received
