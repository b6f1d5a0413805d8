import socket
import threading

import numpy as np
import pytest

from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.serving import BATCH_BYTES, BadRequest, Tally, serve_requests
from snowskin.transfer.wire import (
    COMPUTE,
    FRAME_BYTES,
    HEARTBEAT_S,
    REQUEST,
    REQUEST_MAGIC,
    WANTED,
    EndStatus,
    Frame,
    FrameKind,
    receive_exactly,
    request_crc,
    send_buffers,
)

LAYOUT = SegmentLayout(slot_count=8, slot_bytes=1 << 20, part_count=4)


@pytest.fixture
def segment():
    made = Segment.create(LAYOUT)
    for slot in range(8):
        made.begin(slot, None)
        made.data[slot] = slot
        made.seal(slot)
    yield made
    made.close()


@pytest.fixture
def ends():
    client, server = socket.socketpair()
    yield client, server
    client.close()
    server.close()


def ask(client, count, wait_s=5.0):
    packed = b"".join(WANTED.pack(slot, 0, 1, 0, LAYOUT.slot_bytes) for slot in range(count))
    crc = request_crc(count, wait_s, packed)
    client.sendall(REQUEST.pack(REQUEST_MAGIC, count, wait_s, crc) + packed)


def test_a_connection_without_a_request_is_closed_after_its_idle_time(segment, ends):
    tally = Tally()
    serve_requests(ends[1], segment, tally, idle_timeout_s=0.05, send_timeout_s=1.0)
    assert tally.stat().pulls == 0


def test_a_client_that_takes_no_byte_is_given_up(segment, ends):
    client, server = ends
    ask(client, 8)
    tally = Tally()
    with pytest.raises(TimeoutError):
        serve_requests(server, segment, tally, idle_timeout_s=5.0, send_timeout_s=0.1)
    assert tally.stat().pulls == 1
    assert tally.stat().sent_blocks < 8


def test_a_request_that_is_cut_short_ends_the_connection(segment, ends):
    client, server = ends
    client.sendall(REQUEST.pack(REQUEST_MAGIC, 3, 1.0, 0) + b"too few")
    client.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        serve_requests(server, segment, Tally(), idle_timeout_s=1.0, send_timeout_s=1.0)


def test_a_request_of_another_protocol_is_bad(segment, ends):
    client, server = ends
    client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    with pytest.raises(BadRequest):
        serve_requests(server, segment, Tally(), idle_timeout_s=1.0, send_timeout_s=1.0)


def test_a_damaged_request_is_bad(segment, ends):
    client, server = ends
    wanted = bytearray(WANTED.pack(0, 0, 1, 0, 5) + WANTED.pack(1, 0, 1, 0, 5))
    crc = request_crc(2, 1.0, bytes(wanted))
    wanted[WANTED.size] ^= 4
    client.sendall(REQUEST.pack(REQUEST_MAGIC, 2, 1.0, crc) + wanted)
    with pytest.raises(BadRequest):
        serve_requests(server, segment, Tally(), idle_timeout_s=1.0, send_timeout_s=1.0)


def test_a_damaged_frame_is_noticed():
    packed = bytearray(Frame(FrameKind.SLICE, 0, 1, 2, 3, 4).pack())
    assert Frame.unpack(packed) == (FrameKind.SLICE, 0, 1, 2, 3, 4)
    packed[4] ^= 1
    with pytest.raises(ConnectionError, match="damaged"):
        Frame.unpack(packed)


def test_a_connection_serves_one_request_after_the_other(segment, ends):
    client, server = ends
    tally = Tally()
    serving = threading.Thread(
        target=serve_requests,
        args=(server, segment, tally),
        kwargs={"idle_timeout_s": 20.0, "send_timeout_s": 20.0},
    )
    serving.start()
    for _ in range(3):
        ask(client, 1)
        frame = Frame.unpack(receive_exactly(client, FRAME_BYTES))
        checksum = int(segment.checksum[0])
        assert frame == (FrameKind.WHOLE, 0, 0, 0, LAYOUT.slot_bytes, checksum)
        assert receive_exactly(client, LAYOUT.slot_bytes) == segment.data[0].tobytes()
    client.shutdown(socket.SHUT_WR)
    serving.join(20)
    assert not serving.is_alive()
    stat = tally.stat()
    assert (stat.pulls, stat.sent_blocks, stat.missed_blocks) == (3, 3, 0)


def test_buffers_of_any_size_are_sent_whole_and_in_order(ends):
    client, server = ends
    rng = np.random.default_rng(2)
    pieces = [rng.bytes(size) for size in (1, 0, 700_000, 3, 1_000_000, 24, 5)]
    sending = threading.Thread(
        target=send_buffers, args=(server, [memoryview(piece) for piece in pieces])
    )
    server.settimeout(20)
    sending.start()
    assert receive_exactly(client, sum(map(len, pieces))) == b"".join(pieces)
    sending.join()


def test_every_range_ends_however_the_slices_fall_into_batches(ends):
    layout = SegmentLayout(slot_count=3, slot_bytes=BATCH_BYTES, part_count=4)
    segment = Segment.create(layout)
    for slot in range(3):
        segment.begin(slot, None)
        segment.publish(slot, 4)
    client, server = ends
    client.settimeout(20)
    serving = threading.Thread(
        target=serve_requests,
        args=(server, segment, Tally()),
        kwargs={"idle_timeout_s": 20.0, "send_timeout_s": 20.0},
    )
    serving.start()
    packed = b"".join(WANTED.pack(slot, 0, 1, 0, layout.slot_bytes) for slot in range(3))
    crc = request_crc(3, 60.0, packed)
    client.sendall(REQUEST.pack(REQUEST_MAGIC, 3, 60.0, crc) + packed)
    ended = []
    while len(ended) < 3:
        frame = Frame.unpack(receive_exactly(client, FRAME_BYTES))
        if frame.kind == FrameKind.END:
            ended.append((frame.range, frame.status))
        else:
            receive_exactly(client, frame.length)
    assert ended == [(slot, EndStatus.SENT) for slot in range(3)]
    client.shutdown(socket.SHUT_WR)
    serving.join(20)
    segment.close()


def test_a_server_that_waits_shows_life_and_says_at_last_that_it_was_in_vain(ends):
    segment = Segment.create(LAYOUT)
    segment.begin(0, None)
    segment.publish(0, 1)
    client, server = ends
    tally = Tally()
    serving = threading.Thread(
        target=serve_requests,
        args=(server, segment, tally),
        kwargs={"idle_timeout_s": 20.0, "send_timeout_s": 20.0},
    )
    serving.start()
    kinds = []
    ask(client, 1, wait_s=3 * HEARTBEAT_S)
    while not kinds or kinds[-1] != FrameKind.END:
        frame = Frame.unpack(receive_exactly(client, FRAME_BYTES))
        kinds.append(frame.kind)
        receive_exactly(client, frame.length)
    assert frame.status == EndStatus.LATER
    assert kinds[0] == FrameKind.SLICE
    assert FrameKind.IDLE in kinds[1:-1]
    client.shutdown(socket.SHUT_WR)
    serving.join(20)
    assert tally.stat().missed_blocks == 1
    segment.close()


def test_a_part_of_a_block_is_sent_as_soon_as_its_bytes_are_ready(ends, segment):
    client, server = ends
    serving = threading.Thread(
        target=serve_requests,
        args=(server, segment, Tally()),
        kwargs={"idle_timeout_s": 20.0, "send_timeout_s": 20.0},
    )
    serving.start()
    packed = WANTED.pack(3, 0, 1, 1000, 5000) + WANTED.pack(4, COMPUTE, 1, 0, LAYOUT.slot_bytes)
    packed += WANTED.pack(5, 0, 1, 7, 7) + WANTED.pack(5, 0, 1, 0, LAYOUT.slot_bytes + 1)
    client.sendall(REQUEST.pack(REQUEST_MAGIC, 4, 0.0, request_crc(4, 0.0, packed)) + packed)
    frames = []
    while sum(frame.kind == FrameKind.END for frame in frames) < 4:
        frames.append(Frame.unpack(receive_exactly(client, FRAME_BYTES)))
        receive_exactly(client, frames[-1].length)
    slices = [frame[2:5] for frame in frames if frame.kind == FrameKind.SLICE]
    assert slices == [(0, 1000, 4000), (1, 0, LAYOUT.slot_bytes)]
    ended = {frame.range: frame.status for frame in frames if frame.kind == FrameKind.END}
    assert ended == {
        0: EndStatus.SEALED,
        1: EndStatus.SEALED,
        2: EndStatus.MISSED,
        3: EndStatus.MISSED,
    }
    client.shutdown(socket.SHUT_WR)
    serving.join(20)
