"""Run one simulation: a trace and a configuration in, records and a summary out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from snowskin.measure.records import RequestRecord
from snowskin.sim.config import WorldConfig
from snowskin.sim.laws import Laws
from snowskin.sim.outcome import request_records, summary_of
from snowskin.sim.timeline import Timeline
from snowskin.sim.world import World
from snowskin.trace.records import Trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished simulation."""

    summary: dict[str, Any]
    """Flat; units end the names (see ``outcome.DEFINITIONS``)."""
    records: list[RequestRecord]
    """One for each request, in order of arrival."""
    timeline: Timeline | None
    events: int
    """Events that the calendar called."""


def simulate(
    trace: Trace,
    config: WorldConfig,
    *,
    check: bool = False,
    samples: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Play a trace on a simulated cluster. The same arguments give the same outcome.

    Args:
        check: test every law after each event; slow.
        samples: take about so many samples over time (0: none).
        on_progress: called now and then with the count of requests that have arrived.
    """
    world = World(trace, config, on_progress=on_progress)
    timeline = None
    if samples:
        span_s = float(trace.arrival_s[-1])
        timeline = Timeline(world, interval_s=max(span_s / samples, 1e-3))
    laws = Laws(world) if check else None
    with without_collector():
        events = world.run(laws.check if laws else None)
        if laws is not None:
            laws.check_end()
        records = request_records(world.jobs, from_decode=config.first_token_from_decode)
        return Outcome(summary_of(world, records), records, timeline, events)


@contextmanager
def without_collector() -> Iterator[None]:
    """For work whose objects are in no cycle: to look for some among millions of them is vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
