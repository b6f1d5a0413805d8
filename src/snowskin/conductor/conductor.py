"""The Conductor: the global scheduler. A pure machine; two drivers carry out what it says.

It is told what has happened, and answers what shall be done. It keeps the directory of blocks, the
predicted load of every node, and each request in flight, and reads no clock and no true output
length.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from typing import Any, get_args

import msgspec

from snowskin.conductor.admission import ADMISSIONS, AdmissionQuestion, Refusal
from snowskin.conductor.config import ConductorConfig
from snowskin.conductor.decode_choice import DecodeChoice, choose_decode
from snowskin.conductor.ledger import Ledger
from snowskin.conductor.prefill_choice import POLICIES, PrefillChoice, PrefillQuestion
from snowskin.conductor.state import Flight, Stage
from snowskin.conductor.waiting import WaitingRoom
from snowskin.cost.profile import Profile
from snowskin.store.directory import Directory
from snowskin.terms.commands import (
    Command,
    Decision,
    FailRequest,
    HoldRequest,
    RejectCause,
    RejectRequest,
    StartPrefill,
)
from snowskin.terms.errors import InvalidInput
from snowskin.terms.events import (
    BlocksCommitted,
    BlocksEvicted,
    DecodeStarted,
    Event,
    FetchFinished,
    KvLanded,
    NodeJoined,
    NodeLost,
    NodeReported,
    Outcome,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestFinished,
    TimePassed,
)
from snowskin.terms.ids import NodeId, RequestId


class ConductorStat(msgspec.Struct, frozen=True):
    """Where every request that ever arrived has gone."""

    arrived: int
    completed: int
    cancelled: int
    failed: int
    rejected: int
    in_flight: int
    placed_again: int
    """Placements after the first, for requests whose node was lost."""
    stale_events: int
    """Events about requests or nodes that are not, or no longer, concerned."""


class Conductor:
    """The global scheduler of one cluster.

    A second ``StartPrefill`` for the same request takes the place of the first: the driver lets go
    of whatever the request still holds elsewhere. ``FailRequest`` and ``RejectRequest`` end a
    request here; a ``RequestFinished`` that follows is let pass.

    Args:
        rng: the only source of chance, for equals and for the random policy.
    """

    def __init__(self, config: ConductorConfig, profile: Profile, rng: random.Random) -> None:
        self.config = config
        self.profile = profile
        self.directory = Directory(replica_limit=config.replica_limit)
        self._rng = rng
        self._policy = POLICIES[config.policy]
        self._admission = ADMISSIONS[config.admission]
        self.ledger = Ledger(config, profile, self.directory)
        self.waiting = WaitingRoom(config.hold_s)
        self._now_s = -inf
        self._arrived = 0
        self._rejected = 0
        self._placed_again = 0
        self._stale_events = 0
        self._outcomes = dict.fromkeys(Outcome, 0)

    def handle(self, event: Event, *, now_s: float) -> tuple[Command, ...]:
        """Learn of one event, and say what shall be done about it.

        Raises:
            InvalidInput: the id of an arriving request is already in flight.
            AssertionError: time went back, which is the driver's mistake.
        """
        if now_s < self._now_s:
            raise AssertionError(f"time went back from {self._now_s} to {now_s}")
        self._now_s = now_s
        commands = _HANDLERS[type(event)](self, event)
        if self.waiting.flights:
            commands += self._serve_waiting()
        return commands

    @property
    def now_s(self) -> float:
        """The time of the last event."""
        return self._now_s

    def next_wakeup_s(self) -> float | None:
        """When ``TimePassed`` is due: a lease runs out, or a request has waited for too long."""
        lease_s = self.directory.next_wakeup_s()
        if not self.waiting.flights:
            return lease_s
        expiry_s = self.waiting.next_expiry_s()
        return expiry_s if lease_s is None or expiry_s is None else min(lease_s, expiry_s)

    def stat(self) -> ConductorStat:
        """A snapshot of the counters; arrived is always the sum of the next five."""
        return ConductorStat(
            arrived=self._arrived,
            completed=self._outcomes[Outcome.COMPLETED],
            cancelled=self._outcomes[Outcome.CANCELLED],
            failed=self._outcomes[Outcome.FAILED],
            rejected=self._rejected,
            in_flight=len(self.ledger.flights) + len(self.waiting),
            placed_again=self._placed_again,
            stale_events=self._stale_events,
        )

    def _tell_directory(
        self, event: BlocksCommitted | BlocksEvicted | TimePassed
    ) -> tuple[Command, ...]:
        return self.directory.handle(event, now_s=self._now_s)

    def _join(self, event: NodeJoined) -> tuple[Command, ...]:
        commands = self._lose(event.node) if event.node in self.ledger.fleet else ()
        self.directory.handle(event, now_s=self._now_s)
        self.ledger.fleet.join(event)
        return commands

    def _mourn(self, event: NodeLost) -> tuple[Command, ...]:
        return self._lose(event.node)

    def _arrive(self, event: RequestArrived) -> tuple[Command, ...]:
        if event.request in self.ledger.flights or event.request in self.waiting:
            raise InvalidInput(
                f"request {event.request!r} is already in flight", parameter="request"
            )
        number = self._arrived
        self._arrived += 1
        flight = Flight(event, number)
        obstacle = self.ledger.fleet.obstacle(self._now_s)
        if obstacle is not None:
            if obstacle.cause is not RejectCause.NO_NODE or not self.waiting.is_open(self._now_s):
                return self._turn_away(event.request, obstacle, None)
            if self.waiting.is_full():
                reason = f"{obstacle.reason}, and {len(self.waiting)} requests wait for it"
                obstacle = Refusal(RejectCause.PREFILL_FULL, reason, obstacle.room_in_s)
                return self._turn_away(event.request, obstacle, None)
        elif (failure := self._outgrows(flight)) is not None:
            return failure
        in_flight = len(self.ledger.flights) + len(self.waiting)
        if in_flight >= self.config.max_in_flight:
            refusal = Refusal(
                RejectCause.IN_FLIGHT,
                f"{in_flight} requests are in flight",
                self.ledger.next_leave_s(self._now_s),
            )
            return self._turn_away(event.request, refusal, None)
        if obstacle is not None:
            return self._hold(flight, obstacle)
        return self._place(flight, admit=True)

    def _outgrows(self, flight: Flight) -> tuple[Command, ...] | None:
        """The failure of a request that no decode node could ever hold; None if one could."""
        prompt_tokens = flight.arrived.prompt_tokens
        output_tokens = flight.arrived.output_limit_tokens
        if prompt_tokens + output_tokens <= self.ledger.fleet.widest_decode_tokens():
            return None
        self._outcomes[Outcome.FAILED] += 1
        reason = (
            f"no decode node's device memory holds {prompt_tokens} prompt + {output_tokens} "
            "output tokens"
        )
        return (FailRequest(flight.arrived.request, reason, ()),)

    def _hold(self, flight: Flight, obstacle: Refusal) -> tuple[Command, ...]:
        """Let a request wait for a place."""
        self.waiting.add(flight, self._now_s)
        reason = f"waits up to {self.config.hold_s:g} s, since {obstacle.reason}"
        decision = Decision(self.config.policy, reason, 0, (), (), inf, inf)
        return (HoldRequest(flight.arrived.request, decision),)

    def _serve_waiting(self) -> tuple[Command, ...]:
        """Place who waits, in order, as far as there is room; end who has waited for too long."""
        commands: tuple[Command, ...] = ()
        while (flight := self.waiting.first()) is not None:
            obstacle = self.ledger.fleet.obstacle(self._now_s)
            until_s = self.waiting.next_expiry_s()
            if obstacle is not None and until_s is not None and self._now_s < until_s:
                break
            self.waiting.remove(flight.arrived.request)
            if obstacle is not None:
                commands += self._dismiss(flight, obstacle)
            elif (failure := self._outgrows(flight)) is not None:
                commands += failure
            else:
                self._placed_again += flight.placements > 0
                commands += self._place(flight, admit=not flight.placements)
        return commands

    def _dismiss(self, flight: Flight, obstacle: Refusal) -> tuple[Command, ...]:
        """End a request that has waited in vain."""
        reason = f"waited {self.config.hold_s:g} s: {obstacle.reason}"
        if not flight.placements:
            refusal = Refusal(obstacle.cause, reason, obstacle.room_in_s)
            return self._turn_away(flight.arrived.request, refusal, None)
        self._outcomes[Outcome.FAILED] += 1
        return (FailRequest(flight.arrived.request, f"its node was lost, and it {reason}", ()),)

    def _place(self, flight: Flight, *, admit: bool) -> tuple[Command, ...]:
        """Choose the nodes for a request, and count it in there."""
        arrived = flight.arrived
        prefill, decode, best_blocks = self._choose(arrived)
        decision = Decision(
            policy=self.config.policy,
            reason=f"{prefill.reason}; {decode.reason}",
            best_prefix_blocks=best_blocks,
            prefill=prefill.candidates,
            decode=decode.candidates,
            ttft_s=prefill.chosen.ttft_s,
            tbt_s=decode.chosen.tbt_s,
        )
        check = self._admission.at_arrival
        if check is not None and admit:
            refusal = check(self._admission_question(arrived, decode.chosen.node, decision.ttft_s))
            if refusal is not None:
                return self._turn_away(arrived.request, refusal, decision)
        flight.decode = decode.chosen.node
        fetch, leases = self.ledger.enter(flight, prefill.chosen, decision, now_s=self._now_s)
        start = StartPrefill(arrived.request, flight.prefill, flight.decode, fetch, decision)
        return (*leases, start)

    def _choose(self, arrived: RequestArrived) -> tuple[PrefillChoice, DecodeChoice, int]:
        config, profile, rng = self.config, self.profile, self._rng
        # The last token is always computed: its logits are what the first output comes from.
        usable_blocks = min(len(arrived.keys), (arrived.prompt_tokens - 1) // config.block_tokens)
        prefixes = self.directory.longest_prefix(arrived.keys)
        source = self.ledger.fleet.best_source(prefixes, usable_blocks, rng)
        question = PrefillQuestion(
            arrived.prompt_tokens,
            config.block_tokens,
            profile.prefill,
            config.kvcache_balancing_threshold,
            source,
        )
        views = self.ledger.fleet.view_prefill(prefixes, usable_blocks, self._now_s)
        prefill = self._policy(question, views, rng)
        decode = choose_decode(arrived, self.ledger.fleet.view_decode(), profile.decode, rng)
        return prefill, decode, source.blocks if source else 0

    def _admission_question(
        self, arrived: RequestArrived, decode: NodeId, ttft_s: float
    ) -> AdmissionQuestion:
        return AdmissionQuestion(
            now_s=self._now_s,
            prompt_tokens=arrived.prompt_tokens,
            output_limit_tokens=arrived.output_limit_tokens,
            ttft_s=ttft_s,
            ttft_slo_s=self.config.ttft_slo_s,
            tbt_slo_s=self.config.tbt_slo_s,
            decode_now=self.ledger.fleet.decode[decode].view_present(),
            pool=self.ledger.fleet.view_decode(),
            cost=self.profile.decode,
            forecast=self.ledger.forecast,
            decode_s=self.ledger.decode_time.seconds,
        )

    def _turn_away(
        self, request: RequestId, refusal: Refusal, decision: Decision | None
    ) -> tuple[Command, ...]:
        self._rejected += 1
        if decision is None:
            decision = Decision(self.config.policy, refusal.reason, 0, (), (), inf, inf)
        else:
            decision = msgspec.structs.replace(decision, reason=refusal.reason)
        retry_after_s = min(max(refusal.room_in_s, 1.0), self.config.retry_limit_s)
        reject = RejectRequest(request, refusal.cause, refusal.reason, retry_after_s, decision)
        return (reject,)

    def _start_prefill(self, event: PrefillStarted) -> tuple[Command, ...]:
        flight = self._flight(event.request)
        if flight is None or flight.prefill != event.node or flight.stage != Stage.QUEUED:
            return self._ignore()
        self.ledger.start_prefill(flight, event.reused_tokens, now_s=self._now_s)
        return ()

    def _finish_prefill(self, event: PrefillFinished) -> tuple[Command, ...]:
        flight = self._flight(event.request)
        if flight is None or flight.prefill != event.node or flight.stage >= Stage.PREFILLED:
            return self._ignore()
        self.ledger.finish_prefill(flight, event.prefill_s, now_s=self._now_s)
        check = self._admission.after_prefill
        if check is None:
            return ()
        decision = flight.decision
        refusal = check(self._admission_question(flight.arrived, flight.decode, decision.ttft_s))
        if refusal is None:
            return ()
        ends = self.ledger.leave(flight, now_s=self._now_s)
        return (*ends, *self._turn_away(event.request, refusal, decision))

    def _land(self, event: KvLanded) -> tuple[Command, ...]:
        flight = self._flight(event.request)
        if flight is None or flight.decode != event.node or flight.landed:
            return self._ignore()
        self.ledger.land(flight)
        return ()

    def _start_decode(self, event: DecodeStarted) -> tuple[Command, ...]:
        flight = self._flight(event.request)
        if flight is None or flight.decode != event.node or flight.stage != Stage.PREFILLED:
            return self._ignore()
        self.ledger.start_decode(flight, now_s=self._now_s)
        return ()

    def _finish(self, event: RequestFinished) -> tuple[Command, ...]:
        flight = self._flight(event.request)
        if flight is None:
            if self.waiting.remove(event.request) is None:
                return self._ignore()
            self._outcomes[event.outcome] += 1
            return ()
        self._outcomes[event.outcome] += 1
        if event.outcome is Outcome.COMPLETED and flight.stage == Stage.DECODING:
            self.ledger.decode_time.observe(self._now_s - flight.decode_start_s)
        return self.ledger.leave(flight, now_s=self._now_s, output_tokens=event.output_tokens)

    def _finish_fetch(self, event: FetchFinished) -> tuple[Command, ...]:
        flight = self._flight(event.request)
        fetch = flight.fetch if flight is not None else None
        if (
            flight is None
            or fetch is None
            or fetch.source != event.source
            or flight.prefill != event.node
        ):
            return self._ignore()
        source = self.ledger.fleet.node(event.source)
        # A fetch that fell short says little of the link.
        if source is not None and event.kv_bytes == fetch.transfer_bytes:
            source.link.observe(real_s=event.transfer_s, predicted_s=fetch.expected_s)
        return self.ledger.close_fetch(flight, now_s=self._now_s)

    def _report(self, event: NodeReported) -> tuple[Command, ...]:
        if event.node not in self.ledger.fleet:
            return self._ignore()
        self.ledger.fleet.hear_traffic(event.node, event.incoming)
        node = self.ledger.fleet.decode.get(event.node)
        if node is None:
            return ()
        node.report(event.context_tokens)
        if event.step_s is not None and event.running_sequences > 0:
            predicted_s = self.profile.decode.step_s(event.running_sequences, event.context_tokens)
            node.observe_step(real_s=event.step_s, predicted_s=predicted_s)
        return ()

    def _lose(self, lost: NodeId) -> tuple[Command, ...]:
        """Forget a node. Requests without a token yet are placed again, the others fail."""
        fleet = self.ledger.fleet
        if lost not in fleet:
            return self._ignore()
        was_whole = bool(fleet.prefill and fleet.decode)
        places = sum([node.joined.sequence_limit for node in fleet.prefill.values()])
        fleet.lose(lost)
        if was_whole and not (fleet.prefill and fleet.decode):
            self.waiting.open(self._now_s, places=places)
        self.directory.handle(NodeLost(lost), now_s=self._now_s)
        commands: list[Command] = []
        stranded: list[Flight] = []
        for flight in list(self.ledger.flights.values()):
            if flight.fetch is not None and flight.fetch.source == lost:
                flight.fetch = None
            if flight.needs(lost):
                stranded.append(flight)
                commands += self.ledger.leave(flight, now_s=self._now_s)
        # Only now is every node's load right, so that the new choices are.
        for flight in stranded:
            commands += self._rescue(flight, lost)
        return tuple(commands)

    def _rescue(self, flight: Flight, lost: NodeId) -> tuple[Command, ...]:
        obstacle = self.ledger.fleet.obstacle(self._now_s)
        if flight.stage >= Stage.PREFILLED:
            reason = f"node {lost} was lost after the first token"
        elif flight.placements >= self.config.max_placements:
            reason = f"node {lost} was lost, the last of {flight.placements} that were tried"
        elif obstacle is not None and self.config.hold_s > 0:
            return self._hold(flight, obstacle)
        elif obstacle is not None:
            reason = f"node {lost} was lost, and {obstacle.reason}"
        else:
            self._placed_again += 1
            return self._place(flight, admit=False)
        self._outcomes[Outcome.FAILED] += 1
        held = tuple(
            node
            for node in (flight.prefill, flight.decode)
            if node != lost and node in self.ledger.fleet
        )
        return (FailRequest(flight.arrived.request, reason, held),)

    def _flight(self, request: RequestId) -> Flight | None:
        return self.ledger.flights.get(request)

    def _ignore(self) -> tuple[Command, ...]:
        self._stale_events += 1
        return ()


_HANDLERS: dict[type[Event], Callable[[Conductor, Any], tuple[Command, ...]]] = {
    RequestArrived: Conductor._arrive,
    BlocksCommitted: Conductor._tell_directory,
    BlocksEvicted: Conductor._tell_directory,
    PrefillStarted: Conductor._start_prefill,
    PrefillFinished: Conductor._finish_prefill,
    KvLanded: Conductor._land,
    DecodeStarted: Conductor._start_decode,
    RequestFinished: Conductor._finish,
    FetchFinished: Conductor._finish_fetch,
    NodeReported: Conductor._report,
    NodeJoined: Conductor._join,
    NodeLost: Conductor._mourn,
    TimePassed: Conductor._tell_directory,
}
"""What each event leads to: a table, since a match tries one kind of message after the other."""
assert _HANDLERS.keys() == set(get_args(Event)), "an event without a handler"
