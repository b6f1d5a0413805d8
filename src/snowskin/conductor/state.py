"""What the Conductor remembers: nodes with their predicted loads, and requests in flight."""

from __future__ import annotations

from math import inf
from typing import Final

from snowskin.conductor.decode_choice import DecodeView
from snowskin.conductor.prediction import Correction
from snowskin.cost.costs import LinkCost
from snowskin.terms.commands import Decision
from snowskin.terms.events import IncomingTraffic, NodeJoined, RequestArrived
from snowskin.terms.ids import NodeId


class Stage:
    """How far a request is; it only ever grows, but for a new placement. Plain numbers."""

    QUEUED: Final = 0
    PREFILLING: Final = 1
    PREFILLED: Final = 2
    """The first token is out, and its client may have it."""
    DECODING: Final = 3


class Node:
    """What both kinds of node have: a name, limits and an outgoing link."""

    __slots__ = ("_told_bytes", "egress_bytes", "joined", "link", "measured", "node")

    def __init__(self, joined: NodeJoined, *, link: Correction) -> None:
        self.node: NodeId = joined.node
        self.joined = joined
        self.egress_bytes = 0
        """Bytes of fetches that others are reading from here."""
        self._told_bytes: dict[NodeId, int] = {}
        """By the peer that reported them."""
        self.measured: dict[NodeId, LinkCost] = {}
        """The link to each peer that has measured it of late."""
        self.link = link

    @property
    def busy_bytes(self) -> int:
        """Bytes on their way from here: by our own count of fetches, or by the peers' last word.

        The peers see all that they read, the KV that follows a prefill included, but their word
        is half a second old; our count knows of fetches alone, at once. The greater is the truer.
        """
        if not self._told_bytes:
            return self.egress_bytes
        return max(self.egress_bytes, sum(self._told_bytes.values()))

    def hear_traffic(self, reporter: NodeId, traffic: IncomingTraffic, predicted: LinkCost) -> None:
        """A peer says how much it still waits for from here, and how fast it comes."""
        if traffic.bytes_in_flight > 0:
            self._told_bytes[reporter] = traffic.bytes_in_flight
        if traffic.bytes_per_s is not None and 0 < traffic.bytes_per_s < inf:
            latency_s = predicted.latency_s if traffic.latency_s is None else traffic.latency_s
            self.measured[reporter] = LinkCost(latency_s, traffic.bytes_per_s)

    def forget_traffic(self, reporter: NodeId) -> None:
        """What a peer said is old, or the peer is gone."""
        self._told_bytes.pop(reporter, None)
        self.measured.pop(reporter, None)

    def send(self, transfer_bytes: int) -> None:
        """A peer starts to fetch from here."""
        self.egress_bytes += transfer_bytes

    def sent(self, transfer_bytes: int) -> None:
        """A peer's fetch from here is over."""
        self.egress_bytes -= transfer_bytes


class PrefillColumns:
    """What a choice reads of the prefill nodes, a row for each, in the order of their joining."""

    __slots__ = ("corrections", "free_places", "nodes", "queued_s", "running_s", "since_s")

    def __init__(self, count: int) -> None:
        self.nodes: list[NodeId] = [NodeId("")] * count
        self.queued_s = [0.0] * count
        self.running_s = [0.0] * count
        self.since_s = [0.0] * count
        self.corrections = [1.0] * count
        self.free_places = [0] * count


class PrefillNode(Node):
    """A prefill node's queue, in predicted seconds of work.

    The queue is served in order. Work that runs shrinks by a second a second, and never below
    nothing: a prefill that takes longer than predicted is expected to end any moment.
    """

    __slots__ = (
        "_columns",
        "_row",
        "compute",
        "queued",
        "queued_s",
        "running",
        "running_s",
        "since_s",
    )

    def __init__(self, joined: NodeJoined, *, link: Correction, compute: Correction) -> None:
        super().__init__(joined, link=link)
        self.compute = compute
        self.queued = 0
        self.running = 0
        self.queued_s = 0.0
        self.running_s = 0.0
        """Nothing if nothing runs."""
        self.since_s = 0.0
        """When the running work was last settled."""
        self.show_in(PrefillColumns(1), 0)

    def show_in(self, columns: PrefillColumns, row: int) -> None:
        """From now on this row of these columns follows the node."""
        self._columns, self._row = columns, row
        columns.nodes[row] = self.node
        columns.corrections[row] = self.compute.ratio
        self._show()

    def is_full(self) -> bool:
        """Whether the node has as many requests as it said it would queue."""
        return self.queued + self.running >= self.joined.sequence_limit

    def mean_turn_s(self, now_s: float) -> float:
        """Predicted seconds that each of those here has to wait for the next to be done."""
        return self.queue_s(now_s) / max(1, self.queued + self.running)

    def queue_s(self, now_s: float) -> float:
        """Predicted seconds until a request that came now could start."""
        left_s = self.running_s - (now_s - self.since_s)
        return self.queued_s + left_s if left_s > 0 else self.queued_s

    def enqueue(self, prefill_s: float) -> None:
        """A request with so much predicted work waits here."""
        self.queued += 1
        self.queued_s += prefill_s
        self._show()

    def dequeue(self, prefill_s: float) -> None:
        """A request leaves the queue; ``prefill_s`` is what it was enqueued with."""
        self.queued -= 1
        # An empty queue is exactly nothing: sums of floats would otherwise drift.
        self.queued_s = max(0.0, self.queued_s - prefill_s) if self.queued else 0.0
        self._show()

    def start(self, prefill_s: float, now_s: float) -> None:
        """Work of so many predicted seconds runs from now on."""
        self._settle(now_s)
        self.running += 1
        self.running_s += prefill_s
        self._show()

    def stop(self, prefill_s: float, now_s: float) -> None:
        """Running work ended, or was given up; what it had left is off the queue."""
        self._settle(now_s)
        self.running -= 1
        self.running_s = max(0.0, self.running_s - prefill_s) if self.running else 0.0
        self._show()

    def observe_prefill(self, *, real_s: float, predicted_s: float) -> None:
        """Learn how long a prefill really takes here."""
        self.compute.observe(real_s=real_s, predicted_s=predicted_s)
        self._columns.corrections[self._row] = self.compute.ratio

    def _settle(self, now_s: float) -> None:
        self.running_s = max(0.0, self.running_s - (now_s - self.since_s))
        self.since_s = now_s

    def _show(self) -> None:
        columns, row = self._columns, self._row
        columns.queued_s[row] = self.queued_s
        columns.running_s[row] = self.running_s
        columns.since_s[row] = self.since_s
        columns.free_places[row] = self.joined.sequence_limit - self.queued - self.running


class DecodeColumns:
    """What a choice reads of the decode nodes, a row for each, in the order of their joining."""

    __slots__ = (
        "context_tokens", "corrections", "device_tokens", "nodes", "reserved_tokens",
        "sequence_limits", "sequences",
    )  # fmt: skip

    def __init__(self, count: int) -> None:
        self.nodes: list[NodeId] = [NodeId("")] * count
        self.sequences = [0] * count
        self.context_tokens = [0] * count
        self.reserved_tokens = [0] * count
        self.sequence_limits = [0] * count
        self.device_tokens = [0] * count
        self.corrections = [1.0] * count


class DecodeNode(Node):
    """A decode node's load: what was placed on it, and of that what it has the KV of.

    Reserved tokens are prompts and output limits together, which the node's engine sets aside on
    its device when a request joins (``engine.batching.DecodeBatch``).
    """

    __slots__ = (
        "_columns",
        "_grown_tokens",
        "_row",
        "compute",
        "placed",
        "placed_reserved_tokens",
        "placed_tokens",
        "present",
        "present_reserved_tokens",
        "present_tokens",
    )

    def __init__(self, joined: NodeJoined, *, link: Correction, compute: Correction) -> None:
        super().__init__(joined, link=link)
        self.compute = compute
        self.placed = 0
        self.placed_tokens = 0
        self.placed_reserved_tokens = 0
        self.present = 0
        self.present_tokens = 0
        self.present_reserved_tokens = 0
        self._grown_tokens = 0
        self.show_in(DecodeColumns(1), 0)

    def show_in(self, columns: DecodeColumns, row: int) -> None:
        """From now on this row of these columns follows the node."""
        self._columns, self._row = columns, row
        columns.nodes[row] = self.node
        columns.sequence_limits[row] = self.joined.sequence_limit
        columns.device_tokens[row] = self.joined.device_tokens
        columns.corrections[row] = self.compute.ratio
        self._show()

    def place(self, arrived: RequestArrived) -> None:
        """A request will decode here."""
        self.placed += 1
        self.placed_tokens += arrived.prompt_tokens
        self.placed_reserved_tokens += arrived.prompt_tokens + arrived.output_limit_tokens
        self._show()

    def land(self, arrived: RequestArrived) -> None:
        """A placed request's KV is here."""
        self.present += 1
        self.present_tokens += arrived.prompt_tokens
        self.present_reserved_tokens += arrived.prompt_tokens + arrived.output_limit_tokens

    def leave(self, arrived: RequestArrived, *, landed: bool, output_tokens: int = 0) -> None:
        """A placed request is gone, and with it what it had generated."""
        prompt_tokens = arrived.prompt_tokens
        reserved_tokens = prompt_tokens + arrived.output_limit_tokens
        self.placed -= 1
        self.placed_tokens -= prompt_tokens
        self.placed_reserved_tokens -= reserved_tokens
        if landed:
            self.present -= 1
            self.present_tokens -= prompt_tokens
            self.present_reserved_tokens -= reserved_tokens
        self._grown_tokens = max(0, self._grown_tokens - output_tokens) if self.present else 0
        self._show()

    def report(self, context_tokens: int) -> None:
        """The node's own count of running tokens; what exceeds the prompts was generated.

        A report may be older than the last request's end, so without one it says nothing.
        """
        self._grown_tokens = max(0, context_tokens - self.present_tokens) if self.present else 0
        self._show()

    def observe_step(self, *, real_s: float, predicted_s: float) -> None:
        """Learn how long a decode step really takes here."""
        self.compute.observe(real_s=real_s, predicted_s=predicted_s)
        self._columns.corrections[self._row] = self.compute.ratio

    def view_present(self) -> DecodeView:
        """The load with those requests alone whose KV is here."""
        return DecodeView(
            self.node,
            self.present,
            self.present_tokens + self._grown_tokens,
            self.present_reserved_tokens,
            self.joined.sequence_limit,
            self.joined.device_tokens,
            self.compute.ratio,
        )

    def _show(self) -> None:
        columns, row = self._columns, self._row
        columns.sequences[row] = self.placed
        columns.context_tokens[row] = self.placed_tokens + self._grown_tokens
        columns.reserved_tokens[row] = self.placed_reserved_tokens


class OpenFetch:
    """A prefix on its way from a peer to a request's prefill node."""

    __slots__ = ("expected_s", "source", "transfer_bytes")

    def __init__(self, source: NodeId, transfer_bytes: int, expected_s: float) -> None:
        self.source = source
        self.transfer_bytes = transfer_bytes
        self.expected_s = expected_s
        """Predicted before correction."""


class Flight:
    """A request in flight: where it was placed, and what it counts for there."""

    __slots__ = (
        "arrived",
        "decision",
        "decode",
        "decode_start_s",
        "fetch",
        "landed",
        "number",
        "placements",
        "prefill",
        "reused_tokens",
        "stage",
        "work_s",
    )

    def __init__(self, arrived: RequestArrived, number: int) -> None:
        self.arrived = arrived
        self.number = number
        self.placements = 0
        self.stage: int = Stage.QUEUED
        self.landed = False
        self.fetch: OpenFetch | None = None
        self.reused_tokens = 0

    # Set by each placement, and by nothing before the first.
    prefill: NodeId
    decode: NodeId
    decision: Decision
    work_s: float
    decode_start_s: float

    def needs(self, node: NodeId) -> bool:
        """Whether the request cannot go on without this node."""
        if self.decode == node:
            return True
        return self.prefill == node and (self.stage < Stage.PREFILLED or not self.landed)
