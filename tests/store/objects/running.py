"""A store under test: a master and nodes, in this process or in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from snowskin.store import StoreClient
from snowskin.store.objects.master import Master, MasterConfig
from snowskin.store.objects.node import NodeConfig, StoreNode

MIB = 1 << 20
START_TIMEOUT_S = 30.0


def content(size_bytes, seed=0):
    """Bytes that differ by seed, and from place to place."""
    block = (seed * 2654435761 % (1 << 32)).to_bytes(4, "little") * 16
    numbered = b"".join(index.to_bytes(8, "little") + block for index in range(64))
    return (numbered * (size_bytes // len(numbered) + 1))[:size_bytes]


def wait_until(is_so, timeout_s=START_TIMEOUT_S):
    """Wait for something that must come about."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.005)


class LocalStore:
    """Master and nodes on threads of this process, real sockets between them."""

    def __init__(self, *, key=b"", **master_options):
        options = {"port": 0, "recovery_s": 0.0, "cluster_key": key} | master_options
        self.key = key
        self.master = Master(MasterConfig(**options))
        self.address = "{}:{}".format(*self.master.address)
        self._thread = threading.Thread(target=self.master.run)
        self._thread.start()
        self.nodes = {}
        self._clients = []

    def node(self, name="node-0", *, dram_bytes=32 * MIB, **options):
        host, port = self.master.address
        config = NodeConfig(
            master_host=host,
            master_port=port,
            name=name,
            dram_bytes=dram_bytes,
            cluster_key=self.key,
            **options,
        )
        started = self.nodes[name] = StoreNode(config)
        started.start()
        assert started.link.joined.wait(START_TIMEOUT_S)
        return started

    def client(self, **options):
        made = StoreClient(self.address, cluster_key=self.key, **options)
        self._clients.append(made)
        return made

    def close(self):
        for client in self._clients:
            client.close()
        for node in self.nodes.values():
            node.stop()
        self.master.stop()
        self._thread.join()


class Process:
    """One process of the command line."""

    def __init__(self, *arguments):
        self.arguments = arguments
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "snowskin", "store", *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait_ready(self):
        line = self.process.stdout.readline()
        assert "snowskin store" in line, "it did not start"
        return line

    @property
    def pid(self):
        return self.process.pid

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def end(self, number=signal.SIGTERM, timeout_s=20):
        self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        self.process.stdout.close()
        return status


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ProcessStore:
    """Master and nodes as a user starts them; each can be killed and started again."""

    def __init__(self, nodes, *, dram="32MiB", node_options=(), master_options=()):
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.master = Process("master", "--port", str(port), *master_options)
        self.nodes = {
            name: Process(
                "node", "--master", self.address, "--name", name, "--dram", dram, *node_options
            )
            for name in nodes
        }
        try:
            self.master.wait_ready()
            for node in self.nodes.values():
                node.wait_ready()
            with self.client() as client:
                wait_until(lambda: len(client.stat().nodes) == len(nodes))
        except BaseException:
            self.close()
            raise

    def client(self, **options):
        return StoreClient(self.address, **options)

    def close(self):
        for process in (*self.nodes.values(), self.master):
            if process.process.poll() is None:
                process.kill()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
