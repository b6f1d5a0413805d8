"""Nodes that are reached over several addresses: striped, and read on when one of them is cut."""

import contextlib

import pytest

from snowskin.store import KeyMissing
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.topology import Address
from tests.store.objects.running import MIB, LocalStore, content, free_port
from tests.transfer.relay import Relay

SIZE = 24 * MIB
SETTINGS = TransferSettings(stall_s=0.3)


@contextlib.contextmanager
def store_behind(*relays_options):
    """A store of one node whose addresses are relays, which can be harmed; and a remote client."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        store = LocalStore()
        stack.callback(store.close)
        relays = []
        for at, options in enumerate(relays_options):
            relay = Relay(f"127.0.0.{2 + at}", ("127.0.0.1", port), **options)
            stack.callback(relay.close)
            relays.append(relay)
        reached_at = tuple(Address(*relay.address) for relay in relays)
        store.node(port=port, reached_at=reached_at, dram_bytes=64 * MIB)
        client = store.client(transport="tcp", transfer=SETTINGS)
        yield client, store.client(), relays


def by_host(client):
    return {stat.path.host: stat for stat in client.path_stat()}


def test_a_large_object_comes_over_all_paths_at_once():
    with store_behind({}, {}) as (client, local, _):
        local.put("large", content(SIZE))
        assert client.get("large") == content(SIZE)
        stat = by_host(client)
        assert set(stat) == {"127.0.0.2", "127.0.0.3"}
        assert all(one.landed_bytes > 0 for one in stat.values())
        assert sum(one.landed_bytes for one in stat.values()) == SIZE


@pytest.mark.parametrize("harm", ["cut", "stall", "damage"])
def test_a_path_that_fails_in_mid_transfer_leaves_the_object_whole_and_is_shown(harm):
    with store_behind({"harm": harm, "harm_after_bytes": 3 * MIB}, {}) as (client, local, _):
        local.put("large", content(SIZE))
        target = bytearray(SIZE)
        assert client.get_into("large", target) == SIZE
        assert target == content(SIZE)
        stat = by_host(client)
        assert stat["127.0.0.2"].failures >= 1
        assert stat["127.0.0.2"].retried_bytes > 0
        assert stat["127.0.0.3"].failures == 0
        assert sum(one.landed_bytes for one in stat.values()) == SIZE


def test_small_objects_ranges_batches_and_writes_survive_a_cut_path_too():
    with store_behind({}, {}) as (client, local, relays):
        values = {f"small/{at}": content(5000, at) for at in range(40)}
        for key, value in values.items():
            local.put(key, value)
        local.put("empty", b"")
        local.put("large", content(SIZE))
        assert client.get("small/0") == values["small/0"]
        relays[0].harm_now("cut")
        assert {key: client.get(key) for key in values} == values
        assert client.get_many([*values, "nothing"]) == {**values, "nothing": None}
        assert client.get("empty") == b""
        assert client.get_range("large", 1000, 7 * MIB) == content(SIZE)[1000 : 1000 + 7 * MIB]
        assert client.put("mine", content(2 * MIB)).status == "stored"
        assert client.get("mine") == content(2 * MIB)


def test_a_path_that_is_back_is_used_again():
    with store_behind({}, {}) as (client, local, relays):
        local.put("large", content(SIZE))
        relays[0].harm_now("cut")
        relays[1].harm_now("cut")
        relays[0].heal()
        assert client.get("large") == content(SIZE)
        assert by_host(client)["127.0.0.2"].landed_bytes == SIZE


def test_pieces_are_never_mixed_from_two_contents_of_a_key():
    with store_behind({}, {}) as (client, local, _):
        local.put("large", content(SIZE, 1))
        assert client.get("large") == content(SIZE, 1)
        local.remove("large")
        with pytest.raises(KeyMissing):
            client.get("large")
        local.put("large", content(SIZE, 2))
        assert client.get("large") == content(SIZE, 2)
        local.remove("large")
        local.put("large", content(SIZE, 3))
        assert client.get_range("large", 0, 10 * MIB) == content(SIZE, 3)[: 10 * MIB]


def test_a_node_listens_on_all_the_addresses_that_it_is_given():
    store = LocalStore()
    try:
        node = store.node(host="127.0.0.1,127.0.0.2", dram_bytes=64 * MIB)
        assert [one.host for one in node.address.every_address] == ["127.0.0.1", "127.0.0.2"]
        store.client().put("large", content(SIZE))
        client = store.client(transport="tcp", transfer=SETTINGS)
        assert client.get("large") == content(SIZE)
        assert set(by_host(client)) == {"127.0.0.1", "127.0.0.2"}
    finally:
        store.close()


def test_several_connections_over_one_path_are_used_if_asked_for():
    store = LocalStore()
    try:
        store.node(dram_bytes=64 * MIB)
        store.client().put("large", content(SIZE))
        client = store.client(transport="tcp", transfer=TransferSettings(connections_per_path=3))
        assert client.get("large") == content(SIZE)
        assert [one.landed_bytes for one in client.path_stat()] == [SIZE]
    finally:
        store.close()
