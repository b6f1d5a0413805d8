"""Random kills of nodes, master and clients. SNOWSKIN_TORTURE=200 sets how many."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from snowskin.store import KeyMissing, MasterUnreachable, StoreError
from snowskin.store.objects.channels import SILENCE_S

from .restless import value_of
from .running import ProcessStore, is_running, wait_until

KILLS = int(os.environ.get("SNOWSKIN_TORTURE", "8"))
NODES = ("node-0", "node-1", "node-2")


class Restless:
    """A client process that works until it is killed."""

    def __init__(self, address, transport, seed, log):
        self.arguments = (address, transport, str(seed))
        self.log = log
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.objects.restless", *self.arguments],
            stdout=self.log,
            stderr=self.log,
        )

    def kill(self):
        self.process.kill()
        self.process.wait()


class Torture:
    def __init__(self, folder, seed):
        self.rng = random.Random(seed)
        self.store = ProcessStore(NODES, dram="192MiB")
        self.log = (folder / "clients.log").open("w+")
        self.clients = [
            Restless(self.store.address, transport, index, self.log)
            for index, transport in enumerate(("auto", "tcp"))
        ]
        self.client = self.store.client(timeout_s=10.0)
        self.tcp_client = self.store.client(timeout_s=10.0, transport="tcp")
        self.lives = dict.fromkeys(NODES, 0)
        self.kept = {}  # key -> {node: its life when the object was committed there}
        self.number = 0

    def put_some(self):
        for _ in range(3):
            key = f"kept/{self.number}"
            self.number += 1
            result = self.client.put(key, value_of(key), replicas=2)
            assert result.status == "stored"
            self.kept[key] = {name: self.lives[name] for name in self.client.info(key).nodes}

    def alive(self, key):
        return any(self.lives[name] == life for name, life in self.kept[key].items())

    def check(self, keys):
        """Each is readable, with its own bytes, as long as a replica lives."""
        for key in keys:
            if not self.alive(key):
                continue
            for client in (self.client, self.tcp_client):
                begin_s = time.monotonic()
                assert bytes(client.get(key)) == value_of(key)
                assert time.monotonic() - begin_s < 10

    def kill_one(self):
        what = self.rng.choice(("node", "node", "master", "client"))
        if what == "client":
            client = self.rng.choice(self.clients)
            client.kill()
            client.start()
        elif what == "master":
            known = self.rng.sample(list(self.kept), min(3, len(self.kept)))
            self.check(known)
            self.store.master.kill()
            self.check(known)
            self.store.master.start()
            self.store.master.wait_ready()
        else:
            name = self.rng.choice(NODES)
            self.store.nodes[name].kill()
            self.lives[name] += 1
            self.check(self.rng.sample(list(self.kept), min(6, len(self.kept))))
            self.store.nodes[name].start()
            self.store.nodes[name].wait_ready()
            wait_until(lambda: len(self.client.stat().nodes) == len(NODES))
        return what

    def close(self):
        for client in (self.client, self.tcp_client):
            client.close()
        for client in self.clients:
            client.kill()
        self.store.close()
        self.log.close()


@pytest.mark.timeout(60 + 20 * KILLS)
def test_random_kills_lose_nothing_that_has_a_replica_and_show_no_wrong_byte(tmp_path):
    torture = Torture(tmp_path, seed=KILLS)
    try:
        torture.put_some()
        for _ in range(KILLS):
            torture.kill_one()
            torture.put_some()
            torture.check(torture.rng.sample(list(torture.kept), min(8, len(torture.kept))))
        torture.check(torture.kept)
        assert any(torture.alive(key) for key in torture.kept)
        torture.log.seek(0)
        for line in torture.log:
            assert line.startswith("refused"), line
    finally:
        torture.close()
    for process in (*torture.store.nodes.values(), torture.store.master):
        assert not is_running(process.pid)


def test_a_read_fails_over_to_the_second_replica_at_once(tmp_path):
    store = ProcessStore(NODES)
    try:
        with store.client() as mapped, store.client(transport="tcp") as remote:
            for client in (mapped, remote):
                key = f"key-{client is mapped}"
                client.put(key, value_of(key), replicas=3)
                for name in client.info(key).nodes[:2]:
                    assert bytes(client.get(key)) == value_of(key)
                    store.nodes[name].kill()
                    begin_s = time.monotonic()
                    assert bytes(client.get(key)) == value_of(key)
                    failover_s = time.monotonic() - begin_s
                    # Far less than any timeout: the end of a connection is noticed, not waited for.
                    assert failover_s < 1.0
                    store.nodes[name].start()
                    store.nodes[name].wait_ready()
                    wait_until(lambda: len(mapped.stat().nodes) == 3)
    finally:
        store.close()


def test_reads_go_on_without_a_master_and_all_is_known_when_it_is_back(tmp_path):
    store = ProcessStore(NODES)
    try:
        with store.client() as client, store.client(transport="tcp", timeout_s=0.3) as hasty:
            keys = [f"key-{index}" for index in range(60)]
            for key in keys:
                client.put(key, value_of(key), replicas=2)
            assert bytes(client.get(keys[0])) == value_of(keys[0])
            assert bytes(hasty.get(keys[0])) == value_of(keys[0])
            store.master.kill()
            assert bytes(client.get(keys[0])) == value_of(keys[0])
            assert bytes(hasty.get(keys[0])) == value_of(keys[0])
            with pytest.raises(StoreError, match="snowskin store master"):
                hasty.get(keys[1])
            store.master.start()
            store.master.wait_ready()
            assert client.exists_many(keys) == [True] * len(keys)
            for key in keys:
                assert bytes(client.get(key)) == value_of(key)
            assert len(client.info(keys[5]).nodes) == 2
    finally:
        store.close()


def test_a_node_that_falls_silent_is_passed_over(tmp_path):
    store = ProcessStore(NODES)
    try:
        with store.client(transport="tcp") as client:
            keys = [f"key-{index}" for index in range(20)]
            for key in keys:
                client.put(key, value_of(key), replicas=2)
            silent = client.info(keys[0]).nodes[0]
            store.nodes[silent].process.send_signal(signal.SIGSTOP)
            begin_s = time.monotonic()
            for key in keys:
                assert bytes(client.get(key)) == value_of(key)
            # Waited for once, not for each key.
            assert time.monotonic() - begin_s < len(keys) * SILENCE_S / 2
            assert client.put("written-meanwhile", value_of("x"), replicas=3).replicas >= 2
            store.nodes[silent].process.send_signal(signal.SIGCONT)
            for key in keys:
                assert bytes(client.get(key)) == value_of(key)
    finally:
        store.close()


def test_a_removal_that_a_silent_node_holds_up_is_not_taken_for_a_missing_key(tmp_path):
    store = ProcessStore(["node-0"])
    try:
        with store.client() as client, store.client(timeout_s=0.3) as hasty:
            client.put("key", value_of("key"))
            assert hasty.exists("key")
            store.nodes["node-0"].process.send_signal(signal.SIGSTOP)
            with pytest.raises(MasterUnreachable):
                hasty.remove("key")
            store.nodes["node-0"].process.send_signal(signal.SIGCONT)
            wait_until(lambda: client.put("key", b"other").status == "stored")
            client.remove("key")
            with pytest.raises(KeyMissing):
                client.remove("key")
    finally:
        store.close()
