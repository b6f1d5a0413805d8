"""Flows of bytes between nodes, with contention at each node's network ports.

Every node has one port out and one port in, of a given rate. A port divides its rate among its
flows by max-min fairness: each gets what it asks for (its cap), and who asks for more than an
equal share shares what the others leave. A flow runs at the lower of the rates that its two ports
give it; what one port grants and the other cannot carry is not handed on to others. So rates are
never above the true max-min rates, and a change touches the flows of two ports only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from snowskin.sim.calendar import Calendar, Rank
from snowskin.terms.ids import NodeId


class Flow:
    """Bytes on their way from one node to another."""

    __slots__ = (
        "about",
        "cap_bytes_per_s",
        "destination",
        "left_bytes",
        "on_done",
        "over",
        "rate_bytes_per_s",
        "sent",
        "source",
        "total_bytes",
        "turn",
        "updated_s",
    )

    def __init__(
        self,
        source: Port,
        destination: Port,
        total_bytes: float,
        on_done: Callable[[Any], None],
        about: Any,
    ) -> None:
        self.source = source
        self.destination = destination
        self.total_bytes = total_bytes
        self.left_bytes = total_bytes
        self.on_done = on_done
        self.about = about
        self.cap_bytes_per_s = math.inf
        self.rate_bytes_per_s = 0.0
        self.updated_s = 0.0
        self.sent = False
        """Whether its last byte has left."""
        self.over = False
        """Whether that byte has arrived, or the flow was cancelled."""
        self.turn = 0
        """Counts changes of rate, so that the calendar's older entries are known as stale."""


class Port:
    """One direction of one node's network."""

    __slots__ = ("flows", "rate_bytes_per_s")

    def __init__(self, rate_bytes_per_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.flows: dict[Flow, None] = {}

    def level_bytes_per_s(self) -> float:
        """The most that one flow gets here; flows that ask for less get what they ask for."""
        left = self.rate_bytes_per_s
        count = len(self.flows)
        if count <= 1:
            return left
        for cap in sorted([flow.cap_bytes_per_s for flow in self.flows]):
            share = left / count
            if cap >= share:
                return share
            left -= cap
            count -= 1
        return self.rate_bytes_per_s


class Network:
    """All ports and flows."""

    def __init__(self, calendar: Calendar, *, latency_s: float, rate_bytes_per_s: float) -> None:
        self._calendar = calendar
        self._latency_s = latency_s
        self._rate_bytes_per_s = rate_bytes_per_s
        self._out: dict[NodeId, Port] = {}
        self._in: dict[NodeId, Port] = {}
        self.moved_bytes = 0.0
        """Bytes that arrived, those of flows that were cancelled midway included."""
        self.flow_count = 0
        """Flows that were ever begun; ``active_count`` of them are not over."""
        self.active_count = 0

    def join(self, node: NodeId) -> None:
        """Give a node its two ports, at full rate."""
        self._out[node] = Port(self._rate_bytes_per_s)
        self._in[node] = Port(self._rate_bytes_per_s)

    def ports(self, node: NodeId) -> tuple[Port, Port]:
        """A node's port out and port in."""
        return self._out[node], self._in[node]

    def set_rate(self, node: NodeId, factor: float) -> None:
        """From now on the node's ports run at ``factor`` of the full rate."""
        for port in (self._out[node], self._in[node]):
            port.rate_bytes_per_s = self._rate_bytes_per_s * factor
            self._rebalance(port.flows)

    def start(
        self,
        source: NodeId,
        destination: NodeId,
        total_bytes: float,
        *,
        on_done: Callable[[Any], None],
        about: Any,
        cap_bytes_per_s: float = math.inf,
    ) -> Flow:
        """Begin to move bytes; ``on_done(about)`` is called when the last has arrived.

        Args:
            cap_bytes_per_s: the flow never asks for more (its bytes are made at this rate).
        """
        flow = Flow(self._out[source], self._in[destination], total_bytes, on_done, about)
        flow.cap_bytes_per_s = cap_bytes_per_s
        flow.updated_s = self._calendar.now_s
        flow.source.flows[flow] = None
        flow.destination.flows[flow] = None
        self.flow_count += 1
        self.active_count += 1
        self._rebalance_around(flow)
        return flow

    def uncap(self, flow: Flow) -> None:
        """All bytes of the flow exist now: it asks for all that it can get."""
        if not flow.sent and flow.cap_bytes_per_s != math.inf:
            self._settle(flow)
            flow.cap_bytes_per_s = math.inf
            self._rebalance_around(flow)

    def cancel(self, flow: Flow) -> None:
        """Stop a flow; its ``on_done`` is never called."""
        if not flow.sent:
            self._settle(flow)
            self._leave_ports(flow)
        if not flow.over:
            flow.over = True
            self.active_count -= 1

    def _leave_ports(self, flow: Flow) -> None:
        flow.sent = True
        self.moved_bytes += flow.total_bytes - flow.left_bytes
        del flow.source.flows[flow]
        del flow.destination.flows[flow]
        self._rebalance_around(flow)

    def _rebalance_around(self, flow: Flow) -> None:
        source, destination = flow.source.flows, flow.destination.flows
        if not source:
            flows = destination
        elif not destination or (len(source) == len(destination) == 1 and flow in source):
            flows = source
        else:
            flows = {**source, **destination}
        self._rebalance(flows)

    def _rebalance(self, flows: dict[Flow, None]) -> None:
        """Give flows their rates, after a change at a port of each."""
        levels: dict[Port, float] = {}
        for flow in flows:
            rate = flow.cap_bytes_per_s
            for port in (flow.source, flow.destination):
                level = levels.get(port)
                if level is None:
                    level = levels[port] = port.level_bytes_per_s()
                rate = min(rate, level)
            if rate != flow.rate_bytes_per_s:
                self._settle(flow)
                flow.rate_bytes_per_s = rate
                flow.turn += 1
                self._expect(flow)

    def _settle(self, flow: Flow) -> None:
        now_s = self._calendar.now_s
        sent = flow.rate_bytes_per_s * (now_s - flow.updated_s)
        flow.left_bytes = max(0.0, flow.left_bytes - sent)
        flow.updated_s = now_s

    def _expect(self, flow: Flow) -> None:
        if flow.rate_bytes_per_s <= 0:
            return
        due_s = flow.updated_s + flow.left_bytes / flow.rate_bytes_per_s
        self._calendar.at(due_s, Rank.TRANSFER, self._send_last, (flow, flow.turn))

    def _send_last(self, entry: tuple[Flow, int]) -> None:
        """The last byte has left; it arrives after the latency, when the ports serve others."""
        flow, turn = entry
        if flow.sent or turn != flow.turn:
            return
        flow.left_bytes = 0.0
        self._leave_ports(flow)
        arrives_s = self._calendar.now_s + self._latency_s
        self._calendar.at(arrives_s, Rank.TRANSFER, self._arrive, flow)

    def _arrive(self, flow: Flow) -> None:
        if not flow.over:
            flow.over = True
            self.active_count -= 1
            flow.on_done(flow.about)
