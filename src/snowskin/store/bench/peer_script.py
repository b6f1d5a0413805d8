"""Runs in the peer's interpreter: Mooncake's master, an owner of memory, and a client over TCP.

Reads lines (``fill SIZE COUNT``, ``get SIZE COUNT START SECONDS``, ``empty SIZE COUNT``), answers
each with one. It imports nothing of Snowskin, which the peer's environment need not have.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SEGMENT_BYTES = 2 << 30
BUFFER_BYTES = 128 << 20
START_TRIES = 100
LEAST_CALLS = 4


def free_port() -> int:
    """A port that nobody listens on."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_master(port: int) -> subprocess.Popen[bytes]:
    """Mooncake's master, beside this interpreter."""
    program = Path(sys.executable).with_name("mooncake_master")
    metrics = free_port()
    return subprocess.Popen(
        [
            str(program),
            f"--port={port}",
            f"--metrics_port={metrics}",
            "--default_kv_lease_ttl=1000",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def connect(port: int, segment_bytes: int) -> Any:
    """A client that lends so much memory."""
    mooncake = importlib.import_module("mooncake.store")
    for _ in range(START_TRIES):
        store = mooncake.MooncakeDistributedStore()
        status = store.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", f"127.0.0.1:{port}"
        )
        if status == 0:
            return store
        time.sleep(0.1)
    raise RuntimeError("Mooncake's client does not reach its master")


def own(port: int) -> None:
    """The process that lends memory, until standard input ends."""
    store = connect(port, SEGMENT_BYTES)
    print("owning", flush=True)
    sys.stdin.read()
    store.close()
    os._exit(0)


class Client:
    """A client without memory of its own, so that all it reads comes over TCP."""

    def __init__(self, port: int) -> None:
        self.store = connect(port, 0)
        self.buffer = (ctypes.c_char * BUFFER_BYTES)()
        self.at = ctypes.addressof(self.buffer)
        if self.store.register_buffer(self.at, BUFFER_BYTES) != 0:
            raise RuntimeError("Mooncake does not register the buffer")

    def fill(self, size: int, count: int) -> str:
        """Store objects."""
        for index in range(count):
            if self.store.put_from(f"{size}/{index}", self.at, size) != 0:
                return f"put {index} failed"
        return "done"

    def empty(self, size: int, count: int) -> str:
        """Remove them, when their leases have ended."""
        time.sleep(1.2)
        for index in range(count):
            self.store.remove(f"{size}/{index}")
        return "done"

    def get(self, size: int, count: int, start: int, seconds: float) -> str:
        """Read objects in turn, for so long."""
        calls: list[float] = []
        begin = now = time.perf_counter()
        at = start
        while now - begin < seconds or len(calls) < LEAST_CALLS:
            got = self.store.get_into(f"{size}/{at % count}", self.at, size)
            if got != size:
                return f"get gave {got} instead of {size}"
            end = time.perf_counter()
            calls.append(end - now)
            now = end
            at += 1
        return json.dumps({"units": size * len(calls), "wall_s": now - begin, "call_s": calls})


def main() -> None:
    """Start everything, then obey."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Mooncake logs to standard output.
    if len(sys.argv) > 1:
        own(int(sys.argv[1]))
    port = free_port()
    master = start_master(port)
    owner = None
    try:
        owner = subprocess.Popen(
            [sys.executable, __file__, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert owner.stdout is not None
        if owner.stdout.readline().strip() != b"owning":
            raise RuntimeError("Mooncake's owner did not start")
        client = Client(port)
        print("ready", flush=True)
        for line in sys.stdin:
            verb, size, count, *rest = line.split()
            if verb == "get":
                answer = client.get(int(size), int(count), int(rest[0]), float(rest[1]))
            else:
                act = client.fill if verb == "fill" else client.empty
                answer = act(int(size), int(count))
            print(answer, flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        if owner is not None:
            owner.kill()
            owner.wait()
        master.kill()
        master.wait()
        os._exit(0)


if __name__ == "__main__":
    main()
