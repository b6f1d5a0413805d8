"""Child processes that never outlive their parent.

A child inherits the read ends of two pipes. One brings its configuration (so keys show neither
in ``ps`` nor in the environment). The other is the lifeline: it stays open as long as the parent
lives and wants the child to. Its end is the one way in which a child is told to stop, and the
kernel gives that word even where the parent was killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

MAX_CONFIG_BYTES = 32 * 1024
"""Fits a pipe's buffer, so writing it never waits for the child."""


YIELDING_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Environment under which OpenMP threads sleep while they wait for each other.

By default they spin; nodes that share cores then keep each other from the very work that is
waited for (measured: a prefill pass of 512 tokens took 4 s instead of 1.2 s)."""


class Child:
    """A running child process."""

    def __init__(self, module: str, config: bytes) -> None:
        """Start ``python -m module``.

        The child has a session of its own: a Ctrl-C in the terminal reaches only the parent,
        which then ends the children in order.
        """
        assert len(config) <= MAX_CONFIG_BYTES, f"configuration of {len(config)} B"
        config_read, config_write = os.pipe()
        lifeline_read, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(config_read), str(lifeline_read)],
                pass_fds=(config_read, lifeline_read),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**YIELDING_THREADS, **os.environ},
            )
            os.write(config_write, config)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            for fd in (config_read, config_write, lifeline_read):
                os.close(fd)
        self._open = True

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def end(self) -> None:
        """Tell the child to stop; it may take a moment to do so in order."""
        if self._open:
            self._open = False
            os.close(self._lifeline)

    def kill(self) -> None:
        """Stop the child at once."""
        self.end()
        self.process.kill()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit status, or None where it still runs after ``timeout_s``."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


def read_config(fd: int) -> bytes:
    """The configuration that the parent wrote, all of it."""
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read()


def watch_lifeline(fd: int, stop: Callable[[], object], *, grace_s: float) -> None:
    """Call ``stop`` when the parent is gone or wants an end; exit by force after ``grace_s``."""

    def wait_for_end() -> None:
        while os.read(fd, 1):
            pass
        force = threading.Timer(grace_s, os._exit, args=(1,))
        force.daemon = True
        force.start()
        stop()

    threading.Thread(target=wait_for_end, name="lifeline", daemon=True).start()
