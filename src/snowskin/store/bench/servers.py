"""A master and a node in processes of their own, as a user starts them, for a benchmark."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from snowskin.store.objects.errors import StoreRefused

STOP_S = 10.0


@contextlib.contextmanager
def running_store(dram_bytes: int) -> Iterator[str]:
    """The address of a master with one node of so much memory; both end afterwards.

    Raises:
        StoreRefused: they did not start; their own words are on standard error.
    """
    with contextlib.ExitStack() as stack:
        line = _start(stack, "master", "--port", "0", "--recovery", "0")
        master = line.rsplit(" ", 1)[-1]
        _start(
            stack, "node", "--master", master, "--dram", str(dram_bytes), "--log-level", "warning"
        )
        yield master


def _start(stack: contextlib.ExitStack, *arguments: str) -> str:
    """Start a process that ends with the stack; its first line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "snowskin", "store", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    stack.callback(_end, process)
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise StoreRefused(f"`snowskin store {arguments[0]}` did not start; see its message above")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
