"""Laws that hold after every event, whatever happens: random lives of random clusters."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snowskin.conductor.admission import ADMISSIONS
from snowskin.conductor.laws import check_laws
from snowskin.conductor.prefill_choice import POLICIES
from snowskin.terms.commands import (
    Command,
    EndLease,
    FailRequest,
    GrantLease,
    HoldRequest,
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
    IncomingTraffic,
    KvLanded,
    NodeLost,
    NodeReported,
    Outcome,
    PrefillFinished,
    PrefillStarted,
    RequestFinished,
    TimePassed,
)
from snowskin.terms.ids import NodeId, RequestId, SlotIndex, Tier

from .cluster import BLOCK_BYTES, D0, D1, P0, P1, P2, Cluster, arrival, joined, keys

NODES = (P0, P1, P2, D0, D1)
STORIES = ("tale", "lore", "song")


class Life:
    """A cluster driven at random: mostly as a true driver would, now and then as a broken one."""

    def __init__(self, seed: int, **config: object) -> None:
        self.rng = random.Random(seed)
        self.cluster = Cluster(NODES, seed=seed, **config)
        self.up = dict.fromkeys(NODES, True)
        self.placed: dict[RequestId, StartPrefill] = {}
        self.held: set[RequestId] = set()
        self.joining: NodeId | None = None
        self.leased: set[tuple[NodeId, RequestId]] = set()
        self.ended: list[RequestId] = []
        self.arrived = 0
        self.log: list[tuple[float, Event, tuple[Command, ...]]] = []

    def tell(self, event: Event) -> None:
        self.cluster.now_s += self.rng.choice([0.0, 0.01, 0.3, 2.0])
        commands = self.cluster.conductor.handle(event, now_s=self.cluster.now_s)
        check_laws(self.cluster.conductor)
        self.log.append((self.cluster.now_s, event, commands))
        for command in commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case StartPrefill():
                self._check_start(command)
                self.placed[command.request] = command
                self.held.discard(command.request)
            case HoldRequest():
                assert command.request not in self.held
                self.placed.pop(command.request, None)
                self.held.add(command.request)
            case RejectRequest(retry_after_s=retry_after_s):
                assert 1 <= retry_after_s <= self.cluster.conductor.config.retry_limit_s
                self._end(command.request)
            case FailRequest(nodes=nodes):
                assert all(self.up[node] for node in nodes)
                self._end(command.request)
            case GrantLease():
                assert self.up[command.node]
                self.leased.add((command.node, command.request))
            case EndLease():
                self.leased.remove((command.node, command.request))

    def _check_start(self, start: StartPrefill) -> None:
        for node in (start.prefill, start.decode):
            # A node that joins anew is lost first: only who waits for it may see it at once.
            assert self.up[node] or (node == self.joining and start.request in self.held)
        chosen = next(c for c in start.decision.prefill if c.node == start.prefill)
        tokens = self.cluster.conductor.ledger.flights[start.request].arrived.prompt_tokens
        assert chosen.reused_blocks * 100 < tokens, "a token is always left to compute"
        assert chosen.local_blocks <= chosen.reused_blocks <= start.decision.best_prefix_blocks
        assert (start.fetch is None) == (chosen.fetch_from is None)
        if start.fetch is not None:
            assert start.fetch.source != start.prefill
            assert len(start.fetch.blocks) == chosen.reused_blocks - chosen.local_blocks > 0
            assert (start.fetch.source, start.request) in self.leased

    def _end(self, request: RequestId) -> None:
        self.placed.pop(request, None)
        self.held.discard(request)
        self.ended.append(request)

    def step(self) -> None:
        self.rng.choices(*zip(*self._moves(), strict=True))[0]()

    def _moves(self) -> list[tuple[Callable[[], None], int]]:
        return [
            (self._arrive, 6),
            (self._advance, 14),
            (self._commit, 3),
            (self._evict, 1),
            (self._cancel, 1),
            (self._lose, 1),
            (self._join, 2),
            (self._report, 1),
            (self._babble, 1),
            (lambda: self.tell(TimePassed()), 1),
        ]

    def _arrive(self) -> None:
        name, story = f"r{self.arrived}", self.rng.choice(STORIES)
        self.arrived += 1
        self.tell(arrival(name, self.rng.randrange(1, 3000), story=story))

    def _advance(self) -> None:
        if not self.placed:
            return
        start = self.rng.choice(list(self.placed.values()))
        name, real_s = start.request, self.rng.random()
        blocks = len(start.fetch.blocks) if start.fetch else 0
        source = start.fetch.source if start.fetch else D0
        steps: list[Event] = [
            FetchFinished(name, start.prefill, source, blocks, blocks * BLOCK_BYTES, real_s),
            PrefillStarted(name, start.prefill, 0),
            PrefillFinished(name, start.prefill, real_s),
            KvLanded(name, start.decode, 1000, real_s),
            DecodeStarted(name, start.decode),
        ]
        # In order, but any tail may be missing, and some come twice.
        for event in steps[self.rng.randrange(2) : self.rng.randrange(6)]:
            if name in self.placed:
                self.tell(event)
        if name in self.placed and self.rng.random() < 0.3:
            self._finish(name, Outcome.COMPLETED)

    def _finish(self, name: RequestId, outcome: Outcome) -> None:
        self._end(name)
        self.tell(RequestFinished(name, outcome, self.rng.randrange(100)))

    def _cancel(self) -> None:
        if flying := [*self.placed, *sorted(self.held)]:
            self._finish(self.rng.choice(flying), Outcome.CANCELLED)

    def _commit(self) -> None:
        story = keys(self.rng.choice(STORIES), self.rng.randrange(30))
        slots, generations = (SlotIndex(0),) * len(story), (1,) * len(story)
        node = self.rng.choice(NODES)
        self.tell(BlocksCommitted(node, Tier.DRAM, story, slots, generations))

    def _evict(self) -> None:
        story = keys(self.rng.choice(STORIES), 30)[self.rng.randrange(30) :]
        self.tell(BlocksEvicted(self.rng.choice(NODES), Tier.DRAM, story))

    def _lose(self) -> None:
        self._gone(self.rng.choice(NODES), NodeLost)

    def _join(self) -> None:
        down = [node for node in NODES if not self.up[node]]
        node = self.rng.choice(down or list(NODES))
        self.joining = node
        self._gone(node, lambda name: joined(name, sequence_limit=self.rng.choice([2, 100])))
        self.joining = None
        self.up[node] = True

    def _gone(self, node: NodeId, event: Callable[[NodeId], Event]) -> None:
        self.leased = {lease for lease in self.leased if lease[0] != node}
        told = event(node)
        self.up[node] = False
        self.tell(told)

    def _report(self) -> None:
        sequences = self.rng.randrange(20)
        incoming = tuple(
            IncomingTraffic(
                peer,
                self.rng.randrange(3) * BLOCK_BYTES,
                self.rng.choice([None, 1e5, 1e9]),
                self.rng.choice([None, 0.01]),
            )
            for peer in NODES
            if self.rng.random() < 0.3
        )
        node = self.rng.choice(NODES)
        self.tell(NodeReported(node, sequences, 0, sequences * 900, 0.02, incoming))

    def _babble(self) -> None:
        names = [RequestId("nobody"), *self.ended[-3:], *list(self.placed)[:3]]
        name, node = self.rng.choice(names), self.rng.choice(NODES)
        self.tell(
            self.rng.choice(
                [
                    PrefillStarted(name, node, 50),
                    PrefillFinished(name, node, 1.0),
                    KvLanded(name, node, 0, 0.0),
                    DecodeStarted(name, node),
                    FetchFinished(name, node, D1, 0, 0, 0.0),
                ]
            )
        )


lives = st.builds(
    dict,
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(list(POLICIES)),
    admission=st.sampled_from(list(ADMISSIONS)),
    max_in_flight=st.sampled_from([3, 1000]),
    ttft_slo_s=st.sampled_from([2.0, 30.0]),
    tbt_slo_s=st.sampled_from([0.014, 0.1]),
    hold_s=st.sampled_from([0.0, 3.0, 30.0]),
)


@settings(max_examples=60, deadline=None)
@given(lives, st.integers(1, 150))
def test_every_law_holds_after_every_event_of_any_life(config, steps: int):
    life = Life(**config)
    for _ in range(steps):
        life.step()
    stat = life.cluster.conductor.stat()
    assert stat.arrived == life.arrived
    assert stat.in_flight == len(life.placed) + len(life.held)
    assert not life.held or life.cluster.conductor.next_wakeup_s() is not None
    assert len(life.ended) == len(set(life.ended)), "a request ends once"


@settings(max_examples=15, deadline=None)
@given(lives, st.integers(1, 100))
def test_when_all_have_left_nothing_is_held(config, steps: int):
    life = Life(**config)
    for _ in range(steps):
        life.step()
    while flying := [*life.placed, *sorted(life.held)]:
        life._finish(flying[0], Outcome.CANCELLED)
    conductor = life.cluster.conductor
    assert life.leased == set()
    assert conductor.directory.stat().leases == 0
    assert conductor.next_wakeup_s() is None
    fleet = conductor.ledger.fleet
    for node in fleet.prefill.values():
        assert (node.queue_s(1e9), node.queue_s(node.since_s), node.egress_bytes) == (0, 0, 0)
    for node in fleet.decode.values():
        assert (node.placed, node.placed_tokens, node.egress_bytes) == (0, 0, 0)
        assert (node.view_present().sequences, node.view_present().context_tokens) == (0, 0)


@settings(max_examples=20, deadline=None)
@given(lives)
def test_the_same_seed_gives_the_same_commands(config):
    first, second = Life(**config), Life(**config)
    for _ in range(100):
        first.step()
        second.step()
    assert msgspec.msgpack.encode(first.log) == msgspec.msgpack.encode(second.log)


_PRINT_A_LIFE = """
import hashlib, msgspec
from tests.conductor.test_laws import Life
life = Life(7, admission="predicted")
for _ in range(200):
    life.step()
print(hashlib.sha256(msgspec.msgpack.encode(life.log)).hexdigest())
"""


def test_the_order_of_hashing_reaches_no_decision():
    root = Path(__file__).parents[2]
    printed = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_A_LIFE],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout
        for hash_seed in "012"
    }
    assert len(printed) == 1


def test_time_never_goes_back():
    cluster = Cluster()
    cluster.conductor.handle(TimePassed(), now_s=5.0)
    with pytest.raises(AssertionError, match=r"time went back from 5.0 to 4.0"):
        cluster.conductor.handle(TimePassed(), now_s=4.0)


def test_an_id_that_is_in_flight_cannot_arrive_again():
    cluster = Cluster()
    cluster.place(arrival("r"))
    with pytest.raises(InvalidInput, match="'r' is already in flight"):
        cluster.tell(arrival("r"))
