"""Carries out the Conductor's commands on nodes, and turns the nodes' words into its events.

Decides nothing: where a request goes is the Conductor's command, and what follows a node's word
is laid down by the journey of one request (ARCHITECTURE.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

from snowskin.cluster import messages as m
from snowskin.cluster.flight import Flight
from snowskin.cluster.ledger import Ledger
from snowskin.terms.commands import (
    Command,
    EndLease,
    FailRequest,
    Fetch,
    GrantLease,
    HoldRequest,
    RejectCause,
    RejectRequest,
    StartPrefill,
)
from snowskin.terms.errors import NodeUnavailable, Overloaded, RequestFailed, SnowskinError
from snowskin.terms.events import (
    DecodeStarted,
    Event,
    FetchFinished,
    KvLanded,
    Outcome,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestFinished,
)
from snowskin.terms.ids import NodeId, RequestId
from snowskin.terms.serving import RequestState
from snowskin.transfer.messenger import Peer

_OUTCOMES = {
    RequestState.COMPLETED: Outcome.COMPLETED,
    RequestState.CANCELLED: Outcome.CANCELLED,
    RequestState.FAILED: Outcome.FAILED,
}

LOSS_GRACE_S = 5.0
"""A node that fails to hand over KV is known to be lost after so long, if it is."""


class Dispatch:
    """All requests in flight, and what is to be said about them to whom.

    Args:
        send: hands a message to a node; a node that is gone is noticed elsewhere.
        tell: tells the Conductor an event.
        peer_of: a ready node's Messenger, None while the node is not ready.
        clock: seconds, monotonic.
        later: calls a function after so many seconds.
    """

    def __init__(
        self,
        *,
        send: Callable[[NodeId, m.ToNode], None],
        tell: Callable[[Event], None],
        peer_of: Callable[[NodeId], Peer | None],
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
        ledger: Ledger,
    ) -> None:
        self._send = send
        self._tell = tell
        self._peer_of = peer_of
        self._clock = clock
        self._later = later
        self._ledger = ledger
        self._flights: dict[RequestId, Flight] = {}
        self._by_wire_id: dict[RequestId, Flight] = {}

    @property
    def in_flight(self) -> int:
        """Requests that hold something. Bounded by the Conductor's admission."""
        return len(self._flights)

    def flight(self, request: RequestId) -> Flight | None:
        """A request in flight."""
        return self._flights.get(request)

    def flights(self) -> tuple[Flight, ...]:
        """All requests in flight."""
        return tuple(self._flights.values())

    # --- from the API ----------------------------------------------------------------------

    def launch(self, flight: Flight) -> None:
        """A request has arrived. The Conductor's verdict has been carried out on return."""
        assert flight.id not in self._flights, f"{flight.id} is in flight already"
        self._flights[flight.id] = flight
        request = flight.request
        self._tell(
            RequestArrived(
                request=request.request,
                prompt_tokens=len(request.tokens),
                keys=request.keys,
                output_limit_tokens=request.output_limit_tokens,
            )
        )

    def finish(self, flight: Flight, state: RequestState) -> None:
        """The client is gone, or has all that it wants: free what its request holds."""
        self._recall(flight)
        self._finish(flight, state)

    # --- from the Conductor ----------------------------------------------------------------

    def execute(self, command: Command) -> None:
        """Carry out one command."""
        match command:
            case StartPrefill():
                self._place(command)
            case RejectRequest():
                self._reject(command)
            case FailRequest(request=request, reason=reason):
                flight = self._flights[request]
                self._recall(flight)
                self._leave(flight, RequestState.FAILED, RequestFailed(reason))
            case HoldRequest(request=request, decision=decision):
                flight = self._flights[request]
                self._recall(flight)
                flight.wait(decision)
            case GrantLease(node=node, request=request, keys=keys, duration_s=duration_s):
                self._send(node, m.LeaseBlocks(owner=request, keys=keys, duration_s=duration_s))
            case EndLease(node=node, request=request):
                self._send(node, m.DropLease(owner=request))
            case _:
                assert_never(command)

    def _place(self, command: StartPrefill) -> None:
        flight = self._flights[command.request]
        if flight.placements:
            self._recall(flight)
        flight.place(command.decision, command.prefill, command.decode)
        self._by_wire_id[flight.wire_id] = flight
        fetch = None if command.fetch is None else self._order(command.fetch)
        if fetch is not None:
            flight.fetched_from = fetch.peer.node
        self._send(command.prefill, m.QueuePrefill(job=flight.job(), fetch=fetch))

    def _order(self, fetch: Fetch) -> m.FetchOrder | None:
        peer = self._peer_of(fetch.source)
        return None if peer is None else m.FetchOrder(peer=peer, blocks=fetch.blocks)

    def _reject(self, command: RejectRequest) -> None:
        flight = self._flights[command.request]
        if flight.placements:
            self._recall(flight)
        flight.decision = command.decision
        error: SnowskinError
        if command.cause is RejectCause.NO_NODE:
            error = NodeUnavailable(command.reason)
        else:
            error = Overloaded(command.reason, retry_after_s=command.retry_after_s)
        self._ledger.count_rejection(command.cause)
        self._leave(flight, RequestState.REJECTED, error)

    # --- from the nodes --------------------------------------------------------------------

    def hear(self, node: NodeId, message: m.AboutRequest) -> None:
        """A node's word about a request. Words about an ended placement change nothing."""
        if isinstance(message, m.TokensOut):
            for out in message.tokens:
                self._token(out)
            return
        if isinstance(message, m.FetchDone):
            self._fetched(message)
            return
        flight = self._by_wire_id.get(message.request)
        if flight is None:
            return
        match message:
            case m.PrefillAnnounced():
                self._prefill_began(flight, node, message)
            case m.FirstTokenOut():
                self._first_token(flight, node, message)
            case m.KvArrived():
                self._kv_arrived(flight, node, message)
            case m.BatchJoined():
                self._tell(DecodeStarted(request=flight.id, node=node))
            case m.JobFailed():
                self._job_failed(flight, node, message)
            case _:
                assert_never(message)

    def fail(self, flight: Flight, reason: str) -> None:
        """End a request with an error, and free what it holds everywhere."""
        self._recall(flight)
        self._finish(flight, RequestState.FAILED, RequestFailed(reason))

    def _job_failed(self, flight: Flight, node: NodeId, message: m.JobFailed) -> None:
        if node == flight.decode and not flight.kv_arrived:
            self._ledger.count_failed_stream()
        reason = f"{node}: {message.reason}"
        if message.peer_failed and not flight.token_times_s:
            # Most likely its prefill node is dying, and the word of that places it anew.
            self._later(LOSS_GRACE_S, partial(self._fail_placement, flight.wire_id, reason))
        else:
            self.fail(flight, reason)

    def _fail_placement(self, wire_id: RequestId, reason: str) -> None:
        flight = self._by_wire_id.get(wire_id)
        if flight is not None:
            self.fail(flight, reason)

    def _prefill_began(self, flight: Flight, node: NodeId, message: m.PrefillAnnounced) -> None:
        flight.started_s = self._clock()
        flight.cached_tokens = message.reused_tokens
        flight.state = RequestState.PREFILLING
        self._tell(
            PrefillStarted(request=flight.id, node=node, reused_tokens=message.reused_tokens)
        )
        peer = self._peer_of(node)
        if flight.request.output_limit_tokens > 1 and peer is not None:
            assert flight.decode is not None
            pull = m.PullKv(job=flight.job(), peer=peer, blocks=message.blocks)
            self._send(flight.decode, pull)

    def _first_token(self, flight: Flight, node: NodeId, message: m.FirstTokenOut) -> None:
        flight.prefill_s = message.prefill_s
        flight.first = message.first
        flight.state = RequestState.DECODING
        flight.add_token(message.first, message.finish_reason, now_s=self._clock())
        self._tell(PrefillFinished(request=flight.id, node=node, prefill_s=message.work_s))
        if message.finish_reason is not None:
            self._recall(flight)
            self._finish(flight, RequestState.COMPLETED)
        elif flight.kv_arrived:
            self._start_decode(flight)

    def _kv_arrived(self, flight: Flight, node: NodeId, message: m.KvArrived) -> None:
        flight.kv_arrived = True
        flight.kv_bytes = message.kv_bytes
        flight.kv_transfer_s = message.transfer_s
        self._ledger.count_stream(kv_bytes=message.kv_bytes, transfer_s=message.transfer_s)
        self._tell(
            KvLanded(
                request=flight.id,
                node=node,
                kv_bytes=message.kv_bytes,
                transfer_s=message.transfer_s,
            )
        )
        if flight.first is not None:
            self._start_decode(flight)

    def _start_decode(self, flight: Flight) -> None:
        assert flight.first is not None
        assert flight.prefill is not None
        assert flight.decode is not None
        self._send(flight.prefill, m.ReleasePrefill(request=flight.wire_id))
        self._send(flight.decode, m.StartDecode(request=flight.wire_id, first=flight.first))

    def _token(self, out: m.TokenOut) -> None:
        flight = self._by_wire_id.get(out.request)
        if flight is None:
            return
        flight.add_token(out.token, out.finish_reason, now_s=self._clock())
        if out.finish_reason is not None:
            self._finish(flight, RequestState.COMPLETED)

    def _fetched(self, message: m.FetchDone) -> None:
        fetch = message.fetch
        self._ledger.count_fetch(fetch, asked_blocks=message.asked_blocks)
        flight = self._by_wire_id.get(fetch.request)
        if flight is None:
            return
        flight.fetched_blocks = fetch.fetched_blocks
        flight.fetch_s = fetch.transfer_s
        self._tell(
            FetchFinished(
                request=flight.id,
                node=fetch.node,
                source=fetch.source,
                fetched_blocks=fetch.fetched_blocks,
                kv_bytes=fetch.kv_bytes,
                transfer_s=fetch.transfer_s,
            )
        )

    # --- the end ---------------------------------------------------------------------------

    def _recall(self, flight: Flight) -> None:
        """Have its nodes drop the present placement."""
        for node in (flight.prefill, flight.decode):
            if node is not None:
                self._send(node, m.CancelJob(request=flight.wire_id))
        self._by_wire_id.pop(flight.wire_id, None)

    def _finish(
        self, flight: Flight, state: RequestState, failure: SnowskinError | None = None
    ) -> None:
        """The end of a request that the Conductor does not know of yet."""
        self._leave(flight, state, failure)
        self._tell(
            RequestFinished(
                request=flight.id,
                outcome=_OUTCOMES[state],
                output_tokens=len(flight.token_times_s),
            )
        )

    def _leave(
        self, flight: Flight, state: RequestState, failure: SnowskinError | None = None
    ) -> None:
        self._flights.pop(flight.id)
        self._by_wire_id.pop(flight.wire_id, None)
        flight.end(state, failure, now_s=self._clock())
        self._ledger.close(flight)
