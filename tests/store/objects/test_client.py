"""What a user of the store may count on, over a mapped node and over TCP alike."""

import contextlib
import gc
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from snowskin.store import (
    KeyConflict,
    KeyMissing,
    MasterUnreachable,
    PoolFullError,
    StoreClient,
    StoreRefused,
    StoreTimeout,
)
from snowskin.store.objects.serving import LEASES_LIMIT
from snowskin.store.objects.store import digest_of
from snowskin.store.objects.words import Pin, TransferState
from snowskin.terms.errors import InvalidInput
from snowskin.transfer.authentication import HANDSHAKE_TIMEOUT_S, NotAuthenticated

from .running import MIB, LocalStore, ProcessStore, content, wait_until

SIZES = (0, 1, 1000, 4096, 65_536, 65_537, 3 * MIB + 5)


@pytest.fixture(params=["auto", "tcp"])
def client(store, request):
    store.node()
    return store.client(transport=request.param)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_put_is_read_back_in_every_way(client, size):
    value = content(size, seed=size)
    assert client.put("key", value).status == "stored"
    assert bytes(client.get("key")) == value
    buffer = bytearray(size + 3)
    assert client.get_into("key", buffer) == size
    assert buffer[:size] == value
    assert bytes(client.get_range("key", size // 2, 7)) == value[size // 2 : size // 2 + 7]
    assert client.size("key") == size
    assert client.get("key").readonly


def test_the_same_content_again_exists_and_other_content_is_refused(client):
    client.put("key", b"one")
    assert client.put("key", b"one").status == "exists"
    with pytest.raises(KeyConflict, match="remove it first"):
        client.put("key", b"two")
    assert bytes(client.get("key")) == b"one"


def test_a_missing_key_is_an_error_and_an_empty_value_is_none(client):
    client.put("empty", b"")
    assert bytes(client.get("empty")) == b""
    for ask in (client.get, client.size, client.remove, client.pin, client.info):
        with pytest.raises(KeyMissing, match="'absent'"):
            ask("absent")
    with pytest.raises(KeyMissing):
        client.get_into("absent", bytearray(1))
    assert client.get_many(["absent", "empty"]) == {"absent": None, "empty": b""}


def test_a_removed_key_is_gone_for_every_client_and_free_again(store, client):
    other = store.client()
    client.put("key", content(4096))
    assert bytes(other.get("key")) == content(4096)
    client.remove("key")
    for asked in (client, other):
        assert not asked.exists("key")
        with pytest.raises(KeyMissing):
            asked.get("key")
    assert client.put("key", b"new").status == "stored"
    assert bytes(other.get("key")) == b"new"


def test_arrays_and_tensors_go_in_and_out_without_being_packed(client):
    array = np.arange(5000, dtype=np.float32).reshape(50, 100)
    client.put_from("array", array)
    back = np.empty_like(array)
    assert client.get_into("array", back) == array.nbytes
    assert np.array_equal(array, back)
    tensor = torch.arange(999, dtype=torch.bfloat16)
    client.put_from("tensor", tensor)
    there = torch.empty_like(tensor)
    assert client.get_into("tensor", there) == 2 * 999
    assert torch.equal(tensor, there)


def test_values_without_plain_memory_are_refused_with_a_remedy(client):
    for value, remedy in (
        ("text", "give bytes"),
        (np.zeros((4, 4)).T[1:], "ascontiguousarray"),
        (np.array([object()]), "ascontiguousarray"),
        (torch.zeros(4, 4).T[1:], "contiguous"),
    ):
        with pytest.raises(InvalidInput, match=remedy):
            client.put("key", value)
    client.put("key", b"abc")
    with pytest.raises(InvalidInput, match="3 bytes, the buffer only 2"):
        client.get_into("key", bytearray(2))
    with pytest.raises(InvalidInput, match="bytearray"):
        client.get_into("key", b"abc")
    with pytest.raises(InvalidInput, match="3 bytes"):
        client.get_range("key", 4, 1)


@pytest.mark.parametrize("key", ["", "x" * 1001, b"bytes", "ü" * 501, "\ud800"])
def test_keys_that_cannot_be_are_refused(client, key):
    with pytest.raises(InvalidInput, match="key"):
        client.put(key, b"")


WRONG = {
    "exists_many": lambda client: client.exists_many([1]),
    "exists_many of bytes": lambda client: client.exists_many([b"key"]),
    "exists_many of no text": lambda client: client.exists_many(["\ud800"]),
    "longest_prefix": lambda client: client.longest_prefix([None]),
    "list": lambda client: list(client.list(5)),
    "transfer_status": lambda client: client.transfer_status(5),
    "replicas": lambda client: client.put("other", b"value", replicas=1.5),
    "node": lambda client: client.put("other", b"value", node=5),
    "pin": lambda client: client.pin("key", ["hard"]),
    "count": lambda client: client.change_replica("key", count=1.5),
    "first": lambda client: client.get_range("key", 0.0, 1),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_arguments_of_a_wrong_type_are_refused_without_any_wait(client, call):
    client.put("key", b"value")
    with pytest.raises(InvalidInput):
        call(client)
    assert client.exists("key")


def test_numbers_and_texts_of_numpy_are_as_good_as_plain_ones(client):
    key = np.str_("key")
    assert client.put(key, b"value", replicas=np.int64(1)).status == "stored"
    assert bytes(client.get(key)) == b"value"
    assert bytes(client.get_range(key, np.int64(1), np.int8(2))) == b"al"
    assert client.exists(key)
    assert client.change_replica(key, count=np.int32(1)).wanted == 1
    client.remove(key)


def test_keys_are_listed_in_order_by_prefix(client):
    client.put_many({f"a/{index:03}": b"x" for index in range(30)} | {"b": b""})
    assert list(client.list("a/")) == [f"a/{index:03}" for index in range(30)]
    assert list(client.list()) == [*client.list("a/"), "b"]
    assert list(client.list("c")) == []


def test_existence_is_told_key_by_key_in_order(client):
    client.put("here", b"x")
    keys = ["here" if index % 3 else f"absent-{index}" for index in range(20_000)]
    assert client.exists_many(keys) == [bool(index % 3) for index in range(20_000)]
    assert client.exists_many([]) == []
    assert client.exists("here")
    assert not client.exists("absent")


def test_each_node_s_longest_prefix_is_known(store):
    for name in ("a", "b"):
        store.node(name)
    client = store.client()
    chain = [f"block-{index}" for index in range(6)]
    for key, nodes in zip(chain, ("ab", "ab", "a", "b", "ab"), strict=False):
        client.put(key, b"x", node=nodes[0], replicas=len(nodes))
    assert client.longest_prefix(chain) == {"a": 3, "b": 2}
    assert client.longest_prefix(["absent", *chain]) == {}
    assert client.longest_prefix([]) == {}


def test_a_view_keeps_its_bytes_while_the_node_evicts_all_else(store):
    store.node(dram_bytes=4 * MIB)
    client = store.client()
    client.put("viewed", content(MIB, seed=7))
    view = client.get("viewed")
    for index in range(12):
        client.put(f"other-{index}", content(MIB, seed=index))
    client.remove("viewed")
    for index in range(12, 24):
        client.put(f"other-{index}", content(MIB, seed=index))
    assert view == content(MIB, seed=7)
    del view
    gc.collect()
    wait_until(lambda: store.nodes["node-0"].usage().leases == 0)
    for index in range(24, 30):
        client.put(f"other-{index}", content(MIB, seed=index))
    assert store.nodes["node-0"].store.usage().objects >= 3


def test_beyond_the_most_leases_objects_are_copied_and_earlier_views_stay(store):
    node = store.node()
    client = store.client()
    value = content(256 << 10)
    client.put("large", value)
    views = [client.get("large") for _ in range(LEASES_LIMIT)]
    copies = [client.get("large") for _ in range(3)]
    assert node.usage().leases == LEASES_LIMIT
    assert copies == [value] * 3
    del copies[:], views[100:]
    wait_until(lambda: node.usage().leases == 100)


def test_pinned_objects_stay_and_a_pool_of_them_is_full(store, client):
    store.nodes["node-0"].stop()
    wait_until(lambda: not client.stat().nodes)
    store.node("small", dram_bytes=4 * MIB)
    client.put("hard", content(2 * MIB), pin="hard")
    client.put("soft", content(MIB // 2), pin="soft")
    for index in range(10):
        client.put(f"other-{index}", content(MIB // 2, seed=index))
    assert client.exists("soft")
    with pytest.raises(PoolFullError, match="unpin"):
        client.put("large", content(3 * MIB))
    assert client.exists_many(["hard", "soft"]) == [True, False]
    client.unpin("hard")
    assert client.put("large", content(3 * MIB)).status == "stored"
    assert not client.exists("hard")
    with pytest.raises(PoolFullError, match="no node has room"):
        client.put("huge", content(5 * MIB))


def test_replicas_grow_and_shrink_and_say_how_far_they_came(store):
    for index in range(3):
        store.node(f"node-{index}")
    client = store.client()
    assert client.put("key", content(MIB), replicas=2).replicas == 2
    grown = client.change_replica("key", count=3)
    wait_until(lambda: client.transfer_status(grown).state is not TransferState.RUNNING)
    assert client.transfer_status(grown).state is TransferState.DONE
    assert set(client.info("key").nodes) == {"node-0", "node-1", "node-2"}
    asked = client.change_replica("key", count=5)
    wait_until(lambda: client.transfer_status(asked).state is not TransferState.RUNNING)
    status = client.transfer_status(asked)
    assert (status.state, status.replicas, status.wanted) == (TransferState.FAILED, 3, 5)
    assert "only 3 nodes" in status.failure
    shrunk = client.change_replica("key", count=1)
    wait_until(lambda: client.transfer_status(shrunk).state is TransferState.DONE)
    (left,) = client.info("key").nodes
    assert bytes(client.get("key")) == content(MIB)
    elsewhere = next(name for name in store.nodes if name != left)
    moved = client.change_replica("key", node=elsewhere)
    wait_until(lambda: client.transfer_status(moved).state is TransferState.DONE)
    assert set(client.info("key").nodes) == {left, elsewhere}


def test_clients_without_the_cluster_key_are_turned_away():
    store = LocalStore(key=b"secret")
    try:
        store.node()
        store.client().put("key", b"x")
        with StoreClient(store.address) as stranger, pytest.raises(NotAuthenticated):
            stranger.get("key")
    finally:
        store.close()


def test_an_absent_master_is_named_with_its_remedy():
    with (
        StoreClient("127.0.0.1:1", timeout_s=0.2) as client,
        pytest.raises(MasterUnreachable, match="snowskin store master"),
    ):
        client.exists("key")


def test_a_closed_client_says_so_and_opens_nothing_any_more(client):
    client.put("key", b"value")
    assert bytes(client.get("key")) == b"value"
    client.close()
    for ask in (
        lambda: client.get("key"),
        lambda: client.get_many(["key"]),
        lambda: client.get_into("key", bytearray(5)),
        lambda: client.put("other", b"value"),
        lambda: client.exists("key"),
    ):
        with pytest.raises(StoreRefused, match="closed"):
            ask()


@pytest.mark.parametrize("timeout_s", [0, -1, 1e-9, 1e30, float("inf"), float("nan")])
def test_times_that_sockets_cannot_be_told_are_refused(timeout_s):
    with pytest.raises(InvalidInput, match="timeout_s"):
        StoreClient(timeout_s=timeout_s)


def test_a_master_that_takes_calls_and_says_nothing_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with StoreClient(address, timeout_s=0.2) as client:
            begin_s = time.monotonic()
            with pytest.raises(MasterUnreachable):
                client.exists("key")
            assert time.monotonic() - begin_s < HANDSHAKE_TIMEOUT_S


def test_threads_share_a_client(client):
    failures = []

    def work(number):
        for index in range(40):
            key = f"{number}-{index}"
            client.put(key, content(3000 * index, seed=number))
            if bytes(client.get(key)) != content(3000 * index, seed=number):
                failures.append(key)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_of_many_writers_of_a_key_wins_and_all_learn_it(store):
    store.node()
    outcomes = []

    def work(number):
        try:
            outcomes.append(store.client().put("key", content(MIB, seed=number % 2)).status)
        except KeyConflict:
            outcomes.append("conflict")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["conflict"] * 4 + ["exists"] * 3 + ["stored"]


def test_a_node_that_still_holds_what_the_master_does_not_know_is_waited_for(store):
    node = store.node()
    old = content(1000, seed=1)
    item = node.store.reserve("key", len(old), Pin.NONE)
    node.store.views(item)[0][:] = old
    node.store.commit(item, digest_of(old))
    node.store.release(item)
    with pytest.raises(KeyConflict):
        store.client(timeout_s=0.2).put("key", b"new")
    dropping = threading.Timer(0.2, node.tiers.remove, ("key",))
    dropping.start()
    assert store.client().put("key", b"new").status == "stored"
    dropping.join()
    assert bytes(store.client().get("key")) == b"new"


def test_a_client_lets_go_of_the_memory_of_a_node_that_died():
    store = ProcessStore(["node-0"])
    gc.collect()
    before = segments("fd"), segments("map_files")
    try:
        with store.client() as client:
            client.put("large", content(3 * MIB, seed=3))
            view = client.get("large")
            attached = segments("fd")
            assert attached > before[0]
            store.nodes["node-0"].kill()
            wait_until(lambda: segments("fd") < attached)
            assert view == content(3 * MIB, seed=3)
            del view
            gc.collect()
            assert (segments("fd"), segments("map_files")) == before
    finally:
        store.close()


def segments(folder):
    """How many descriptors or mappings of segments this process has."""
    names = []
    for path in Path(f"/proc/self/{folder}").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(path.readlink()))
    return sum("memfd:snowskin-segment" in name for name in names)


def test_bytes_that_change_while_they_are_sent_are_never_stored(store):
    store.node()
    client = store.client(transport="tcp", timeout_s=0.5)
    value = bytearray(content(MIB))
    changing = threading.Event()

    def change():
        while not changing.is_set():
            value[-1] ^= 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for index in range(20):
            try:
                client.put(f"key-{index}", value)
            except StoreTimeout:
                continue
            assert bytes(client.get(f"key-{index}"))[:-1] == value[:-1]
    finally:
        changing.set()
        thread.join()
    # Each is stored under the digest of what is there.
    for key in client.list():
        assert digest_of(client.get(key)).hex() == client.info(key).digest
