"""The simulated cluster: the real Conductor over simulated nodes, driven by an event heap."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import assert_never

import numpy as np

from snowskin.conductor.conductor import Conductor
from snowskin.measure.records import Ending
from snowskin.sim.calendar import Calendar, Rank
from snowskin.sim.config import LinkSlows, NodeDies, WorldConfig
from snowskin.sim.decode import DecodeBatch
from snowskin.sim.job import Job, Placement
from snowskin.sim.journey import Journey, Rules
from snowskin.sim.links import Network
from snowskin.sim.memory import NodeMemory
from snowskin.sim.nodes import DecodeNode, PrefillNode, SimNode
from snowskin.terms.commands import (
    Command,
    EndLease,
    FailRequest,
    GrantLease,
    HoldRequest,
    RejectRequest,
    StartPrefill,
)
from snowskin.terms.events import (
    BlocksCommitted,
    BlocksEvicted,
    Event,
    NodeJoined,
    NodeLost,
    NodeReported,
    RequestArrived,
    TimePassed,
)
from snowskin.terms.ids import BlockKey, NodeId, RequestId, Role
from snowskin.trace.records import Ints, Trace

KEYS_AT_ONCE = 256
"""Requests whose block keys are made together."""


class World:
    """One run: build it, ``run`` it, then read ``jobs``, ``nodes`` and ``network``.

    Args:
        on_progress: called with the count of arrivals, once in 500.
        on_event: called with each event that the Conductor is told, and its time, beforehand.
    """

    def __init__(
        self,
        trace: Trace,
        config: WorldConfig,
        *,
        on_progress: Callable[[int], None] | None = None,
        on_event: Callable[[Event, float], None] | None = None,
    ) -> None:
        self.trace = trace
        self.config = config
        self._on_progress = on_progress
        self._on_event = on_event
        self.calendar = Calendar()
        self.jobs: list[Job] = []
        self.nodes: dict[NodeId, SimNode] = {}
        self.gone: list[SimNode] = []
        """Nodes that died; what they did before still counts."""
        self._slowed: dict[NodeId, list[float]] = {}
        """The factors of the slow links that go on."""
        profile = config.profile
        link = profile.transfer
        self.network = Network(
            self.calendar, latency_s=link.latency_s, rate_bytes_per_s=link.bytes_per_s
        )
        self.block_count = config.block_count(trace.block_tokens)
        self._output_tokens, self._output_limit_tokens = output_lengths(
            trace, config.output_limit_tokens
        )
        self.conductor = Conductor(
            config.conductor(trace.block_tokens),
            profile,
            conductor_rng(config.seed),
        )
        rules = Rules(
            profile,
            block_tokens=trace.block_tokens,
            layers=config.layers(),
            overlap=config.overlap,
            load_stalls_decode=config.load_stalls_decode,
            output_limit_tokens=self._output_limit_tokens,
        )
        self.journey = Journey(self.calendar, self.network, self.nodes, self.tell, rules)
        self._arrival_s: list[float] = trace.arrival_s.tolist()
        self._prompt_tokens: list[int] = trace.prompt_tokens.tolist()
        self._starts: list[int] = trace.block_starts.tolist()
        self._keys: tuple[BlockKey, ...] = ()
        self._keys_from = self._keys_until = 0

    def run(self, after_each: Callable[[], None] | None = None) -> int:
        """Play the whole trace; gives the count of events."""
        for name in self.config.prefill_names():
            self._join(name, Role.PREFILL)
        for name in self.config.decode_names():
            self._join(name, Role.DECODE)
        for fault in self.config.faults:
            self.calendar.at(fault.at_s, Rank.FAULT, self._fault, fault)
        self.calendar.at(self._arrival_s[0], Rank.ARRIVAL, self._arrive, 0)
        self.calendar.at(self.config.report_s, Rank.CONDUCTOR, self._report, None)
        return self.calendar.run(after_each)

    @property
    def is_over(self) -> bool:
        """Whether every request of the trace has come and gone."""
        return len(self.jobs) == len(self.trace) and not self.journey.flights

    def flights(self) -> list[Job]:
        """Requests in flight, in order of arrival."""
        return list(self.journey.flights.values())

    def tell(self, event: Event) -> None:
        """Give an event to the Conductor, and do what it says."""
        now_s = self.calendar.now_s
        if self._on_event is not None:
            self._on_event(event, now_s)
        for command in self.conductor.handle(event, now_s=now_s):
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case StartPrefill():
                job = self.journey.flights[command.request]
                prefill, decode = self.nodes[command.prefill], self.nodes[command.decode]
                assert isinstance(prefill, PrefillNode)
                assert isinstance(decode, DecodeNode)
                self.journey.place(job, prefill, decode, command.fetch)
            case RejectRequest():
                self.journey.end(self.journey.flights[command.request], Ending.REJECTED)
            case FailRequest():
                job = self.journey.flights[command.request]
                self.journey.end(job, Ending.FAILED)
            case HoldRequest():
                held_back = self.journey.flights[command.request].placement
                if held_back is not None:
                    self.journey.drop(held_back)
            case GrantLease():
                until_s = self.calendar.now_s + command.duration_s
                memory = self.nodes[command.node].memory
                held = memory.grant_lease(command.request, command.keys, until_s)
                assert held == len(command.keys), "the directory names blocks that are not held"
            case EndLease():
                node = self.nodes.get(command.node)
                if node is not None:
                    node.memory.end_lease(command.request)
            case _:
                assert_never(command)

    def _arrive(self, index: int) -> None:
        prompt_tokens = self._prompt_tokens[index]
        start = self._starts[index]
        full = min(prompt_tokens // self.trace.block_tokens, self._starts[index + 1] - start)
        if index >= self._keys_until:
            self._next_keys(index)
        at = start - self._keys_from
        keys = self._keys[at : at + full]
        job = Job(
            RequestId(f"r{index}"),
            self.calendar.now_s,
            prompt_tokens,
            self._output_tokens[index],
            keys,
        )
        self.jobs.append(job)
        self.journey.flights[job.request] = job
        if self._on_progress is not None and index % 500 == 499:
            self._on_progress(index + 1)
        if index + 1 < len(self._arrival_s):
            self.calendar.at(self._arrival_s[index + 1], Rank.ARRIVAL, self._arrive, index + 1)
        self.tell(RequestArrived(job.request, prompt_tokens, keys, self._output_limit_tokens))

    def _next_keys(self, index: int) -> None:
        """Make the keys of the next requests: all together they cost less than one by one."""
        self._keys_until = min(index + KEYS_AT_ONCE, len(self._arrival_s))
        self._keys_from = self._starts[index]
        self._keys = block_keys(
            self.trace.block_ids[self._keys_from : self._starts[self._keys_until]]
        )

    def _join(self, name: NodeId, role: Role) -> None:
        config = self.config

        def tell_blocks(event: BlocksCommitted | BlocksEvicted) -> None:
            if node.up:
                self.tell(event)

        def on_room() -> None:
            if isinstance(node, PrefillNode):
                self.journey.start_next(node)
            else:
                self.journey.stream_next(node)

        memory = NodeMemory(
            name, self.block_count, eviction=config.eviction, tell=tell_blocks, on_room=on_room
        )
        node: PrefillNode | DecodeNode
        if role is Role.PREFILL:
            node = PrefillNode(name, memory)
        else:
            batch: DecodeBatch[Placement] = DecodeBatch(
                config.profile.decode,
                sequence_limit=config.sequence_limit,
                token_limit=config.device_token_count(),
            )
            node = DecodeNode(name, memory, batch)
        self.nodes[name] = node
        self.network.join(name)
        self._set_rate(name)
        self.tell(
            NodeJoined(
                name,
                role,
                self.block_count,
                config.queue_limit if role is Role.PREFILL else config.sequence_limit,
                config.device_token_count(),
            )
        )

    def _report(self, _: None) -> None:
        now_s = self.calendar.now_s
        for node in self.nodes.values():
            node.memory.expire(now_s)
            if isinstance(node, DecodeNode):
                self.tell(self._word_of(node))
        due_s = self.conductor.next_wakeup_s()
        if due_s is not None and due_s <= now_s:
            self.tell(TimePassed())
        if not self.is_over:
            self.calendar.at(now_s + self.config.report_s, Rank.CONDUCTOR, self._report, None)

    def _word_of(self, node: DecodeNode) -> NodeReported:
        batch = node.batch
        running, context = batch.running_count, batch.context_at(self.calendar.now_s)
        step_s = self.config.profile.decode.step_s(running, context) if running else None
        return NodeReported(node.name, running, batch.waiting_count, context, step_s)

    def _fault(self, fault: NodeDies | LinkSlows) -> None:
        match fault:
            case NodeDies():
                self._die(fault)
            case LinkSlows():
                self._slowed.setdefault(fault.node, []).append(fault.factor)
                self._set_rate(fault.node)
                end_s = self.calendar.now_s + fault.duration_s
                self.calendar.at(end_s, Rank.FAULT, self._restore_link, fault)
            case _:
                assert_never(fault)

    def _restore_link(self, fault: LinkSlows) -> None:
        self._slowed[fault.node].remove(fault.factor)
        self._set_rate(fault.node)

    def _set_rate(self, name: NodeId) -> None:
        """A link is as slow as the worst of what it suffers from."""
        self.network.set_rate(name, min(self._slowed.get(name, []), default=1.0))

    def _die(self, fault: NodeDies) -> None:
        node = self.nodes.pop(fault.node, None)
        if node is None:
            return
        node.up = False
        self.gone.append(node)
        self.tell(NodeLost(fault.node))
        for job in self.flights():
            placement = job.placement
            if placement is not None and placement.fetch_flow is not None:
                assert placement.fetch is not None
                if placement.fetch.source == fault.node:
                    self.journey.fetch_lost(placement)
        role = Role.PREFILL if isinstance(node, PrefillNode) else Role.DECODE
        back_s = self.calendar.now_s + fault.restart_s
        self.calendar.at(back_s, Rank.FAULT, self._rejoin, (fault.node, role))

    def _rejoin(self, about: tuple[NodeId, Role]) -> None:
        self._join(*about)


def conductor_rng(seed: int) -> random.Random:
    """The Conductor's stream: a seed names one for each subsystem that draws."""
    return random.Random(f"conductor-{seed}")


def output_lengths(trace: Trace, limit_tokens: int | None) -> tuple[list[int], int]:
    """The answers' true lengths in tokens, from 1 to a limit; and that limit.

    Args:
        limit_tokens: None: as long as the longest.
    """
    limit = limit_tokens or max(1, int(trace.output_tokens.max()))
    lengths: list[int] = np.clip(trace.output_tokens, 1, limit).tolist()
    return lengths, limit


def block_keys(block_ids: Ints) -> tuple[BlockKey, ...]:
    """Block keys that stand for a trace's block ids."""
    words = np.zeros((len(block_ids), 2), dtype=">u8")
    words[:, 1] = block_ids
    return tuple(words.view("V16").ravel().tolist())
