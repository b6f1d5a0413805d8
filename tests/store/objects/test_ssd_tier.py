"""Objects that DRAM has no room for: on SSD, whole, found again, and back when they are wanted."""

import os

import pytest

from snowskin.store import KeyMissing, StoreError

from .running import MIB, LocalStore, ProcessStore, content, wait_until

DRAM_BYTES = 16 * MIB
KEYS = {f"key-{index:03}": content(246 * 1024 + index, seed=index) for index in range(260)}


def options(folder, **more):
    return {
        "dram_bytes": DRAM_BYTES,
        "ssd_directory": str(folder / "ssd"),
        "ssd_bytes": 160 * MIB,
    } | more


@pytest.fixture(params=["auto", "tcp"])
def transport(request):
    return request.param


def test_a_fill_of_four_times_dram_loses_nothing_and_a_restart_finds_all(tmp_path, transport):
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-bytes", "160MiB")
    store = ProcessStore(["node"], dram="16MiB", node_options=ssd)
    try:
        with store.client(transport=transport) as client:
            assert sum(map(len, KEYS.values())) > 3.8 * DRAM_BYTES
            for key, value in KEYS.items():
                assert client.put(key, value).status == "stored"
            assert all(bytes(client.get(key)) == value for key, value in KEYS.items())
            assert store.nodes["node"].end() == 0
            store.nodes["node"].start()
            store.nodes["node"].wait_ready()
            wait_until(lambda: all(client.exists_many(list(KEYS))))
            assert all(bytes(client.get(key)) == value for key, value in KEYS.items())
    finally:
        store.close()


def test_what_went_to_disk_reads_in_every_way_and_comes_back_when_it_is_read_often(
    tmp_path, transport
):
    store = LocalStore()
    try:
        node = store.node(**options(tmp_path))
        client = store.client(transport=transport)
        large = content(10 * MIB + 11, seed=1)
        client.put("large", large)
        client.put("empty", b"")
        client.put("small", b"small")
        for key in list(KEYS)[:80]:
            client.put(key, KEYS[key])
        assert node.store.fact("large") is None
        assert client.info("large").tiers == ("ssd",)
        assert bytes(client.get("empty")) == b""
        assert bytes(client.get_range("large", 8 * MIB - 5, 10)) == large[8 * MIB - 5 : 8 * MIB + 5]
        buffer = bytearray(len(large))
        assert client.get_into("large", buffer) == len(large)
        assert buffer == large
        for _ in range(4):
            assert bytes(client.get("small")) == b"small"
        wait_until(lambda: node.store.fact("small") is not None)
        wait_until(lambda: client.info("small").tiers == ("dram",))
        assert bytes(client.get("small")) == b"small"
        assert node.usage().promoted_total >= 1
        assert client.put("large", large).status == "exists"
        client.remove("large")
        with pytest.raises(KeyMissing):
            client.get("large")
    finally:
        store.close()


def test_an_object_on_disk_that_is_pinned_comes_back_and_stays(tmp_path):
    store = LocalStore()
    try:
        node = store.node(**options(tmp_path))
        client = store.client()
        client.put("pinned", content(MIB), pin="soft")
        client.pin("pinned", "none")
        for key in list(KEYS)[:90]:
            client.put(key, KEYS[key])
        assert client.info("pinned").tiers == ("ssd",)
        client.pin("pinned")
        wait_until(lambda: node.store.fact("pinned") is not None)
        for key in list(KEYS)[90:180]:
            client.put(key, KEYS[key])
        assert node.store.fact("pinned") is not None
        wait_until(lambda: client.info("pinned").tiers == ("dram",))
        assert client.info("pinned").pin == "hard"
    finally:
        store.close()


def test_a_removed_object_does_not_come_back_after_a_kill(tmp_path):
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-bytes", "160MiB")
    store = ProcessStore(["node"], dram="4MiB", node_options=ssd)
    try:
        with store.client() as client:
            for key in list(KEYS)[:60]:
                client.put(key, KEYS[key])
            client.remove("key-000")
            on_disk = [key for key in list(KEYS)[:60] if key != "key-000"]
            on_disk = [key for key in on_disk if client.info(key).tiers == ("ssd",)]
            assert len(on_disk) > 30
            store.nodes["node"].kill()
            wait_until(lambda: not any(client.exists_many(on_disk)))
            store.nodes["node"].start()
            store.nodes["node"].wait_ready()
            # The last few may not have left the queue; no other is lost.
            wait_until(lambda: sum(client.exists_many(on_disk)) > len(on_disk) - 20)
            assert not client.exists("key-000")
            for key in on_disk:
                if client.exists(key):
                    assert bytes(client.get(key)) == KEYS[key]
    finally:
        store.close()


def test_a_flipped_bit_on_disk_is_a_miss_and_counted(tmp_path, transport):
    store = LocalStore()
    try:
        node = store.node(**options(tmp_path))
        client = store.client(transport=transport, timeout_s=2.0)
        value = os.urandom(MIB)
        client.put("flipped", value)
        for key in list(KEYS)[:100]:
            client.put(key, KEYS[key])
        assert client.info("flipped").tiers == ("ssd",)
        node.tiers.shelf.flush(30.0)
        flip(tmp_path / "ssd", value[4096 * 3 : 4096 * 3 + 64])
        with pytest.raises(StoreError):
            client.get("flipped")
        wait_until(lambda: not client.exists("flipped"))
        assert node.usage().ssd_corrupt_total == 1
        assert client.put("flipped", value).status == "stored"
        assert bytes(client.get("flipped")) == value
    finally:
        store.close()


def flip(folder, pattern):
    for path in folder.iterdir():
        data = path.read_bytes() if path.is_file() else b""
        at = data.find(pattern)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 1]))
            return
    raise AssertionError("the value is not on disk")


def test_a_disk_that_is_full_drops_objects_instead_of_holding_writers_up(tmp_path):
    store = LocalStore()
    try:
        node = store.node(**options(tmp_path, ssd_bytes=24 * MIB))
        client = store.client()
        for key, value in KEYS.items():
            assert client.put(key, value).status == "stored"
        assert bytes(client.get("key-259")) == KEYS["key-259"]
        wait_until(lambda: node.usage().evicted_total > 0)
        held = 0
        for key, value in KEYS.items():
            try:
                assert bytes(client.get(key)) == value
                held += 1
            except KeyMissing:
                pass  # Evicted, perhaps just now for one that was read.
        assert 60 < held < 260
        assert client.stat().nodes[0].objects == len(node.tiers.facts())
    finally:
        store.close()
