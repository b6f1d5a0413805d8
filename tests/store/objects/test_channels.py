"""Answers of a node, however they are cut on their way."""

import socket

from hypothesis import given
from hypothesis import strategies as st

from snowskin.store.objects.channels import Known, NodeChannel
from snowskin.store.objects.store import digest_of
from snowskin.store.objects.wire import Status, pack_reply
from snowskin.store.objects.words import Located

from .running import content

OBJECTS = st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=12)


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
