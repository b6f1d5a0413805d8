"""NIXL over whatever UCX finds here: on one machine, cross-memory copies and TCP."""

import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import msgspec
import pytest

from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.engine import TransferEngine
from snowskin.transfer.memory import Segment
from snowskin.transfer.messenger import MessengerProcess
from snowskin.transfer.transports.nixl import MODULES, NixlServer
from snowskin.transfer.transports.shm import Attachment

from .conftest import LAYOUT, when_ready
from .owner import KEY, Owner

NIXL = any(find_spec(name.partition(".")[0]) is not None for name in MODULES)
needs_nixl = pytest.mark.skipif(not NIXL, reason="NIXL is not installed: snowskin[nixl]")


@pytest.fixture
def owner(owners):
    """A living owner that serves NIXL, whose slots are all free."""
    if not owners or not owners[-1].is_whole:
        owners.append(Owner(LAYOUT, nixl=True))
    owners[-1].tell("clear")
    return owners[-1]


@pytest.mark.skipif(NIXL, reason="NIXL is installed")
def test_without_nixl_the_error_says_what_to_install(reader):
    with pytest.raises(InvalidInput, match=r"install snowskin\[nixl\]"):
        TransferEngine(reader.segment, transport="nixl", cluster_key=KEY)
    with pytest.raises(InvalidInput, match=r"install snowskin\[nixl\]"):
        MessengerProcess.start(reader.segment, node="n", cluster_key=KEY, nixl=True)


@needs_nixl
def test_sealed_blocks_arrive_whole_and_are_verified(owner, reader):
    generations = owner.tell("fill", 24)
    owner.tell("corrupt", 5)
    blocks = reader.blocks(generations)
    engine = reader.engine("nixl")
    result = engine.pull(owner.peer, blocks, timeout_s=30)
    assert [at for at, landed in enumerate(result.landed) if not landed] == [5]
    assert result.checksum_failures == 1
    assert reader.segment.parts_ready[5] == 0
    reader.assert_right(blocks, result)
    assert engine.stat().nixl_bytes == 23 * LAYOUT.slot_bytes
    (link,) = engine.link_stat()
    assert (link.bytes_in_flight, link.usable_paths) == (0, 1)


@needs_nixl
def test_a_pull_follows_blocks_that_are_still_being_written(owner, reader):
    blocks = reader.blocks(owner.tell("begin", 8))
    parts = []
    owner.start("drip", 8, 0.02)
    result = reader.engine("nixl").pull(owner.peer, blocks, timeout_s=30, on_part=parts.append)
    assert all(result.landed)
    reader.assert_right(blocks, result)
    assert parts == sorted(set(parts))
    assert parts[-1] == LAYOUT.part_count


@needs_nixl
def test_stale_and_impossible_slots_are_misses(owner, reader):
    generations = owner.tell("fill", 4)
    owner.tell("retire", 2)
    blocks = reader.blocks([*generations, 1, 0], [0, 1, 2, 3, 4_000_000, 9])
    result = reader.engine("nixl").pull(owner.peer, blocks, timeout_s=30)
    assert result.landed == (True, True, False, True, False, False)
    reader.assert_right(blocks, result)


@needs_nixl
def test_a_pull_ends_at_its_timeout_and_when_it_is_cancelled(owner, reader):
    blocks = reader.blocks([*owner.tell("fill", 1), owner.tell("write", 1)])
    engine = reader.engine("nixl")
    assert engine.pull(owner.peer, blocks, timeout_s=0.3).landed == (True, False)
    cancelled = threading.Event()
    timer = threading.Timer(0.1, cancelled.set)
    timer.start()
    result = engine.pull(owner.peer, blocks[1:], timeout_s=600, cancelled=cancelled)
    timer.join()
    assert result.landed == (False,)


@needs_nixl
def test_a_slot_rewritten_in_mid_pull_is_a_miss_and_never_wrong_bytes(owner, reader):
    owner.tell("fill", LAYOUT.slot_count)
    engine = reader.engine("nixl")
    attachment = Attachment.open(owner.peer, KEY)
    owner.start("churn", 1.5)
    until_s = time.monotonic() + 1.2
    landed = missed = 0
    while time.monotonic() < until_s:
        generations = [int(value) for value in attachment.segment.generation]
        blocks = reader.blocks(generations)
        result = engine.pull(owner.peer, blocks, timeout_s=0.5)
        reader.assert_right(blocks, result)
        assert result.checksum_failures == 0
        landed += sum(result.landed)
        missed += len(blocks) - sum(result.landed)
    attachment.close()
    assert landed > 0
    assert missed > 0


@needs_nixl
@pytest.mark.parametrize("victim", ["owner", "messenger"])
def test_a_death_in_mid_pull_ends_it_with_what_has_landed(owner, reader, victim):
    generations = owner.tell("begin", 6)
    owner.tell("publish", 3, LAYOUT.part_count)
    blocks = reader.blocks(generations)
    kill = owner.kill if victim == "owner" else owner.kill_messenger
    killer = when_ready(reader.segment, [0, 1, 2], LAYOUT.part_count, kill)
    engine = reader.engine("nixl")
    result = engine.pull(owner.peer, blocks, timeout_s=120)
    killer.join()
    assert result.landed == (True, True, True, False, False, False)
    reader.assert_right(blocks, result)
    with pytest.raises(TransferFailed):
        engine.pull(owner.peer, blocks, timeout_s=30)


@needs_nixl
def test_many_threads_pull_at_once(owner, reader):
    blocks = reader.blocks(owner.tell("fill", 24))
    engine = reader.engine("nixl")

    def pull(worker):
        mine = blocks[6 * worker : 6 * worker + 6]
        for _ in range(10):
            assert all(engine.pull(owner.peer, mine, timeout_s=30).landed)

    threads = [threading.Thread(target=pull, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.stat().landed_blocks == 240


@needs_nixl
def test_a_peer_that_serves_no_nixl_cannot_be_read_with_it(owner, reader):
    without = msgspec.structs.replace(owner.peer, nixl=None)
    with pytest.raises(TransferFailed, match="has no NIXL agent; start its node with NIXL"):
        reader.engine("nixl").pull(without, reader.blocks([1]), timeout_s=5)
    broken = msgspec.structs.replace(
        owner.peer, nixl=msgspec.structs.replace(owner.peer.nixl, description=b"none")
    )
    with pytest.raises(TransferFailed, match="with NIXL"):
        reader.engine("nixl").pull(broken, reader.blocks([1]), timeout_s=5)


@needs_nixl
def test_an_owner_can_serve_its_segment_from_its_own_process(reader):
    source = Segment.create(LAYOUT)
    messenger = MessengerProcess.start(source, node="own", cluster_key=KEY)
    server = NixlServer(source)
    generation = source.begin(3, None)
    source.data[3] = 7
    source.seal(3)
    peer = msgspec.structs.replace(messenger.peer, nixl=server.address)
    result = reader.engine("nixl").pull(peer, reader.blocks([generation], [3]), timeout_s=30)
    assert result.landed == (True,)
    assert (reader.segment.data[0] == 7).all()
    server.close()
    server.close()
    messenger.stop()
    source.close()


@needs_nixl
def test_it_works_over_tcp_where_nothing_better_is_allowed():
    program = f"""
import sys; sys.path[:0] = {sys.path!r}
from tests.transfer.conftest import Reader, SegmentLayout
from tests.transfer.owner import Owner
layout = SegmentLayout(slot_count=4, slot_bytes=3 << 16, part_count=3)
owner, reader = Owner(layout, nixl=True), Reader(layout)
blocks = reader.blocks(owner.tell("fill", 4))
result = reader.engine("nixl").pull(owner.peer, blocks, timeout_s=60)
assert all(result.landed), result
reader.assert_right(blocks, result)
reader.close(); owner.close()
"""
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=120,
        env={**os.environ, "UCX_TLS": "tcp,self"},
    )
