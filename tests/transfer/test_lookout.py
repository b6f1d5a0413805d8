import socket

from snowskin.transfer.wire import Lookout


def test_looking_takes_nothing_and_ends_in_vain_where_nothing_comes():
    here, there = socket.socketpair()
    with here, there:
        lookout = Lookout(here)
        lookout.look()
        there.sendall(b"answer")
        lookout.look()
        assert here.recv(100) == b"answer"
        lookout.look()


def test_looking_ends_when_the_other_end_has_gone():
    here, there = socket.socketpair()
    with here:
        lookout = Lookout(here)
        there.close()
        lookout.look()
        assert here.recv(100) == b""
