"""Requests come out as they went in, however the network cuts them; damaged ones never do."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.store.objects.wire import Operation, Request, RequestReader, pack_request
from snowskin.transfer.wire import ConnectionEnded

KEYS = st.text(min_size=1, max_size=60)
PAYLOADS = st.binary(max_size=200)
READS = st.builds(
    Request,
    operation=st.just(Operation.READ),
    key=KEYS,
    first=st.integers(0, 1 << 40),
    length_bytes=st.integers(0, 1 << 40),
    digest=st.binary(min_size=16, max_size=16),
    pin=st.just(0),
)


class Pieces:
    """A connection over which bytes come in pieces of these sizes, and then end."""

    def __init__(self, content, sizes):
        self._content = content
        self._sizes = sizes
        self._count = 0

    def recv_into(self, view):
        size = self._sizes[self._count % len(self._sizes)] if self._sizes else 1 << 20
        self._count += 1
        piece = self._content[: min(size, len(view))]
        self._content = self._content[len(piece) :]
        view[: len(piece)] = piece
        return len(piece)


@given(st.lists(st.tuples(READS, PAYLOADS), max_size=8), st.lists(st.integers(1, 300), max_size=9))
def test_requests_and_payloads_come_out_as_they_went_in_however_they_are_cut(sent, sizes):
    content = b""
    for read, payload in sent:
        write = Request(Operation.WRITE, read.key, 0, len(payload), read.digest, 1)
        content += pack_request(read) + pack_request(write) + payload + pack_request(read)
    connection = Pieces(content, sizes)
    reader = RequestReader(connection)
    for read, payload in sent:
        assert reader.next() == read
        write = reader.next()
        assert (write.operation, write.key, write.pin) == (Operation.WRITE, read.key, 1)
        got = reader.rest()
        while len(got) < write.length_bytes:
            more = bytearray(write.length_bytes - len(got))
            got += more[: connection.recv_into(memoryview(more))]
        assert got[: len(payload)] == payload
        reader.put_back(got[len(payload) :])
        assert reader.next() == read
    with pytest.raises(ConnectionEnded):
        reader.next()


@given(READS, st.data())
def test_a_request_that_was_damaged_on_the_way_is_never_taken_for_another(read, data):
    packed = bytearray(pack_request(read))
    RequestReader(Pieces(bytes(packed), [])).next()
    at = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[at // 8] ^= 1 << at % 8
    with pytest.raises(ConnectionError):
        RequestReader(Pieces(bytes(packed), [])).next()


def test_a_client_may_be_silent_between_requests_but_not_within_one():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(None)
        timeout = (0).to_bytes(8, "little") + (50_000).to_bytes(8, "little")
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        theirs.sendall(pack_request(Request(Operation.READ, "key"))[:10])
        with pytest.raises(BlockingIOError):
            RequestReader(ours).next()
