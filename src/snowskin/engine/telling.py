"""Tells a user what a long piece of work is at: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

INTERVAL_S = 15.0
"""A log gets a line so often, so that nobody takes long work for a hang."""


@contextlib.contextmanager
def telling(console: Console, *, interval_s: float = INTERVAL_S) -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is being done from now on."""
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("")
            yield lambda text: progress.update(task, description=text)
        return
    lines = _Lines(console, interval_s)
    try:
        yield lines.say
    finally:
        lines.end()


class _Lines:
    """A line for each piece of work, and further ones while it lasts."""

    def __init__(self, console: Console, interval_s: float) -> None:
        self._console = console
        self._interval_s = interval_s
        self._text = ""
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="telling", daemon=True)
        self._ticker.start()

    def say(self, text: str) -> None:
        self._text = text
        self._print(text)

    def end(self) -> None:
        self._over.set()
        self._ticker.join()

    def _tick(self) -> None:
        while not self._over.wait(self._interval_s):
            self._print(f"{self._text}: {time.monotonic() - self._began_s:.0f} s so far")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
