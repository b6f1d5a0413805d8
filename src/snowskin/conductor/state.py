"""What the Conductor remembers: nodes with their predicted loads, and requests in flight."""

from __future__ import annotations

from enum import IntEnum

from snowskin.conductor.decode_choice import DecodeView
from snowskin.conductor.prediction import Correction
from snowskin.terms.commands import Decision
from snowskin.terms.events import NodeJoined, RequestArrived
from snowskin.terms.ids import NodeId, Role


class Stage(IntEnum):
    """How far a request is; it only ever grows, but for a new placement."""

    QUEUED = 0
    PREFILLING = 1
    PREFILLED = 2
    """The first token is out, and its client may have it."""
    DECODING = 3


class Node:
    """What both kinds of node have: a name, limits and an outgoing link."""

    __slots__ = ("egress_bytes", "joined", "link", "node")

    role: Role

    def __init__(self, joined: NodeJoined, *, link: Correction) -> None:
        self.node: NodeId = joined.node
        self.joined = joined
        self.egress_bytes = 0
        """Bytes of fetches that others are reading from here."""
        self.link = link

    def send(self, transfer_bytes: int) -> None:
        """A peer starts to fetch from here."""
        self.egress_bytes += transfer_bytes

    def sent(self, transfer_bytes: int) -> None:
        """A peer's fetch from here is over."""
        self.egress_bytes -= transfer_bytes


class PrefillNode(Node):
    """A prefill node's queue, in predicted seconds of work.

    The queue is served in order. Work that runs shrinks by a second a second, and never below
    nothing: a prefill that takes longer than predicted is expected to end any moment.
    """

    __slots__ = ("_queued_s", "_running_s", "compute", "queued", "running", "since_s")

    role = Role.PREFILL

    def __init__(self, joined: NodeJoined, *, link: Correction, compute: Correction) -> None:
        super().__init__(joined, link=link)
        self.compute = compute
        self.queued = 0
        self.running = 0
        self._queued_s = 0.0
        self._running_s = 0.0
        self.since_s = 0.0
        """When the running work was last settled."""

    def is_full(self) -> bool:
        """Whether the node has as many requests as it said it would queue."""
        return self.queued + self.running >= self.joined.sequence_limit

    def mean_turn_s(self, now_s: float) -> float:
        """Predicted seconds that each of those here has to wait for the next to be done."""
        return self.queue_s(now_s) / max(1, self.queued + self.running)

    def queue_s(self, now_s: float) -> float:
        """Predicted seconds until a request that came now could start."""
        if not self.running:
            return self._queued_s
        left_s = self._running_s - (now_s - self.since_s)
        return self._queued_s + left_s if left_s > 0 else self._queued_s

    def enqueue(self, prefill_s: float) -> None:
        """A request with so much predicted work waits here."""
        self.queued += 1
        self._queued_s += prefill_s

    def dequeue(self, prefill_s: float) -> None:
        """A request leaves the queue; ``prefill_s`` is what it was enqueued with."""
        self.queued -= 1
        # An empty queue is exactly nothing: sums of floats would otherwise drift.
        self._queued_s = max(0.0, self._queued_s - prefill_s) if self.queued else 0.0

    def start(self, prefill_s: float, now_s: float) -> None:
        """Work of so many predicted seconds runs from now on."""
        self._settle(now_s)
        self.running += 1
        self._running_s += prefill_s

    def stop(self, prefill_s: float, now_s: float) -> None:
        """Running work ended, or was given up; what it had left is off the queue."""
        self._settle(now_s)
        self.running -= 1
        self._running_s = max(0.0, self._running_s - prefill_s) if self.running else 0.0

    def _settle(self, now_s: float) -> None:
        self._running_s = max(0.0, self._running_s - (now_s - self.since_s))
        self.since_s = now_s


class DecodeNode(Node):
    """A decode node's load: what was placed on it, and of that what it has the KV of."""

    __slots__ = (
        "_grown_tokens",
        "_view_placed",
        "compute",
        "placed",
        "placed_tokens",
        "present",
        "present_tokens",
    )

    role = Role.DECODE

    def __init__(self, joined: NodeJoined, *, link: Correction, compute: Correction) -> None:
        super().__init__(joined, link=link)
        self.compute = compute
        self.placed = 0
        self.placed_tokens = 0
        self.present = 0
        self.present_tokens = 0
        self._grown_tokens = 0
        self._view_placed: DecodeView | None = None

    def place(self, prompt_tokens: int) -> None:
        """A request will decode here."""
        self._view_placed = None
        self.placed += 1
        self.placed_tokens += prompt_tokens

    def land(self, prompt_tokens: int) -> None:
        """A placed request's KV is here."""
        self.present += 1
        self.present_tokens += prompt_tokens

    def leave(self, prompt_tokens: int, *, landed: bool, output_tokens: int = 0) -> None:
        """A placed request is gone, and with it what it had generated."""
        self._view_placed = None
        self.placed -= 1
        self.placed_tokens -= prompt_tokens
        if landed:
            self.present -= 1
            self.present_tokens -= prompt_tokens
        self._grown_tokens = max(0, self._grown_tokens - output_tokens) if self.present else 0

    def report(self, context_tokens: int) -> None:
        """The node's own count of running tokens; what exceeds the prompts was generated.

        A report may be older than the last request's end, so without one it says nothing.
        """
        self._view_placed = None
        self._grown_tokens = max(0, context_tokens - self.present_tokens) if self.present else 0

    def observe_step(self, *, real_s: float, predicted_s: float) -> None:
        """Learn how long a decode step really takes here."""
        self._view_placed = None
        self.compute.observe(real_s=real_s, predicted_s=predicted_s)

    def view_placed(self) -> DecodeView:
        """The load with every request that was placed here."""
        view = self._view_placed
        if view is None:
            view = self._view_placed = self._view(self.placed, self.placed_tokens)
        return view

    def view_present(self) -> DecodeView:
        """The load with those requests alone whose KV is here."""
        return self._view(self.present, self.present_tokens)

    def _view(self, sequences: int, prompt_tokens: int) -> DecodeView:
        return DecodeView(
            self.node,
            sequences,
            prompt_tokens + self._grown_tokens,
            self.joined.sequence_limit,
            self.joined.device_tokens,
            self.compute.ratio,
        )


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
        self.stage = Stage.QUEUED
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
