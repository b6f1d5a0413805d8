"""Runs the pure Conductor against real time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from snowskin.terms.commands import Command
from snowskin.terms.events import Event, TimePassed


class Machine(Protocol):
    """The Conductor's two verbs, with or without a journal."""

    def handle(self, event: Event, *, now_s: float) -> tuple[Command, ...]:
        """See ``Conductor.handle``."""

    def next_wakeup_s(self) -> float | None:
        """See ``Conductor.next_wakeup_s``."""


class ConductorDriver:
    """Tells the Conductor what happened and has its commands carried out, in order.

    ``execute`` may tell further events: they wait until the commands of the present one are done.

    Args:
        execute: carries out one command.
        clock: seconds, monotonic; the event loop's own clock, since timers are set by it.
    """

    def __init__(
        self,
        conductor: Machine,
        *,
        execute: Callable[[Command], None],
        clock: Callable[[], float],
    ) -> None:
        self._conductor = conductor
        self._execute = execute
        self._clock = clock
        self._waiting: deque[Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, event: Event) -> None:
        """Something has happened. All its commands have been carried out on return."""
        self._waiting.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                self._step(self._waiting.popleft())
        finally:
            self._busy = False
        self._set_timer()

    def close(self) -> None:
        """No more wake-ups."""
        if self._timer is not None:
            self._timer.cancel()

    def _step(self, event: Event) -> None:
        for command in self._conductor.handle(event, now_s=self._clock()):
            self._execute(command)

    def _set_timer(self) -> None:
        wakeup_s = self._conductor.next_wakeup_s()
        if self._timer is not None:
            if self._timer.when() == wakeup_s and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if wakeup_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(wakeup_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.tell(TimePassed())
