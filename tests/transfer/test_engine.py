import gc
import threading
import time
from pathlib import Path

import msgspec
import pytest

from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.engine import PullResult
from snowskin.transfer.memory import SegmentLayout, SlotState

from .conftest import LAYOUT, Reader
from .owner import Owner


def test_sealed_blocks_arrive_whole(owner, reader, transport):
    generations = owner.tell("fill", 24)
    blocks = reader.blocks(generations)
    engine = reader.engine(transport)
    result = engine.pull(owner.peer, blocks, timeout_s=30)
    assert result.landed == (True,) * 24
    assert (result.kv_bytes, result.checksum_failures) == (24 * LAYOUT.slot_bytes, 0)
    reader.assert_right(blocks, result)
    assert set(reader.segment.state[:24].tolist()) == {SlotState.WRITING}
    stat = engine.stat()
    assert (stat.pulls, stat.landed_blocks, stat.missed_blocks) == (1, 24, 0)
    assert (stat.shm_bytes if transport == "shm" else stat.tcp_bytes) == result.kv_bytes


def test_scattered_slots_in_any_order_arrive_whole(owner, reader, transport):
    generations = owner.tell("fill", 24)
    slots = [7, 8, 9, 3, 2, 1, 20, 22, 23, 0]
    blocks = reader.blocks([generations[slot] for slot in slots], slots)
    result = reader.engine(transport).pull(owner.peer, blocks, timeout_s=30)
    assert all(result.landed)
    reader.assert_right(blocks, result)


def test_a_pull_follows_blocks_that_are_still_being_written(owner, reader, transport):
    generations = owner.tell("begin", 8)
    blocks = reader.blocks(generations)
    parts = []
    owner.start("drip", 8, 0.02)
    result = reader.engine(transport).pull(owner.peer, blocks, timeout_s=30, on_part=parts.append)
    assert all(result.landed)
    reader.assert_right(blocks, result)
    assert parts == sorted(set(parts))
    assert parts[-1] == LAYOUT.part_count
    assert len(parts) > 1


def test_each_part_is_readable_here_before_the_next_is_ready_there(owner, reader, transport):
    generations = owner.tell("begin", 2)
    blocks = reader.blocks(generations)
    arrived = threading.Semaphore(0)
    results = []
    engine = reader.engine(transport)
    pulling = threading.Thread(
        target=lambda: results.append(
            engine.pull(owner.peer, blocks, timeout_s=30, on_part=lambda _: arrived.release())
        )
    )
    pulling.start()
    for parts in range(1, LAYOUT.part_count + 1):
        owner.tell("publish", 2, parts)
        assert arrived.acquire(timeout=20)
        assert reader.segment.parts_ready[:2].tolist() == [parts, parts]
    pulling.join()
    reader.assert_right(blocks, results[0])


def test_a_block_of_another_generation_is_a_miss_and_the_others_land(owner, reader, transport):
    generations = owner.tell("fill", 4)
    owner.tell("retire", 2)
    blocks = reader.blocks(generations)
    engine = reader.engine(transport)
    result = engine.pull(owner.peer, blocks, timeout_s=30)
    assert result.landed == (True, True, False, True)
    assert result.kv_bytes == 3 * LAYOUT.slot_bytes
    reader.assert_right(blocks, result)
    assert engine.stat().incomplete_pulls == 1


def test_slots_out_of_range_and_free_slots_are_misses(owner, reader, transport):
    generations = owner.tell("fill", 2)
    blocks = reader.blocks([generations[0], 1, 0], [0, 4_000_000_000, 9])
    result = reader.engine(transport).pull(owner.peer, blocks, timeout_s=30)
    assert result.landed == (True, False, False)


def test_a_block_that_is_retired_while_it_is_followed_ends_the_wait(owner, reader, transport):
    generations = owner.tell("begin", 1)
    blocks = reader.blocks(generations)
    ticket = threading.Timer(0.1, lambda: owner.tell("retire", 0))
    ticket.start()
    result = reader.engine(transport).pull(owner.peer, blocks, timeout_s=600)
    ticket.join()
    assert result.landed == (False,)


def test_a_pull_ends_at_its_timeout_with_what_has_landed(owner, reader, transport):
    sealed = owner.tell("fill", 1)
    blocks = reader.blocks([*sealed, owner.tell("write", 1)])
    engine = reader.engine(transport)
    result = engine.pull(owner.peer, blocks, timeout_s=0.2)
    assert result.landed == (True, False)
    assert result.transfer_s >= 0.19
    again = engine.pull(owner.peer, reader.blocks(sealed), timeout_s=30)
    assert again.landed == (True,)


def test_a_pull_ends_when_it_is_cancelled(owner, reader, transport):
    generations = owner.tell("begin", 3)
    blocks = reader.blocks(generations)
    cancelled = threading.Event()
    timer = threading.Timer(0.1, cancelled.set)
    timer.start()
    result = reader.engine(transport).pull(owner.peer, blocks, timeout_s=600, cancelled=cancelled)
    timer.join()
    assert result.landed == (False, False, False)


def test_a_pull_that_was_cancelled_before_it_began_reads_nothing(owner, reader, transport):
    blocks = reader.blocks(owner.tell("fill", 3))
    cancelled = threading.Event()
    cancelled.set()
    result = reader.engine(transport).pull(owner.peer, blocks, timeout_s=9, cancelled=cancelled)
    assert result.landed == (False, False, False)


def test_nothing_asked_is_nothing_pulled(reader, owner):
    result = reader.engine("tcp").pull(owner.peer, [], timeout_s=1)
    assert msgspec.structs.replace(result, transfer_s=0.0) == PullResult((), 0, 0.0, 0)


@pytest.mark.parametrize(
    "layout",
    [
        SegmentLayout(slot_count=3, slot_bytes=1, part_count=1),
        SegmentLayout(slot_count=7, slot_bytes=7 * 13, part_count=13),
        SegmentLayout(slot_count=2, slot_bytes=3 * ((1 << 20) + 7), part_count=3),
        SegmentLayout(slot_count=5, slot_bytes=4_194_305, part_count=1),
    ],
    ids=str,
)
def test_blocks_of_odd_sizes_arrive_whole_sealed_or_not(layout, transport):
    owner, reader = Owner(layout), Reader(layout)
    try:
        engine = reader.engine(transport)
        for verb in ("fill", "begin"):
            generations = owner.tell(verb, layout.slot_count)
            owner.tell("publish", layout.slot_count, layout.part_count)
            blocks = reader.blocks(generations)
            result = engine.pull(owner.peer, blocks, timeout_s=30)
            assert all(result.landed)
            reader.assert_right(blocks, result)
    finally:
        owner.close()
        reader.close()


def test_blocks_of_another_shape_are_refused(owner, reader, transport):
    other = msgspec.structs.replace(owner.peer, layout=SegmentLayout(24, 4 * 4099, 4))
    with pytest.raises(TransferFailed, match="both must run one model"):
        reader.engine(transport).pull(other, reader.blocks([1]), timeout_s=1)


def test_an_unknown_transport_is_refused(reader):
    with pytest.raises(
        InvalidInput, match="no transport 'rdma'; choose from auto, local, shm, tcp, nixl"
    ):
        reader.engine("rdma")


def test_a_wrong_cluster_key_gets_nothing(owner, reader, transport):
    blocks = reader.blocks(owner.tell("fill", 1))
    engine = reader.engine(transport, b"another key")
    with pytest.raises(TransferFailed, match="another cluster key"):
        engine.pull(owner.peer, blocks, timeout_s=5)
    assert reader.segment.parts_ready[0] == 0
    assert engine.stat().failed_pulls == 1


def test_a_peer_that_is_gone_raises_and_is_not_tried_again_at_once(owner, reader, transport):
    blocks = reader.blocks(owner.tell("fill", 1))
    owner.kill_messenger()
    engine = reader.engine(transport)
    with pytest.raises(TransferFailed):
        engine.pull(owner.peer, blocks, timeout_s=5)
    with pytest.raises(TransferFailed, match="tried again at the earliest in"):
        engine.pull(owner.peer, blocks, timeout_s=5)


def test_auto_maps_a_peer_of_this_host_and_goes_over_tcp_to_others(owner, reader):
    generations = owner.tell("fill", 1)
    engine = reader.engine("auto")
    engine.pull(owner.peer, reader.blocks(generations), timeout_s=5)
    assert (engine.stat().shm_bytes, engine.stat().tcp_bytes) == (LAYOUT.slot_bytes, 0)
    elsewhere = msgspec.structs.replace(owner.peer, host_id="another/1")
    engine.pull(elsewhere, reader.blocks(generations), timeout_s=5)
    assert (engine.stat().shm_bytes, engine.stat().tcp_bytes) == (LAYOUT.slot_bytes,) * 2
    assert engine.stat().fallbacks == 0


def test_auto_falls_back_to_tcp_when_the_segment_cannot_be_mapped(owner, reader):
    generations = owner.tell("fill", 1)
    unreachable = msgspec.structs.replace(owner.peer, shm_address="snowskin-nobody")
    engine = reader.engine("auto")
    for _ in range(2):
        blocks = reader.blocks(generations)
        result = engine.pull(unreachable, blocks, timeout_s=5)
        assert result.landed == (True,)
        reader.assert_right(blocks, result)
    assert (engine.stat().fallbacks, engine.stat().failed_pulls) == (1, 0)
    assert engine.stat().opened_connections == 1


def test_many_threads_pull_at_once(owner, reader, transport):
    generations = owner.tell("fill", 24)
    blocks = reader.blocks(generations)
    engine = reader.engine(transport)
    results = [None] * 8

    def pull(worker):
        for _ in range(20):
            mine = blocks[3 * worker : 3 * worker + 3]
            results[worker] = engine.pull(owner.peer, mine, timeout_s=30)
            assert all(results[worker].landed)

    threads = [threading.Thread(target=pull, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker, result in enumerate(results):
        reader.assert_right(blocks[3 * worker : 3 * worker + 3], result)
    assert engine.stat().pulls == 160
    assert engine.stat().opened_connections <= 8 * 20


def test_corrupt_memory_at_the_source_is_a_counted_miss_over_tcp(owner, reader):
    generations = owner.tell("fill", 3)
    owner.tell("corrupt", 1)
    blocks = reader.blocks(generations)
    engine = reader.engine("tcp")
    result = engine.pull(owner.peer, blocks, timeout_s=30)
    assert (result.landed, result.checksum_failures) == ((True, False, True), 1)
    assert reader.segment.parts_ready[1] == 0
    assert engine.stat().checksum_failures == 1


def test_what_a_messenger_has_served_is_counted(owner, reader):
    generations = owner.tell("fill", 2)
    before = owner.tell("stat")
    reader.engine("tcp").pull(owner.peer, reader.blocks([*generations, 5]), timeout_s=5)
    reader.engine("shm").pull(owner.peer, reader.blocks(generations), timeout_s=5)
    with pytest.raises(TransferFailed):
        reader.engine("tcp", b"wrong").pull(owner.peer, reader.blocks([1]), timeout_s=5)
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        after = owner.tell("stat")
        stat = {name: after[name] - before[name] for name in after}
        if stat["broken_connections"]:
            break
        time.sleep(0.01)
    assert (stat["pulls"], stat["sent_blocks"], stat["missed_blocks"]) == (1, 2, 1)
    assert (stat["mappings"], stat["refused_connections"]) == (1, 0)
    assert stat["sent_bytes"] > 2 * LAYOUT.slot_bytes


def test_memory_of_a_dead_peer_is_let_go_of(owner, reader):
    engine = reader.engine("shm")
    gc.collect()  # What earlier tests have mapped goes now, not in the middle of this one.
    before = _mapped_segments()
    engine.pull(owner.peer, reader.blocks(owner.tell("fill", 1)), timeout_s=5)
    assert _mapped_segments() == before + 1
    owner.kill()
    deadline_s = time.monotonic() + 20
    while _mapped_segments() > before and time.monotonic() < deadline_s:
        engine.stat()
        time.sleep(0.01)
    assert _mapped_segments() == before


def _mapped_segments():
    with Path("/proc/self/maps").open() as maps:
        return sum("memfd:snowskin-segment" in line for line in maps)


def test_a_reader_maps_an_owners_segment_once_for_many_pulls(owner, reader):
    engine = reader.engine("shm")
    before = owner.tell("stat")["mappings"]
    for _ in range(5):
        engine.pull(owner.peer, reader.blocks(owner.tell("fill", 1)), timeout_s=5)
    assert owner.tell("stat")["mappings"] == before + 1


def test_a_copy_of_the_bytes_is_made_not_a_view(owner, reader, transport):
    generations = owner.tell("fill", 1)
    blocks = reader.blocks(generations)
    result = reader.engine(transport).pull(owner.peer, blocks, timeout_s=5)
    owner.tell("write", 0)
    reader.assert_right(blocks, result)
