"""Several paths to a peer: used at once, and when one is lost, no block is lost with it."""

import threading
import time

import msgspec
import numpy as np
import pytest

from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.memory import Segment
from snowskin.transfer.messenger import MessengerProcess
from snowskin.transfer.nics import read_topology
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.topology import Address, LocalNic
from snowskin.transfer.transports.tcp import HELPERS_LIMIT

from .conftest import Reader
from .conftest import SegmentLayout as Layout
from .owner import KEY, Owner
from .relay import Relay

LAYOUT = Layout(slot_count=16, slot_bytes=3 << 20, part_count=3)
IMPATIENT = TransferSettings(stall_s=0.4)


@pytest.fixture(scope="module")
def owner():
    made = Owner(LAYOUT, ["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def all_free(owner):
    owner.tell("clear")


@pytest.fixture
def reader():
    made = Reader(LAYOUT)
    yield made
    made.close()


@pytest.fixture
def paths():
    """Makes relays to an owner, each on an address of its own, and the peer as seen over them."""
    relays = []

    def make(owner, *harms):
        target = (owner.peer.host, owner.peer.port)
        for number, harm in enumerate(harms, 2):
            harm_after_bytes = 5 << 20 if harm else None
            relays.append(Relay(f"127.0.0.{number}", target, harm, harm_after_bytes))
        addresses = tuple(Address(*relay.address) for relay in relays)
        return relays, msgspec.structs.replace(owner.peer, addresses=addresses)

    yield make
    for relay in relays:
        relay.close()


def by_host(engine):
    return {stat.path.host: stat for stat in engine.path_stat()}


def test_a_large_pull_uses_all_addresses_of_a_peer_at_once(owner, reader):
    blocks = reader.blocks(owner.tell("fill", 16))
    engine = reader.engine("tcp")
    result = engine.pull(owner.peer, blocks, timeout_s=60)
    assert all(result.landed)
    reader.assert_right(blocks, result)
    stats = by_host(engine)
    assert set(stats) == {"127.0.0.1", "127.0.0.2", "127.0.0.3"}
    assert all(stat.landed_bytes > 0 for stat in stats.values())
    assert sum(stat.landed_bytes for stat in stats.values()) == LAYOUT.data_bytes
    assert (engine.stat().striped_pulls, engine.stat().tcp_bytes) == (1, LAYOUT.data_bytes)
    (link,) = engine.link_stat()
    assert (link.node, link.paths, link.usable_paths) == ("owner", 3, 3)
    assert link.bytes_in_flight == 0
    assert link.bytes_per_s > 0


def test_a_path_begins_at_our_nic_of_the_same_network(owner, reader):
    blocks = reader.blocks(owner.tell("fill", 16))
    engine = reader.engine("tcp", nics=[LocalNic("127.0.0.7", 8), LocalNic("127.0.0.8", 8)])
    result = engine.pull(owner.peer, blocks, timeout_s=60)
    assert all(result.landed)
    assert {stat.path.local_host for stat in engine.path_stat()} == {"127.0.0.7", "127.0.0.8"}


def test_one_large_block_is_striped_too(reader):
    layout = Layout(slot_count=1, slot_bytes=24 << 20, part_count=3)
    owner, reader = Owner(layout, ["127.0.0.1", "127.0.0.2"]), Reader(layout)
    try:
        blocks = reader.blocks(owner.tell("fill", 1))
        engine = reader.engine("tcp", settings=TransferSettings(slice_bytes=70_000))
        result = engine.pull(owner.peer, blocks, timeout_s=60)
        assert result.landed == (True,)
        reader.assert_right(blocks, result)
        assert len(by_host(engine)) == 2
        owner.tell("corrupt", 0)
        result = engine.pull(owner.peer, reader.blocks(_generations(blocks)), timeout_s=60)
        assert (result.landed, result.checksum_failures) == ((False,), 1)
    finally:
        owner.close()
        reader.close()


def _generations(blocks):
    return [block.remote_generation for block in blocks]


def test_a_small_pull_takes_one_connection(owner, reader):
    layout = Layout(slot_count=4, slot_bytes=3 << 16, part_count=3)
    owner, reader = Owner(layout, ["127.0.0.1", "127.0.0.2"]), Reader(layout)
    try:
        engine = reader.engine("tcp")
        for _ in range(3):
            blocks = reader.blocks(owner.tell("fill", 4))
            assert all(engine.pull(owner.peer, blocks, timeout_s=60).landed)
        assert (engine.stat().opened_connections, engine.stat().striped_pulls) == (1, 0)
    finally:
        owner.close()
        reader.close()


@pytest.mark.parametrize("harm", ["cut", "stall", "trickle", "damage"])
def test_a_path_that_fails_in_mid_transfer_is_left_and_another_completes_it(
    owner, reader, paths, harm
):
    blocks = reader.blocks(owner.tell("fill", 16))
    _, peer = paths(owner, harm, None)
    engine = reader.engine("tcp", settings=IMPATIENT)
    result = engine.pull(peer, blocks, timeout_s=60)
    assert all(result.landed)
    reader.assert_right(blocks, result)
    bad, good = by_host(engine)["127.0.0.2"], by_host(engine)["127.0.0.3"]
    assert bad.failures >= 1
    assert (bad.retried_bytes > 0) == (harm != "damage")
    assert (engine.stat().damaged_ranges > 0) == (harm == "damage")
    assert (good.failures, good.retried_bytes) == (0, 0)
    assert bad.landed_bytes + good.landed_bytes == LAYOUT.data_bytes
    stat = engine.stat()
    assert (stat.failed_paths, stat.retried_bytes) == (bad.failures, bad.retried_bytes)
    assert stat.checksum_failures == 0


def test_a_path_that_came_back_is_used_again(owner, reader, paths):
    generations = owner.tell("fill", 16)
    (relay, _), peer = paths(owner, None, None)
    engine = reader.engine("tcp", settings=IMPATIENT)
    relay.harm_now("cut")
    assert all(engine.pull(peer, reader.blocks(generations), timeout_s=60).landed)
    assert by_host(engine)["127.0.0.2"].landed_bytes == 0
    relay.heal()
    deadline_s = time.monotonic() + 30
    while not by_host(engine)["127.0.0.2"].landed_bytes and time.monotonic() < deadline_s:
        assert all(engine.pull(peer, reader.blocks(generations), timeout_s=60).landed)
    assert by_host(engine)["127.0.0.2"].landed_bytes > 0
    assert by_host(engine)["127.0.0.2"].cooling_s == 0


def test_blocks_that_are_followed_complete_over_the_path_that_is_left(owner, reader, paths):
    blocks = reader.blocks(owner.tell("begin", 16))
    (first, second), peer = paths(owner, None, None)
    engine = reader.engine("tcp", settings=IMPATIENT)
    landed, results = threading.Semaphore(0), []
    parts = []

    def note(part):
        parts.append(part)
        landed.release()

    pulling = threading.Thread(
        target=lambda: results.append(engine.pull(peer, blocks, timeout_s=60, on_part=note))
    )
    pulling.start()
    owner.tell("publish", 16, 1)
    assert landed.acquire(timeout=20)
    first.harm_now("cut")
    owner.tell("publish", 16, 2)
    assert landed.acquire(timeout=20)
    first.heal()
    time.sleep(0.2)
    second.harm_now("cut")
    owner.tell("seal", 16)
    pulling.join(60)
    assert all(results[0].landed)
    reader.assert_right(blocks, results[0])
    assert parts == [1, 2, 3]
    assert engine.stat().failed_paths >= 1


def test_waiting_for_the_source_is_no_stall(owner, reader, paths):
    blocks = reader.blocks(owner.tell("begin", 16))
    _, peer = paths(owner, None, None)
    settings = TransferSettings(stall_s=1.2)
    engine = reader.engine("tcp", settings=settings)
    sealing = threading.Timer(2 * settings.stall_s, lambda: owner.tell("seal", 16))
    sealing.start()
    result = engine.pull(peer, blocks, timeout_s=60)
    sealing.join()
    assert all(result.landed)
    assert engine.stat().failed_paths == 0
    assert result.waited_s > settings.stall_s


def test_an_address_where_nobody_listens_costs_no_block(owner, reader):
    blocks = reader.blocks(owner.tell("fill", 16))
    addresses = (Address("127.0.0.9", 1), *owner.peer.addresses)
    peer = msgspec.structs.replace(owner.peer, addresses=addresses)
    engine = reader.engine("tcp")
    for _ in range(2):
        assert all(engine.pull(peer, blocks, timeout_s=60).landed)
    assert by_host(engine)["127.0.0.9"].landed_bytes == 0
    assert engine.stat().failed_pulls == 0


def test_a_pull_ends_when_all_paths_are_lost_and_a_later_one_finds_them_again(owner, reader, paths):
    generations = owner.tell("fill", 16)
    relays, peer = paths(owner, "cut", "cut")
    engine = reader.engine("tcp", settings=IMPATIENT)
    blocks = reader.blocks(generations)
    result = engine.pull(peer, blocks, timeout_s=60)
    assert not all(result.landed)
    reader.assert_right(blocks, result)
    with pytest.raises(TransferFailed, match=r"cannot reach|did not auth|tried again at the earl"):
        engine.pull(peer, reader.blocks(generations), timeout_s=60)
    for relay in relays:
        relay.heal()
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        try:
            result = engine.pull(peer, reader.blocks(generations), timeout_s=60)
            break
        except TransferFailed:
            time.sleep(0.05)
    assert all(result.landed)


def test_secondary_paths_serve_when_the_preferred_one_fails(owner, reader):
    generations = owner.tell("fill", 16)
    first, second, third = owner.peer.addresses
    dead = Address(first.host, 1)
    secondary = [msgspec.structs.replace(address, tier=1) for address in (second, third)]
    engine = reader.engine("tcp")
    peer = msgspec.structs.replace(owner.peer, addresses=(first, *secondary))
    assert all(engine.pull(peer, reader.blocks(generations), timeout_s=60).landed)
    assert set(by_host(engine)) == {first.host}
    peer = msgspec.structs.replace(owner.peer, addresses=(dead, *secondary))
    assert all(engine.pull(peer, reader.blocks(generations), timeout_s=60).landed)
    stats = [stat for stat in engine.path_stat() if stat.path.tier == 1]
    assert sum(stat.landed_bytes for stat in stats) == LAYOUT.data_bytes


def test_several_connections_over_one_path_are_used_at_once(owner, reader):
    only = msgspec.structs.replace(owner.peer, addresses=())
    engine = reader.engine("tcp", settings=TransferSettings(connections_per_path=3))
    for _ in range(2):
        blocks = reader.blocks(owner.tell("fill", 16))
        result = engine.pull(only, blocks, timeout_s=60)
        assert all(result.landed)
        reader.assert_right(blocks, result)
    assert engine.stat().opened_connections == 3
    assert engine.stat().striped_pulls == 2


def test_many_pulls_at_once_use_a_bounded_number_of_threads(owner, reader):
    generations = owner.tell("fill", 16)
    blocks = reader.blocks(generations)
    engine = reader.engine("tcp", settings=TransferSettings(connections_per_path=16))
    before = threading.active_count()
    most = []

    def pull(worker):
        mine = blocks[2 * worker : 2 * worker + 2]
        for _ in range(3):
            assert all(engine.pull(owner.peer, mine, timeout_s=60).landed)
            most.append(threading.active_count())

    threads = [threading.Thread(target=pull, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= before + len(threads) + HELPERS_LIMIT


def test_two_of_three_paths_that_damage_all_cost_no_block(owner, reader, paths):
    blocks = reader.blocks(owner.tell("fill", 16))
    relays, peer = paths(owner, None, None, None)
    for relay in relays[:2]:
        relay.harm_now("damage")
    for _ in range(6):
        engine = reader.engine("tcp", settings=TransferSettings(connections_per_path=2))
        result = engine.pull(peer, blocks, timeout_s=60)
        assert all(result.landed)
        reader.assert_right(blocks, result)
        engine.close()


def test_paths_that_fail_at_random_never_cost_a_byte_while_one_lives(owner, reader, paths):
    generations = owner.tell("fill", 16)
    rng = np.random.default_rng(5)
    relays, peer = paths(owner, None, None, None)
    settings = TransferSettings(stall_s=0.3, connections_per_path=2)
    for _ in range(4):
        engine = reader.engine("tcp", settings=settings)
        victims = rng.permutation(3)[:2]
        for victim in victims:
            relays[victim].harm = ["cut", "stall", "damage"][rng.integers(3)]
            passed_bytes = relays[victim]._passed_bytes
            relays[victim]._harm_after_bytes = passed_bytes + int(rng.integers(0, 12 << 20))
        blocks = reader.blocks(generations)
        result = engine.pull(peer, blocks, timeout_s=60)
        assert all(result.landed)
        reader.assert_right(blocks, result)
        for relay in relays:
            relay.heal()
        engine.close()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"slice_bytes": 0}, "slice_bytes is 0; choose from 4096 to"),
        ({"connections_per_path": 17}, "connections_per_path is 17; choose from 1 to 16"),
        ({"stripe_least_bytes": 0}, "stripe_least_bytes is 0; it must be at least 1"),
        ({"stall_s": 0.1}, r"stall_s is 0\.1; choose from 0\.3"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        TransferSettings(**wrong)


def test_a_connection_that_was_closed_while_it_lay_idle_is_replaced_without_blame(
    owner, reader, paths
):
    generations = owner.tell("fill", 16)
    (relay,), peer = paths(owner, None)
    engine = reader.engine("tcp")
    assert all(engine.pull(peer, reader.blocks(generations), timeout_s=60).landed)
    relay.harm_now("cut")
    relay.heal()
    result = engine.pull(peer, reader.blocks(generations), timeout_s=60)
    assert all(result.landed)
    assert engine.stat().opened_connections == 2
    assert engine.stat().failed_paths == 0


def test_a_messenger_on_all_addresses_is_reached_over_those_of_its_topology(tmp_path):
    file = tmp_path / "topology.json"
    file.write_text('{"cpu:0": [["127.0.0.2", "127.0.0.3"], ["127.0.0.4"]]}')
    nics = read_topology(file).nics("cpu:0")
    segment = Segment.create(LAYOUT)
    own = Reader(LAYOUT)
    messenger = MessengerProcess.start(
        segment, node="peer", host="0.0.0.0", cluster_key=KEY, nics=nics
    )
    try:
        port = messenger.peer.port
        assert messenger.peer.addresses == (
            Address("127.0.0.2", port, 0),
            Address("127.0.0.3", port, 0),
            Address("127.0.0.4", port, 1),
        )
        generations = []
        for slot in range(16):
            generations.append(segment.begin(slot, None))
            segment.data[slot] = slot
            segment.seal(slot)
        engine = own.engine("tcp", nics=nics)
        result = engine.pull(messenger.peer, own.blocks(generations), timeout_s=60)
        assert all(result.landed)
        assert all((own.segment.data[slot] == slot).all() for slot in range(16))
        used = {(stat.path.local_host, stat.path.host) for stat in engine.path_stat()}
        assert {host for _, host in used} == {"127.0.0.2", "127.0.0.3"}
        assert {local for local, _ in used} <= {"127.0.0.2", "127.0.0.3"}
    finally:
        own.close()
        messenger.stop()
        segment.close()


def test_a_segment_of_this_process_is_read_without_any_transport(reader):
    segment = Segment.create(LAYOUT)
    messenger = MessengerProcess.start(segment, node="here", cluster_key=KEY)
    generation = segment.begin(4, None)
    segment.data[4] = 9
    segment.seal(4)
    blocks = reader.blocks([generation, generation], [4, 5])
    engine = reader.engine("auto")
    engine.register(messenger.peer, segment)
    assert engine.pull(messenger.peer, blocks, timeout_s=9).landed == (True, False)
    assert (reader.segment.data[0] == 9).all()
    stat = engine.stat()
    assert (stat.local_bytes, stat.shm_bytes, stat.tcp_bytes) == (LAYOUT.slot_bytes, 0, 0)
    engine.unregister(messenger.peer)
    assert engine.pull(messenger.peer, blocks[:1], timeout_s=9).landed == (True,)
    assert engine.stat().shm_bytes == LAYOUT.slot_bytes
    only_local = reader.engine("local")
    with pytest.raises(TransferFailed, match="no segment registered in this process"):
        only_local.pull(messenger.peer, blocks[:1], timeout_s=9)
    messenger.stop()
    segment.close()
