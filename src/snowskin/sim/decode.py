"""Continuous batching on a decode node in closed form: only joins and completions are events.

Between two changes of the batch, step k (from 0) of b sequences with C tokens of context takes
``d0 + d1·b + d2·(C + b·k)``, so K steps take ``K(d0 + d1·b + d2·C) + d2·b·K(K−1)/2``. Sequences
join and leave between steps, first come first served.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Generic, TypeVar

import numpy as np

from snowskin.cost.costs import DecodeCost
from snowskin.trace.records import Floats

J = TypeVar("J")

ON_TIME_S = 1e-9
"""Whoever comes so little after a step began still joins it: far below any step, far above the
error of adding times up."""


class Sequence(Generic[J]):
    """One request's stay in a batch. Steps are counted over the node's life."""

    __slots__ = (
        "end_step",
        "finished_s",
        "first_step",
        "job",
        "joined_s",
        "prompt_tokens",
        "reserved_tokens",
        "stalled_s",
        "step_count",
    )

    def __init__(
        self, job: J, *, prompt_tokens: int, step_count: int, reserved_tokens: int
    ) -> None:
        assert step_count >= 1, "a request whose first token is its last needs no decode"
        self.job = job
        self.prompt_tokens = prompt_tokens
        self.step_count = step_count
        self.reserved_tokens = reserved_tokens
        self.first_step = 0
        self.end_step = 0
        self.joined_s = math.nan
        self.stalled_s = 0.0
        """Part of its first step's duration that was over before it joined (see ``stall``)."""
        self.finished_s = math.nan


class DecodeBatch(Generic[J]):
    """The running batch of one decode node and the line before it.

    Args:
        sequence_limit: most sequences in the batch.
        token_limit: most tokens of KV in device memory. A sequence reserves its whole possible
            length when it joins, so that none is ever thrown out again.
    """

    def __init__(self, cost: DecodeCost, *, sequence_limit: int, token_limit: int) -> None:
        self._base_s = cost.base_s
        self._sequence_s = cost.sequence_s
        self._context_token_s = cost.context_token_s
        self.sequence_limit = sequence_limit
        self.token_limit = token_limit
        self._boundary_s = 0.0
        """The last step boundary that the state below is of."""
        self._step = 0
        self._context_tokens = 0
        self._reserved_tokens = 0
        self._running: list[tuple[int, int, Sequence[J]]] = []
        self._waiting: deque[Sequence[J]] = deque()
        self._serial = 0
        self._history: list[tuple[int, float, float]] = []
        self._stall_s = 0.0
        self.busy_s = 0.0
        """Time spent in steps."""

    @property
    def step_count(self) -> int:
        """Steps so far."""
        return self._step

    @property
    def running_count(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Sequences that have not joined yet."""
        return len(self._waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens of KV over the batch, at the last change of the batch."""
        return self._context_tokens

    def context_at(self, now_s: float) -> int:
        """Tokens of KV over the batch at a time since then, before any further change."""
        steps = (now_s - self._boundary_s) / self._first_step_s() if self._running else 0.0
        return self._context_tokens + int(steps) * len(self._running)

    @property
    def reserved_tokens(self) -> int:
        """Tokens of device memory that the batch may grow to."""
        return self._reserved_tokens

    def sequences(self) -> list[Sequence[J]]:
        """Everyone here, first those in the batch, each part in order of coming."""
        running = sorted(self._running, key=lambda entry: entry[1])
        return [entry[2] for entry in running] + list(self._waiting)

    def add(self, sequence: Sequence[J]) -> None:
        """Stand in line; joins at the next step boundary that has room (see ``next_s``)."""
        assert sequence.reserved_tokens <= self.token_limit, "can never fit the device"
        self._waiting.append(sequence)

    def next_s(self, now_s: float) -> float | None:
        """When ``advance`` is due: a completion, or a boundary at which one in line joins."""
        if not self._running:
            return now_s if self._waiting else None
        steps = self._running[0][0] - self._step
        if self._waiting and self._has_room(self._waiting[0]):
            steps = min(steps, self._steps_until(now_s))
        return max(now_s, self._boundary_s + self._duration_s(steps))

    def advance(self, now_s: float) -> tuple[list[Sequence[J]], list[Sequence[J]]]:
        """At a boundary (as ``next_s`` told it): who has finished, and who has joined."""
        if self._running:
            self._move_to(now_s)
        else:
            self._boundary_s = now_s
        finished: list[Sequence[J]] = []
        while self._running and self._running[0][0] <= self._step:
            sequence = heapq.heappop(self._running)[2]
            sequence.finished_s = self._boundary_s
            self._context_tokens -= sequence.prompt_tokens + 1 + sequence.step_count
            self._reserved_tokens -= sequence.reserved_tokens
            finished.append(sequence)
        joined: list[Sequence[J]] = []
        while self._waiting and self._has_room(self._waiting[0]):
            sequence = self._waiting.popleft()
            sequence.joined_s = self._boundary_s
            sequence.first_step = self._step
            sequence.stalled_s = self._stall_s
            sequence.end_step = self._step + sequence.step_count
            self._context_tokens += sequence.prompt_tokens + 1
            self._reserved_tokens += sequence.reserved_tokens
            self._serial += 1
            heapq.heappush(self._running, (sequence.end_step, self._serial, sequence))
            joined.append(sequence)
        return finished, joined

    def boundary_s(self, now_s: float) -> float:
        """The first step boundary that is not before ``now_s``, at most at a completion."""
        if not self._running:
            return now_s
        steps = min(self._steps_until(now_s), self._running[0][0] - self._step)
        return max(now_s, self._boundary_s + self._duration_s(steps))

    def stall(self, seconds: float) -> None:
        """From the boundary that was last reached, no step begins for so long.

        The next step's duration counts from here: to the sequences it is one long interval.
        """
        self._boundary_s += seconds
        if self._running:
            self._stall_s += seconds

    def step_once(self, step_s: float) -> None:
        """From the boundary that was last reached, take one step of a given duration."""
        assert self._running, "a step of nobody"
        self._record(1, step_s, 0.0)
        self._boundary_s += step_s
        self.busy_s += step_s
        self._step += 1
        self._context_tokens += len(self._running)

    def step_s(self) -> float:
        """Duration of the next step, if the batch stays as it is."""
        return self._first_step_s()

    def step_durations(self) -> Floats:
        """The duration in seconds of every step so far; index = step."""
        if not self._history:
            return np.empty(0)
        counts = np.array([entry[0] for entry in self._history])
        first_s = np.array([entry[1] for entry in self._history])
        growth_s = np.array([entry[2] for entry in self._history])
        begins = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(begins, counts)
        return np.asarray(np.repeat(first_s, counts) + np.repeat(growth_s, counts) * within)

    def _has_room(self, sequence: Sequence[J]) -> bool:
        return (
            len(self._running) < self.sequence_limit
            and self._reserved_tokens + sequence.reserved_tokens <= self.token_limit
        )

    def _first_step_s(self) -> float:
        """As ``DecodeCost.step_s`` has it."""
        sequences_s = self._sequence_s * len(self._running)
        return self._base_s + sequences_s + self._context_token_s * self._context_tokens

    def _duration_s(self, steps: int) -> float:
        growth_s = self._context_token_s * len(self._running)
        return steps * self._first_step_s() + growth_s * (steps * (steps - 1) / 2)

    def _steps_until(self, now_s: float) -> int:
        """Steps to the first boundary that is not before ``now_s``."""
        left_s = now_s - self._boundary_s - ON_TIME_S
        if left_s <= 0:
            return 0
        half_growth_s = self._context_token_s * len(self._running) / 2
        linear_s = self._first_step_s() - half_growth_s
        root = math.sqrt(linear_s * linear_s + 4.0 * half_growth_s * left_s)
        steps = math.ceil(2.0 * left_s / (linear_s + root))
        while self._duration_s(steps) < left_s:
            steps += 1
        while steps > 0 and self._duration_s(steps - 1) >= left_s:
            steps -= 1
        return steps

    def _move_to(self, now_s: float) -> None:
        steps = min(self._steps_until(now_s), self._running[0][0] - self._step)
        if not steps:
            return
        duration_s = self._duration_s(steps)
        growth_s = self._context_token_s * len(self._running)
        self._record(steps, self._first_step_s(), growth_s)
        self._boundary_s += duration_s
        self.busy_s += duration_s
        self._step += steps
        self._context_tokens += steps * len(self._running)

    def _record(self, steps: int, first_s: float, growth_s: float) -> None:
        if self._stall_s:
            self._history.append((1, first_s + self._stall_s, 0.0))
            self._stall_s = 0.0
            steps -= 1
            first_s += growth_s
        if steps:
            self._history.append((steps, first_s, growth_s))
