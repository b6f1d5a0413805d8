"""A running ``snowskin serve`` under test, and the command line as a user calls it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

START_S = 120.0
END_S = 20.0


class Server:
    """A running ``snowskin serve``."""

    def __init__(self, model_dir: Path, cache: Path, log: Path, *options: str) -> None:
        self.log = log
        self.environment = {**os.environ, "SNOWSKIN_CACHE": str(cache)}
        command = [sys.executable, "-m", "snowskin", "serve", "--model", str(model_dir)]
        command += ["--dtype", "fp32", "--threads", "1", "--port", "0", "--dram", "16MiB", *options]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=self.environment, start_new_session=True
            )
        self.url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            ready = re.search(r"ready: \S+ on (http://\S+)/v1", self.log.read_text())
            if ready:
                return ready[1]
            time.sleep(0.1)
        raise AssertionError(f"not ready:\n{self.log.read_text()}")

    def family(self) -> set[int]:
        """The server's process and all its descendants."""
        return family_of(self.process.pid)

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/snowskin/status").json())

    def node(self, name: str) -> dict[str, Any]:
        return next(node for node in self.status()["nodes"] if node["node"] == name)

    def snowskin(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return snowskin(*arguments, environment=self.environment | {"SNOWSKIN_URL": self.url})


def family_of(pid: int) -> set[int]:
    """A process and all its descendants."""
    found, untold = set(), {pid}
    while untold:
        pid = untold.pop()
        found.add(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            untold |= {int(child) for child in children.read_text().split()} - found
    return found


def snowskin(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "snowskin", *arguments],
        capture_output=True,
        text=True,
        timeout=START_S,
        env=environment or dict(os.environ),
        check=False,
    )


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    running = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":
            running.add(pid)
    return running


def wait_until_gone(pids: set[int]) -> None:
    deadline_s = time.monotonic() + END_S
    while alive(pids):
        assert time.monotonic() < deadline_s, f"still running: {alive(pids)}"
        time.sleep(0.05)
