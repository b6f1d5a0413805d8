"""Open-source Mooncake beside us, where a Python environment has it.

It runs in its own interpreter with its own libraries: a child process, told what to do in lines.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec

from snowskin.store.bench.lanes import Round
from snowskin.terms.errors import InvalidInput

SCRIPT = Path(__file__).with_name("peer_script.py")


class Peer:
    """Mooncake's master, a node and a client over TCP on this host.

    Args:
        python: the interpreter of an environment in which ``mooncake`` can be imported.

    Raises:
        InvalidInput: it cannot, or its processes do not start.
    """

    def __init__(self, python: str) -> None:
        try:
            self._process = subprocess.Popen(
                [python, str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
        except OSError as error:
            raise InvalidInput(
                f"cannot run {python!r}: {error}", parameter="peer-python"
            ) from error
        answer = self._hear()
        if answer != "ready":
            self.stop()
            raise InvalidInput(
                f"{python} cannot run Mooncake: {answer or 'it ended at once'}",
                parameter="peer-python",
            )

    def fill(self, size_bytes: int, count: int) -> None:
        """Store objects."""
        self._do("fill", size_bytes, count)

    def empty(self, size_bytes: int, count: int) -> None:
        """Remove them again."""
        self._do("empty", size_bytes, count)

    def get_round(self, size_bytes: int, count: int, start: int, round_s: float) -> Round:
        """Read objects in turn into registered memory, for so long; it times itself."""
        answer = self._ask("get", size_bytes, count, start, round_s)
        if not answer.startswith("{"):
            raise InvalidInput(f"Mooncake failed: {answer}", parameter="peer-python")
        return msgspec.json.decode(answer, type=Round)

    def stop(self) -> None:
        """End its processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _do(self, *words: object) -> None:
        answer = self._ask(*words)
        if answer != "done":
            raise InvalidInput(f"Mooncake failed at {words}: {answer}", parameter="peer-python")

    def _ask(self, *words: object) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        return self._hear()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
