"""Answers of a node, however they are cut on their way."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.store.objects.channels import Known, NodeChannel
from snowskin.store.objects.routes import Routes
from snowskin.store.objects.store import digest_of
from snowskin.store.objects.wire import Status, pack_reply
from snowskin.store.objects.words import Located
from snowskin.transfer.links import Links
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.transports.tcp import TcpTransport

from .running import content

OBJECTS = st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=12)


@pytest.mark.parametrize("unix", [True, False])
def test_ways_that_were_closed_keep_no_connection_that_comes_back(store, unix):
    address = store.node().address
    settings = TransferSettings()
    transport = TcpTransport(b"", Links(settings.stall_s), settings)
    routes = Routes(b"", transport)
    early = routes.to(address, unix=unix)
    channels = [early.take() for _ in range(2)]
    early.give_back(channels[0])
    (path,) = transport.paths(address)
    connection = transport.open(path, 5.0)
    routes.close()
    early.give_back(channels[1])
    late = routes.to(address, unix=unix)
    channels.append(late.take())
    late.give_back(channels[2])
    transport.give(path, connection)
    assert [channel.connection.fileno() for channel in channels] == [-1] * 3
    assert connection.fileno() == -1
    assert transport.start_helpers(1, lambda: None) == []


@given(OBJECTS, st.integers(1, 4000))
def test_objects_that_are_gone_do_not_disturb_those_behind_them(objects, together):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5.0)
        asked, answers = [], []
        for number, (size, is_there) in enumerate(objects):
            value = content(size, number)
            known = Known(f"key-{number}", Located(size, digest_of(value), ("node-0",)))
            asked.append(known)
            answers.append(known.head + value if is_there else pack_reply(Status.MISSING))
        sent = b"".join(answers)
        theirs.sendall(sent[:together])
        theirs.sendall(sent[together:])
        channel = NodeChannel(ours)
        for _ in range(2):
            targets = [memoryview(bytearray(size)) for size, _ in objects]
            found = channel.read_many(asked, targets)
            assert found == [is_there for _, is_there in objects]
            for number, (size, is_there) in enumerate(objects):
                assert not is_there or targets[number] == content(size, number)
            theirs.sendall(sent)
