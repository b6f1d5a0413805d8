"""The Conductor's laws, recounted from scratch. Run after every event in tests and ``--check``."""

from __future__ import annotations

from collections import Counter
from math import isclose

from snowskin.conductor.conductor import Conductor
from snowskin.conductor.state import Flight, Stage
from snowskin.terms.ids import NodeId


def check_laws(conductor: Conductor) -> None:
    """Every request is in one place, and every load is the sum of what causes it.

    Costs time in proportion to the requests in flight.

    Raises:
        AssertionError: a law is broken; the message says which, and where.
    """
    stat = conductor.stat()
    gone = stat.completed + stat.cancelled + stat.failed + stat.rejected
    _require(
        stat.arrived == gone + stat.in_flight,
        f"{stat.arrived} requests arrived, but {gone} are gone and {stat.in_flight} in flight",
    )
    limit = conductor.config.max_in_flight
    _require(stat.in_flight <= limit, f"{stat.in_flight} requests in flight, above {limit}")
    now_s = conductor.now_s
    _require(
        not conductor.waiting or conductor.ledger.fleet.obstacle(now_s) is not None,
        f"{len(conductor.waiting)} requests wait although there is a place",
    )
    flights = list(conductor.ledger.flights.values())
    _require(
        not any(flight.arrived.request in conductor.waiting for flight in flights),
        "a request waits and is placed",
    )
    _check_prefill(conductor, flights)
    _check_decode(conductor, flights)
    _check_links(conductor, flights)
    _require(
        len(conductor.ledger.forecast) == len(flights), "the forecast knows other requests than fly"
    )


def _check_prefill(conductor: Conductor, flights: list[Flight]) -> None:
    queued = Counter(f.prefill for f in flights if f.stage == Stage.QUEUED)
    running = Counter(f.prefill for f in flights if f.stage == Stage.PREFILLING)
    work_s: dict[NodeId, float] = {}
    for flight in flights:
        if flight.stage < Stage.PREFILLED:
            work_s[flight.prefill] = work_s.get(flight.prefill, 0.0) + flight.work_s
    nodes = conductor.ledger.fleet.prefill
    _require(set(queued) | set(running) <= set(nodes), "a request prefills on a node that is gone")
    for name, node in nodes.items():
        _require(
            (node.queued, node.running) == (queued[name], running[name]),
            f"{name} counts {node.queued} queued and {node.running} running requests, "
            f"but has {queued[name]} and {running[name]}",
        )
        _require(
            node.queued + node.running <= node.joined.sequence_limit, f"{name} queues too many"
        )
        most_s = work_s.get(name, 0.0)
        queue_s = node.queue_s(node.since_s)
        _require(
            0 <= queue_s <= most_s or isclose(queue_s, most_s, rel_tol=1e-9, abs_tol=1e-9),
            f"{name} has a queue of {queue_s} s, but only {most_s} s of work",
        )


def _check_decode(conductor: Conductor, flights: list[Flight]) -> None:
    nodes = conductor.ledger.fleet.decode
    _require({f.decode for f in flights} <= set(nodes), "a request decodes on a node that is gone")
    for name, node in nodes.items():
        placed = [f for f in flights if f.decode == name]
        present = [f for f in placed if f.landed]
        _require(
            (node.placed, node.placed_tokens, node.placed_reserved_tokens) == _load(placed),
            f"{name} counts {node.placed} placed requests, but has {len(placed)}",
        )
        _require(
            (node.present, node.present_tokens, node.present_reserved_tokens) == _load(present),
            f"{name} counts {node.present} present requests, but has {len(present)}",
        )


def _load(flights: list[Flight]) -> tuple[int, int, int]:
    prompt_tokens = sum(f.arrived.prompt_tokens for f in flights)
    limit_tokens = sum(f.arrived.output_limit_tokens for f in flights)
    return len(flights), prompt_tokens, prompt_tokens + limit_tokens


def _check_links(conductor: Conductor, flights: list[Flight]) -> None:
    fleet = conductor.ledger.fleet
    egress: Counter[NodeId] = Counter()
    for flight in flights:
        if flight.fetch is not None:
            egress[flight.fetch.source] += flight.fetch.transfer_bytes
    for node in [*fleet.prefill.values(), *fleet.decode.values()]:
        _require(
            node.egress_bytes == egress.pop(node.node, 0),
            f"{node.node} counts {node.egress_bytes} bytes in flight, other than its fetches",
        )
    _require(not egress, f"fetches are open from nodes that are gone: {sorted(egress)}")
    stat = conductor.directory.stat()
    _require(
        stat.leases <= sum(flight.fetch is not None for flight in flights),
        f"{stat.leases} leases, more than open fetches",
    )


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise AssertionError(complaint)
