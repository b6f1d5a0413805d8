"""Child processes that never outlive their parent.

A child's standard input is one end of a socket pair. Its configuration comes over it (so keys show
neither in ``ps`` nor in the environment), as do further messages in both directions. Its end is
the one way in which a child is told to stop, and the kernel gives that word even where the parent
was killed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from snowskin.transfer.wire import receive_exactly

_T = TypeVar("_T")
_LENGTH_BYTES = 4
_MESSAGE_LIMIT_BYTES = 1 << 20


class Child:
    """A running child process, as its parent holds it."""

    def __init__(
        self,
        module: str,
        config: msgspec.Struct,
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start ``python -m module`` and send it its configuration.

        The child has a session of its own: a Ctrl-C in the terminal reaches only the first
        process of all, which then ends the others in order.

        Args:
            environment: added to this process's own, which has precedence.

        Raises:
            OSError: the system starts no further process, or the child died at once.
        """
        self._link, theirs = socket.socketpair()
        self._lock = threading.Lock()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=theirs.fileno(),
                    pass_fds=pass_fds,
                    start_new_session=True,
                    env={**(environment or {}), **os.environ},
                )
            _send(self._link, config)
        except BaseException:
            self._link.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def hear(self, kind: type[_T], *, timeout_s: float) -> _T:
        """Its next message.

        Raises:
            OSError: it ended, or took too long.
        """
        self._link.settimeout(timeout_s)
        return msgspec.msgpack.decode(_receive(self._link), type=kind)

    def ask(self, kind: type[_T], *, timeout_s: float) -> _T:
        """Its answer to a question without words (see ``Parent.answer``), from any thread.

        Raises:
            OSError: it ended, or took too long.
        """
        with self._lock:
            self._link.settimeout(timeout_s)
            self._link.sendall(b"?")
            return self.hear(kind, timeout_s=timeout_s)

    def end(self) -> None:
        """Tell it to stop; it may take a moment to do so in order. Idempotent."""
        self._link.close()

    def kill(self) -> None:
        """Stop it at once."""
        self.end()
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit status, or None where it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, *, grace_s: float) -> None:
        """End it, by force after ``grace_s``, and wait until it has ended. Idempotent."""
        self.end()
        if self.wait(grace_s) is None:
            self._process.kill()
            self._process.wait()


class Parent:
    """The parent, as a child process sees it: whoever holds the other end of standard input."""

    def __init__(self) -> None:
        self._link = socket.socket(fileno=os.dup(0))

    def hear(self, kind: type[_T]) -> _T:
        """The next message; the configuration comes first."""
        return msgspec.msgpack.decode(_receive(self._link), type=kind)

    def say(self, message: msgspec.Struct) -> None:
        """Send a message."""
        _send(self._link, message)

    def answer(self, make: Callable[[], msgspec.Struct]) -> None:
        """Answer each question, until the parent is gone or wants an end."""
        try:
            while self._link.recv(1):
                self.say(make())
        except OSError:
            return

    def watch(self, stop: Callable[[], object], *, grace_s: float) -> None:
        """Call ``stop`` when the parent is gone or wants an end; exit by force after ``grace_s``.

        Waits on a thread of its own and returns at once.
        """

        def wait_for_end() -> None:
            while self._link.recv(1):
                pass
            force = threading.Timer(grace_s, os._exit, args=(1,))
            force.daemon = True
            force.start()
            stop()

        threading.Thread(target=wait_for_end, name="parent", daemon=True).start()


def _send(link: socket.socket, message: msgspec.Struct) -> None:
    packed = msgspec.msgpack.encode(message)
    link.sendall(len(packed).to_bytes(_LENGTH_BYTES, "little") + packed)


def _receive(link: socket.socket) -> bytes:
    length_bytes = int.from_bytes(receive_exactly(link, _LENGTH_BYTES), "little")
    if length_bytes > _MESSAGE_LIMIT_BYTES:
        raise OSError(f"a message of {length_bytes} bytes is over the limit")
    return receive_exactly(link, length_bytes)
