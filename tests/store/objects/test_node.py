"""What a node and a master withstand, and how a node makes room."""

import contextlib
import random
import socket
import threading

import pytest

from snowskin.store import KeyMissing, StoreRefused
from snowskin.store.objects.channels import NodeChannel
from snowskin.store.objects.frames import frame
from snowskin.store.objects.master import UNSENT_LIMIT_BYTES
from snowskin.store.objects.node import NodeConfig
from snowskin.store.objects.words import BATCH_LIMIT, ListKeys
from snowskin.terms.errors import InvalidInput
from snowskin.transfer.authentication import NotAuthenticated, authenticate_as_client

from .running import MIB, LocalStore, content, wait_until

KIB = 1 << 10


def test_a_node_evicts_in_the_background_down_to_its_low_watermark(store):
    node = store.node(dram_bytes=8 * MIB, high_ratio=0.8, low_ratio=0.5)
    client = store.client()
    for index in range(104):
        client.put(f"key-{index:03}", content(64 * KIB, seed=index))
    wait_until(lambda: node.store.used_ratio() <= 0.5)
    left = list(client.list())
    assert left == [f"key-{index:03}" for index in range(104 - len(left), 104)]
    wait_until(lambda: client.stat().nodes[0].objects == len(node.store.facts()))


@pytest.mark.parametrize(("eviction", "survives"), [("lru", False), ("lfu", True)])
def test_the_eviction_policy_is_the_one_that_was_chosen(store, eviction, survives):
    store.node(dram_bytes=4 * MIB, eviction=eviction)
    client = store.client(transport="tcp")
    client.put("often", content(64 * KIB))
    for _ in range(5):
        client.get("often")
    for index in range(100):
        client.put(f"once-{index}", content(64 * KIB, seed=index))
    assert client.exists("often") == survives


@pytest.mark.parametrize("unix", [True, False])
def test_a_node_serves_nobody_who_does_not_know_the_key(unix):
    store = LocalStore(key=b"secret")
    try:
        node = store.node()
        with pytest.raises(NotAuthenticated):
            NodeChannel.open(node.address, b"guess", unix=unix)
    finally:
        store.close()


def test_noise_ends_its_connection_and_nothing_else(store):
    rng = random.Random(5)
    node = store.node()
    client = store.client()
    client.put("key", content(MIB))
    targets = [store.master.address, (node.address.host, node.address.port)]
    for round_number in range(40):
        with socket.create_connection(targets[round_number % 2], 5.0) as noisy:
            noisy.settimeout(5.0)
            if round_number % 4 >= 2:
                authenticate_as_client(noisy, b"")
            noise = rng.randbytes(rng.choice((1, 60, 5000)))
            if round_number % 8 >= 4:
                noise = (len(noise)).to_bytes(4, "little") + noise
            noisy.sendall(noise)
    other = store.client(transport="tcp")
    assert bytes(client.get("key")) == bytes(other.get("key")) == content(MIB)
    assert client.put("after", b"noise").status == "stored"


def test_who_comes_while_no_thread_can_be_started_is_turned_away_and_others_are_served(store):
    store.node()
    size_bytes = threading.stack_size(1 << 47)
    try:
        with socket.create_connection(store.master.address, 5.0) as early:
            early.settimeout(5.0)
            assert early.recv(1) == b""
    finally:
        threading.stack_size(size_bytes)
    assert store.client().put("key", b"value").status == "stored"


def test_callers_who_take_no_answers_are_cut_off_and_others_are_served(store):
    store.node()
    client = store.client()
    for index in range(200):
        client.put(f"{index:03}" + "x" * 900, b"")
    question = frame(ListKeys("", None, BATCH_LIMIT))
    with socket.create_connection(store.master.address, 5.0) as deaf:
        authenticate_as_client(deaf, b"")

        def is_cut_off():
            try:
                deaf.sendall(question)
            except ConnectionError:
                return True
            return False

        with contextlib.suppress(ConnectionError):
            for _ in range(2 * UNSENT_LIMIT_BYTES // (200 * 900)):
                deaf.sendall(question)
        assert len(list(client.list())) == 200
        wait_until(is_cut_off)
        assert len(list(client.list())) == 200


def test_two_nodes_of_one_name_are_told_apart(store):
    store.node("same")
    host, port = store.master.address
    from snowskin.store.objects.node import StoreNode

    twin = StoreNode(NodeConfig(master_host=host, master_port=port, name="same", dram_bytes=MIB))
    twin.start()
    try:
        with pytest.raises(StoreRefused, match="choose another --name"):
            twin.link.wait_joined(10.0)
    finally:
        twin.stop()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"dram_bytes": 10}, "dram_bytes is 10"),
        ({"high_ratio": 0.5, "low_ratio": 0.6}, "watermarks"),
        ({"eviction": "fifo"}, "fifo"),
        ({"ssd_directory": "/tmp/x", "ssd_bytes": 5}, "capacity_bytes is 5"),
    ],
)
def test_options_that_cannot_be_are_named(wrong, named):
    with pytest.raises(InvalidInput, match=named):
        NodeConfig(master_host="127.0.0.1", master_port=1, name="n", **wrong)


def test_a_writer_that_dies_in_mid_write_leaves_nothing(store):
    from snowskin.store.objects.wire import Operation, Request, pack_request

    node = store.node()
    client = store.client()
    channel = NodeChannel.open(node.address, b"", unix=False)
    request = Request(Operation.WRITE, "half", 0, 8 * MIB, b"d" * 16)
    channel.ask(pack_request(request))
    channel.connection.sendall(content(MIB))
    assert node.usage().dram_used_bytes == 8 * MIB
    channel.close()
    wait_until(lambda: node.usage().dram_used_bytes == 0)
    with pytest.raises(KeyMissing):
        client.get("half")
    assert client.put("half", b"whole").status == "stored"
