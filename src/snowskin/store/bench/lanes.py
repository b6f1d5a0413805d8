"""What is measured beside what: lanes in turn, round by round, in one run.

A *lane* is one way to move bytes. Lanes of one comparison run in turn, A B A B …, so that whatever
else happens on the machine hits all of them alike; only ratios within a run mean something.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

Act = Callable[[int], int]
"""Do it once; the argument counts up, the result is bytes (or calls) done."""


class Round(msgspec.Struct, frozen=True):
    """One round of one client."""

    units: int
    wall_s: float
    call_s: list[float]


class Lane(msgspec.Struct, frozen=True):
    """One way.

    Attributes:
        open: makes an ``Act`` for one of the clients, told its number.
        prepare, settle: called before and after each round, untimed.
    """

    name: str
    open: Callable[[int], Act] = lambda number: _no_act
    prepare: Callable[[], object] = lambda: None
    settle: Callable[[], object] = lambda: None
    elsewhere: Callable[[int, float], Round] | None = None
    """Instead of ``open``: another process runs a round, told the number of its first call and
    how long to go on, and times its calls itself."""


def _no_act(index: int) -> int:
    raise AssertionError(f"call {index} of a lane that runs elsewhere")


class Measured(msgspec.Struct, frozen=True):
    """What a lane did: units (bytes, or calls) a second over all clients, and time per call."""

    units_per_s: float
    p50_s: float
    p99_s: float
    calls: int


class _Record:
    def __init__(self) -> None:
        self.units = 0
        self.wall_s = 0.0
        self.call_s: list[float] = []


def measure(
    lanes: Sequence[Lane], *, clients: int, rounds: int, round_s: float, least_calls: int
) -> dict[str, Measured]:
    """Run lanes in turn.

    Args:
        clients: threads that each lane runs at once.
        round_s: how long a lane runs in each round.
        least_calls: of each client in each round, however long they take.
    """
    acts = {
        lane.name: [lane.open(number) for number in range(clients)]
        for lane in lanes
        if lane.elsewhere is None
    }
    records = {lane.name: _Record() for lane in lanes}
    done = dict.fromkeys(records, 0)
    for number in range(rounds + 1):
        for lane in lanes:
            # The first round warms caches and connections, and is not counted.
            record = records[lane.name] if number else _Record()
            start = done[lane.name]
            lane.prepare()
            if lane.elsewhere is not None:
                done[lane.name] += _add(record, lane.elsewhere(start, round_s))
            else:
                done[lane.name] += _run(acts[lane.name], record, start, round_s, least_calls)
            lane.settle()
    return {name: _summary(record) for name, record in records.items()}


def _run(acts: Sequence[Act], record: _Record, start: int, round_s: float, least_calls: int) -> int:
    """One round of one lane; the calls of the client that made most."""
    lock = threading.Lock()
    failures: list[BaseException] = []
    most = [0]
    begin_s = time.perf_counter()
    deadline_s = begin_s + round_s

    def work(act: Act) -> None:
        times: list[float] = []
        units, at = 0, start
        try:
            now_s = time.perf_counter()
            while now_s < deadline_s or at - start < least_calls:
                units += act(at)
                at += 1
                end_s = time.perf_counter()
                times.append(end_s - now_s)
                now_s = end_s
        except BaseException as error:
            failures.append(error)
        with lock:
            record.units += units
            record.call_s += times
            most[0] = max(most[0], at - start)

    if len(acts) == 1:
        work(acts[0])
    else:
        threads = [threading.Thread(target=work, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    record.wall_s += time.perf_counter() - begin_s
    return most[0]


def _add(record: _Record, done: Round) -> int:
    record.units += done.units
    record.wall_s += done.wall_s
    record.call_s += done.call_s
    return len(done.call_s)


def _summary(record: _Record) -> Measured:
    ordered = sorted(record.call_s)
    count = len(ordered)
    return Measured(
        units_per_s=record.units / record.wall_s,
        p50_s=ordered[count // 2],
        p99_s=ordered[min(count - 1, count * 99 // 100)],
        calls=count,
    )
