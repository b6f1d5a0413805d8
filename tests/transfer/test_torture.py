"""Deaths, strangers and races: never a wrong byte, never a hang, never a process left behind."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from snowskin.terms.errors import TransferFailed
from snowskin.transfer.authentication import authenticate_as_client
from snowskin.transfer.engine import BlockPull
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.messenger import MessengerProcess
from snowskin.transfer.transports.shm import Attachment
from snowskin.transfer.wire import FRAME_BYTES, REQUEST, REQUEST_MAGIC, WANTED, request_crc

from .conftest import LAYOUT, Reader, when_ready
from .owner import KEY, Owner, content

LONG_S = 600.0


def is_gone(pid, within_s=20.0):
    """Whether a process ends (or is a zombie that nobody collects) in time."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if status.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("victim", ["owner", "messenger"])
def test_a_death_in_mid_pull_ends_it_with_what_has_landed(owner, reader, transport, victim):
    generations = owner.tell("begin", 6)
    owner.tell("publish", 3, LAYOUT.part_count)
    blocks = reader.blocks(generations)
    kill = owner.kill if victim == "owner" else owner.kill_messenger
    killer = when_ready(reader.segment, [0, 1, 2], LAYOUT.part_count, kill)
    result = reader.engine(transport).pull(owner.peer, blocks, timeout_s=LONG_S)
    killer.join()
    assert result.landed == (True, True, True, False, False, False)
    reader.assert_right(blocks, result)


def test_a_messenger_does_not_outlive_its_parent(owner):
    owner.kill()
    assert is_gone(owner.messenger_pid)


def test_a_messenger_stops_when_told_twice_too():
    segment = Segment.create(LAYOUT)
    messenger = MessengerProcess.start(segment, node="n", cluster_key=KEY)
    assert messenger.alive()
    messenger.stop()
    messenger.stop()
    assert not messenger.alive()
    with pytest.raises(TransferFailed, match="gone"):
        messenger.stat()
    segment.close()


def test_a_messenger_that_cannot_listen_says_so():
    segment = Segment.create(LAYOUT)
    with pytest.raises(TransferFailed, match=r"did not start on 203\.0\.113\.1"):
        MessengerProcess.start(segment, node="n", host="203.0.113.1", cluster_key=KEY)
    segment.close()


def test_the_cluster_key_shows_in_no_argument_and_no_environment(owner):
    process = Path(f"/proc/{owner.messenger_pid}")
    assert KEY not in (process / "cmdline").read_bytes()
    assert KEY not in (process / "environ").read_bytes()


def test_a_restarted_peer_is_used_at_once(reader, transport):
    engine = reader.engine(transport)
    for _ in range(3):
        owner = Owner(LAYOUT)
        blocks = reader.blocks(owner.tell("fill", 4))
        result = engine.pull(owner.peer, blocks, timeout_s=30)
        owner.close()
        assert all(result.landed)
        reader.assert_right(blocks, result)


def test_a_slot_rewritten_in_mid_pull_is_a_miss_and_never_wrong_bytes(owner, reader, transport):
    owner.tell("fill", LAYOUT.slot_count)
    table = Attachment.open(owner.peer, KEY)
    engine = reader.engine(transport)
    owner.start("churn", 2.0)
    until_s = time.monotonic() + 1.7
    landed = missed = 0
    while time.monotonic() < until_s:
        generations = [int(value) for value in table.segment.generation]
        blocks = reader.blocks(generations)
        result = engine.pull(owner.peer, blocks, timeout_s=30)
        reader.assert_right(blocks, result)
        assert result.checksum_failures == 0
        landed += sum(result.landed)
        missed += len(blocks) - sum(result.landed)
    table.close()
    assert landed > 0
    assert missed > 0


def test_strangers_on_the_port_change_nothing(owner, reader):
    address = (owner.peer.host, owner.peer.port)
    rng = np.random.default_rng(5)
    held = []
    for size in (0, 1, 39, 40, 41, 5000):
        stranger = socket.create_connection(address, 5)
        stranger.sendall(rng.bytes(size))
        held.append(stranger)
    http = socket.create_connection(address, 5)
    http.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b" " * 40)
    http.settimeout(20)
    assert _answer_before_the_end(http) == b""
    blocks = reader.blocks(owner.tell("fill", 4))
    result = reader.engine("tcp").pull(owner.peer, blocks, timeout_s=30)
    assert all(result.landed)
    reader.assert_right(blocks, result)
    for stranger in [*held, http]:
        stranger.close()


def _answer_before_the_end(connection):
    answer = b""
    try:
        while chunk := connection.recv(4096):
            answer += chunk
    except ConnectionResetError:
        pass
    return answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        REQUEST.pack(REQUEST_MAGIC, 2**32 - 1, 1.0, 0),
        REQUEST.pack(REQUEST_MAGIC, 0, 1.0, 0),
        REQUEST.pack(REQUEST_MAGIC, 1, float("nan"), 0),
        REQUEST.pack(REQUEST_MAGIC, 1, -1.0, 0),
        REQUEST.pack(b"PUSH", 1, 1.0, 0),
    ],
)
def test_a_request_that_makes_no_sense_ends_the_connection(owner, request_bytes):
    connection = socket.create_connection((owner.peer.host, owner.peer.port), 5)
    authenticate_as_client(connection, KEY)
    connection.settimeout(20)
    connection.sendall(request_bytes)
    assert _answer_before_the_end(connection) == b""
    connection.close()


def test_more_connections_than_allowed_are_closed_and_places_come_back(owner, reader):
    address = (owner.peer.host, owner.peer.port)
    idle = [socket.create_connection(address, 5) for _ in range(300)]
    deadline_s = time.monotonic() + 20
    while owner.tell("stat")["refused_connections"] < 40 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    for connection in idle:
        connection.close()
    deadline_s = time.monotonic() + 20
    while owner.tell("stat")["broken_connections"] < 250 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    result = reader.engine("tcp").pull(
        owner.peer, reader.blocks(owner.tell("fill", 1)), timeout_s=30
    )
    assert result.landed == (True,)


def test_a_client_that_stops_reading_hinders_no_other(reader):
    layout = SegmentLayout(slot_count=16, slot_bytes=1 << 20, part_count=1)
    owner, reader = Owner(layout), Reader(layout)
    try:
        generations = owner.tell("fill", 16)
        stuck = socket.create_connection((owner.peer.host, owner.peer.port), 5)
        authenticate_as_client(stuck, KEY)
        packed = b"".join(
            WANTED.pack(slot, 0, generations[slot], 0, layout.slot_bytes) for slot in range(16)
        )
        crc = request_crc(16, 30.0, packed)
        stuck.sendall(REQUEST.pack(REQUEST_MAGIC, 16, 30.0, crc) + packed)
        blocks = reader.blocks(generations)
        result = reader.engine("tcp").pull(owner.peer, blocks, timeout_s=30)
        assert all(result.landed)
        reader.assert_right(blocks, result)
        stuck.close()
    finally:
        owner.close()
        reader.close()


class Wire:
    """A TCP relay in front of a Messenger that harms what the server sends."""

    def __init__(self, peer, harm):
        self._peer = peer
        self._harm = harm
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(20)
        self.peer = msgspec.structs.replace(peer, port=self._listening.getsockname()[1])
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def _relay(self):
        client, _ = self._listening.accept()
        server = socket.create_connection((self._peer.host, self._peer.port), 5)
        back = threading.Thread(target=self._pump_harmed, args=(server, client))
        back.start()
        try:
            while chunk := client.recv(65536):
                server.sendall(chunk)
        except OSError:
            pass
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        back.join()
        server.close()
        client.close()

    def _pump_harmed(self, server, client):
        passed = 0
        try:
            while chunk := server.recv(65536):
                harmed = self._harm(bytearray(chunk), passed)
                passed += len(chunk)
                if harmed is None:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(harmed)
                if len(harmed) < len(chunk):
                    client.shutdown(socket.SHUT_RDWR)
                    return
        except OSError:
            pass

    def close(self):
        self._thread.join()
        self._listening.close()


def test_a_block_damaged_on_the_wire_is_read_again(owner, reader):
    generations = owner.tell("fill", 4)

    def flip(chunk, passed):
        at = 64 + 2 * FRAME_BYTES + LAYOUT.slot_bytes + 777 - passed
        if 0 <= at < len(chunk):
            chunk[at] ^= 4
        return chunk

    wire = Wire(owner.peer, flip)
    blocks = reader.blocks(generations)
    engine = reader.engine("tcp")
    result = engine.pull(wire.peer, blocks, timeout_s=30)
    engine.close()
    wire.close()
    assert (result.landed, result.checksum_failures) == ((True,) * 4, 0)
    reader.assert_right(blocks, result)
    assert engine.stat().damaged_ranges == 1


def test_a_wire_that_damages_a_block_each_time_makes_a_counted_miss(owner, reader):
    generations = owner.tell("fill", 1)

    def flip(chunk, passed):
        for at in range(len(chunk)):
            if passed + at >= 64 + FRAME_BYTES and (passed + at) % 5000 == 0:
                chunk[at] ^= 4
        return chunk

    wire = Wire(owner.peer, flip)
    blocks = reader.blocks(generations)
    engine = reader.engine("tcp")
    result = engine.pull(wire.peer, blocks, timeout_s=30)
    engine.close()
    wire.close()
    assert (result.landed, result.checksum_failures) == ((False,), 1)
    assert engine.stat().damaged_ranges == 2


@pytest.mark.parametrize("cut_at_bytes", [0, 64, 70, 100, 20_000, 50_000, 81_990])
def test_a_connection_cut_anywhere_loses_blocks_but_never_rightness(owner, reader, cut_at_bytes):
    generations = owner.tell("fill", 4)

    def cut(chunk, passed):
        return None if passed + len(chunk) > cut_at_bytes else chunk

    def trickle(chunk, passed):
        keep = cut_at_bytes - passed
        return chunk[:keep] if 0 < keep < len(chunk) else cut(chunk, passed)

    wire = Wire(owner.peer, trickle)
    blocks = reader.blocks(generations)
    engine = reader.engine("tcp")
    try:
        result = engine.pull(wire.peer, blocks, timeout_s=30)
    except TransferFailed:
        assert cut_at_bytes <= 64
    else:
        reader.assert_right(blocks, result)
        assert not all(result.landed)
    engine.close()
    wire.close()


def test_bits_flipped_anywhere_on_the_wire_never_make_wrong_bytes(owner, reader):
    generations = owner.tell("fill", 4)
    rng = np.random.default_rng(3)
    total = 4 * (LAYOUT.slot_bytes + 2 * FRAME_BYTES) + FRAME_BYTES
    spots = [64 + int(at) for at in rng.integers(0, total, 10)]
    spots += [64 + int(at) for at in rng.integers(0, FRAME_BYTES, 15)]
    missed = 0
    for spot in spots:

        def flip(chunk, passed, spot=spot):
            if 0 <= spot - passed < len(chunk):
                chunk[spot - passed] ^= 1 << (spot % 8)
            return chunk

        wire = Wire(owner.peer, flip)
        blocks = reader.blocks(generations)
        engine = reader.engine("tcp")
        result = engine.pull(wire.peer, blocks, timeout_s=30)
        engine.close()
        wire.close()
        reader.assert_right(blocks, result)
        missed += len(blocks) - sum(result.landed)
    assert missed >= 15


def test_random_kills_while_many_pull_leave_no_wrong_byte(reader):
    rng = np.random.default_rng(11)
    engines = {name: reader.engine(name) for name in ("auto", "shm", "tcp")}
    for round_number in range(9):
        owner = Owner(LAYOUT)
        generations = owner.tell("begin", LAYOUT.slot_count)
        owner.start("drip", LAYOUT.slot_count, 0.01)
        timer = threading.Timer(
            float(rng.uniform(0.0, 0.06)),
            owner.kill if round_number % 2 else owner.kill_messenger,
        )
        blocks = reader.blocks(generations)
        engine = engines[("auto", "shm", "tcp")[round_number % 3]]
        timer.start()
        try:
            result = engine.pull(owner.peer, blocks, timeout_s=LONG_S)
        except TransferFailed:
            result = None
        timer.join()
        if result is not None:
            reader.assert_right(blocks, result)
        owner.close()
        assert is_gone(owner.messenger_pid)


def test_parts_that_landed_before_a_death_hold_the_right_bytes(owner, reader, transport):
    generations = owner.tell("begin", 2)
    owner.tell("publish", 2, 3)
    blocks = reader.blocks(generations)
    killer = when_ready(reader.segment, [0, 1], 3, owner.kill)
    result = reader.engine(transport).pull(owner.peer, blocks, timeout_s=LONG_S)
    killer.join()
    assert result.landed == (False, False)
    for block in blocks:
        assert reader.segment.parts_ready[block.local_slot] == 3
        wanted = content(block.remote_slot, block.remote_generation, LAYOUT)
        assert np.array_equal(reader.segment.data[block.local_slot, :3], wanted[:3])


def test_a_pull_into_slots_that_are_read_meanwhile_shows_only_whole_parts(owner, reader, transport):
    """A second node follows the first, which follows the owner: KV handed on as it comes."""
    second = Reader()
    generations = owner.tell("begin", 4)
    blocks = reader.blocks(generations)
    middle = MessengerProcess.start(reader.segment, node="middle", cluster_key=KEY)
    onward = [
        BlockPull(block.local_slot, int(reader.segment.generation[block.local_slot]), position)
        for position, block in enumerate(blocks)
    ]
    for position in range(len(onward)):
        second.segment.begin(position, None)
    owner.start("drip", 4, 0.02)
    first_pull = threading.Thread(
        target=reader.engine(transport).pull,
        args=(owner.peer, blocks),
        kwargs={"timeout_s": 30},
    )
    first_pull.start()
    result = second.engine(transport).pull(middle.peer, onward, timeout_s=30)
    first_pull.join()
    assert all(result.landed)
    for position, block in enumerate(blocks):
        wanted = content(block.remote_slot, block.remote_generation, LAYOUT)
        assert np.array_equal(second.segment.data[position], wanted)
    middle.stop()
    second.close()


def test_a_pull_leaves_no_descriptor_behind(owner, reader, transport):
    generations = owner.tell("fill", 2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        engine = reader.engine(transport)
        engine.pull(owner.peer, reader.blocks(generations), timeout_s=30)
        engine.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
