"""Laws of the master's catalog under any order of events, against a plain model."""

import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from snowskin.store.objects.catalog import Catalog, CatalogConfig, Say, Send
from snowskin.store.objects.changes import ReplicaChanges
from snowskin.store.objects.words import (
    ChangeReplica,
    Copy,
    Done,
    Drop,
    NodeAddress,
    ObjectFact,
    Pin,
    PutBusy,
    PutExists,
    PutGranted,
    PutStart,
    Refusal,
    TransferState,
)

NODE = st.sampled_from(["a", "b", "c"])
KEY = st.sampled_from(["k0", "k1", "k2", "k3"])
OWNER = st.sampled_from(["writer-0", "writer-1"])
CONTENT = st.sampled_from([b"x" * 16, b"y" * 16])


def address(name):
    return NodeAddress(name, "s", "127.0.0.1", 1, "u", "h")


class CatalogLaws(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.catalog = Catalog(CatalogConfig(object_limit=100), rng=random.Random(0))
        self.changes = ReplicaChanges(self.catalog, prefix="t")
        self.now_s = 0.0
        self.up = set()
        self.holds = {}  # (node, key) -> content: what nodes have told and not given up
        self.writing = {}  # key -> (owner, content, until_s)
        self.removing = {}  # key -> tickets of those who wait for it
        self.sent = {}  # number -> (node, message)
        self.void = set()  # numbers of copies whose object was removed meanwhile
        self.answered = {}
        self.transfers = []
        self.tickets = 0

    def carry(self, outputs):
        for output in outputs:
            if isinstance(output, Send):
                assert output.node in self.up
                self.sent[output.message.number] = (output.node, output.message)
            else:
                assert isinstance(output, Say)
                assert output.ticket not in self.answered, "answered twice"
                self.answered[output.ticket] = output.message

    @rule(node=NODE)
    def join(self, node):
        refusal = self.catalog.join(address(node), 1000)
        assert (refusal is None) == (node not in self.up)
        self.up.add(node)

    @rule(node=NODE)
    def lose(self, node):
        self.up.discard(node)
        self.holds = {at: content for at, content in self.holds.items() if at[0] != node}
        self.changes.lose(node)
        self.carry(self.catalog.lose(node))
        self.sent = {number: sent for number, sent in self.sent.items() if sent[0] != node}

    @rule(key=KEY, content=CONTENT, owner=OWNER, replicas=st.integers(1, 3))
    def start(self, key, content, owner, replicas):
        held = self.content(key)
        answer = self.catalog.start_put(
            PutStart(key, 10, content, replicas), owner, now_s=self.now_s
        )
        if held is not None:
            assert isinstance(answer, PutExists if held == content else Refusal)
        elif key in self.removing or (key in self.writing and self.writing[key][0] != owner):
            assert answer == PutBusy()
        elif not self.up:
            assert answer.error == "PoolFullError"
            self.writing.pop(key, None)
        else:
            assert isinstance(answer, PutGranted)
            assert len(answer.nodes) == min(replicas, len(self.up))
            assert set(answer.nodes) <= self.up
            self.writing[key] = (owner, content, self.now_s + 30 + 10 / 5e6, set(answer.nodes))

    @rule(key=KEY, owner=OWNER)
    def end(self, key, owner):
        self.catalog.end_put(key, owner)
        if key in self.writing and self.writing[key][0] == owner:
            del self.writing[key]

    @rule(owner=OWNER)
    def writer_dies(self, owner):
        self.catalog.end_owner(owner)
        self.writing = {key: by for key, by in self.writing.items() if by[0] != owner}

    @rule(node=NODE, key=KEY, content=CONTENT)
    def commit(self, node, key, content):
        if node not in self.up:
            return
        held = self.content(key)
        reserved = self.writing.get(key)
        fits = held == content if held is not None else key not in self.removing
        if held is None and reserved is not None and reserved[1] != content:
            fits = False
        if held is None and reserved is None and self.is_void(node, key):
            fits = False
        accepted, outputs = self.catalog.report(node, 1, (ObjectFact(key, 10, content),), ())
        self.carry(outputs)
        assert accepted.rejected == (() if fits else (key,))
        if fits:
            self.holds[node, key] = content
            if key in self.writing:
                unreported = self.writing[key][3]
                unreported.discard(node)
                if not unreported:
                    del self.writing[key]

    def is_void(self, node, key):
        copies = [self.sent[number] for number in self.void & self.sent.keys()]
        return any((at, message.key) == (node, key) for at, message in copies)

    @rule(node=NODE, key=KEY)
    def evict(self, node, key):
        if node in self.up:
            self.catalog.report(node, 1, (), (key,))
            self.holds.pop((node, key), None)

    @rule(key=KEY)
    def remove(self, key):
        ticket = self.tickets
        self.tickets += 1
        nodes = [at[0] for at in self.holds if at[1] == key]
        before = set(self.sent)
        self.carry(self.catalog.remove(key, ticket, now_s=self.now_s))
        if not nodes and key in self.removing:
            assert ticket not in self.answered
            self.removing[key].append(ticket)
            return
        if not nodes:
            assert self.answered[ticket].error == "KeyMissing"
            return
        numbers = set(self.sent) - before
        assert sorted(self.sent[number][0] for number in numbers) == sorted(nodes)
        for node in nodes:
            del self.holds[node, key]
        self.removing[key] = [ticket]
        self.void |= {
            number
            for number, (_, message) in self.sent.items()
            if isinstance(message, Copy) and message.key == key
        }

    @rule(key=KEY, pin=st.sampled_from(Pin))
    def set_pin(self, key, pin):
        ticket = self.tickets
        self.tickets += 1
        nodes = [at[0] for at in self.holds if at[1] == key]
        before = set(self.sent)
        self.carry(self.catalog.set_pin(key, pin, ticket, now_s=self.now_s))
        assert sorted(self.sent[number][0] for number in set(self.sent) - before) == sorted(nodes)
        assert (ticket in self.answered) == (not nodes)

    @rule(key=KEY, count=st.integers(1, 4))
    def change(self, key, count):
        before = self.content(key)
        status, sends = self.changes.start(ChangeReplica(key, count, None), now_s=self.now_s)
        self.carry(sends)
        if before is None:
            assert status.error == "KeyMissing"
            return
        self.transfers.append(status.transfer)
        for send in sends:
            if isinstance(send.message, Drop):
                del self.holds[send.node, key]
            else:
                assert isinstance(send.message, Copy)
                assert (send.node, key) not in self.holds

    @rule(data=st.data())
    def command_ends(self, data):
        if not self.sent:
            return
        number = data.draw(st.sampled_from(sorted(self.sent)))
        node, message = self.sent[number]
        if isinstance(message, Copy):
            self.commit(node, message.key, message.digest)
        del self.sent[number]
        self.changes.command_ended(number, None)
        self.carry(self.catalog.command_ended(number))

    @rule(elapsed_s=st.sampled_from([1.0, 11.0, 100.0]))
    def time_passes(self, elapsed_s):
        self.now_s += elapsed_s
        self.carry(self.catalog.expire(now_s=self.now_s))
        self.changes.expire(now_s=self.now_s)
        self.writing = {key: by for key, by in self.writing.items() if by[2] > self.now_s}

    def content(self, key):
        contents = {content for at, content in self.holds.items() if at[1] == key}
        assert len(contents) <= 1, "a key with two contents"
        return next(iter(contents), None)

    @invariant()
    def what_is_readable_is_what_nodes_hold(self):
        for key, tickets in list(self.removing.items()):
            if tickets[0] in self.answered:
                answer = self.answered[tickets[0]]
                assert all(self.answered[ticket] == answer for ticket in tickets)
                assert answer == Done() or answer.error == "StoreTimeout"
                del self.removing[key]
        chain = ["k0", "k1", "k2", "k3"]
        expected = {}
        for name in self.up:
            held = [(name, key) in self.holds for key in chain]
            count = held.index(False) if False in held else len(chain)
            if count:
                expected[name] = count
        assert self.catalog.longest_prefix(chain) == expected
        located = {
            (name, key): held.digest
            for key, held in self.catalog.readable.items()
            for name in held.nodes
        }
        assert located == self.holds
        for name, node in self.catalog.nodes.items():
            assert node.used_bytes == 10 * sum(1 for at in self.holds if at[0] == name)
            assert node.reserved_bytes >= 0
        assert self.catalog.reservations() == len(self.writing)
        for transfer in self.transfers:
            status = self.changes.status(transfer)
            if status.state is TransferState.DONE:
                assert status.replicas == status.wanted


TestCatalogLaws = CatalogLaws.TestCase
TestCatalogLaws.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_copy_that_ends_after_its_object_was_removed_does_not_bring_it_back():
    catalog = Catalog(rng=random.Random(0))
    fact = ObjectFact("k", 1, b"x" * 16)
    for name in ("a", "b"):
        catalog.join(address(name), 1000)
    catalog.report("a", 1, (fact,), ())
    copies = [catalog.copy_command("k", "b").message.number for _ in range(2)]
    (drop,) = catalog.remove("k", "ticket", now_s=0.0)
    assert catalog.command_ended(drop.message.number) == (Say("ticket", Done()),)
    catalog.command_ended(copies[0])
    accepted, _ = catalog.report("b", 1, (fact,), ())
    assert accepted.rejected == ("k",)
    assert catalog.locate("k") is None
    catalog.command_ended(copies[1])
    accepted, _ = catalog.report("b", 2, (fact,), ())
    assert accepted.rejected == ()


def test_pins_reach_every_node_that_holds_the_object():
    catalog = Catalog(rng=random.Random(0))
    for name in ("a", "b"):
        catalog.join(address(name), 1000)
        catalog.report(name, 1, (ObjectFact("k", 1, b"x" * 16),), ())
    sends = catalog.set_pin("k", Pin.HARD, "ticket", now_s=0.0)
    assert [(send.node, send.message.pin) for send in sends] == [("a", Pin.HARD), ("b", Pin.HARD)]
    assert catalog.locate("k").pin is Pin.HARD
    assert catalog.command_ended(sends[0].message.number) == ()
    assert catalog.command_ended(sends[1].message.number) == (Say("ticket", Done()),)
    catalog.join(address("c"), 1000)
    _, (repeated,) = catalog.report("c", 1, (ObjectFact("k", 1, b"x" * 16),), ())
    assert (repeated.node, repeated.message.pin) == ("c", Pin.HARD)
    (refused,) = catalog.set_pin("absent", Pin.HARD, "other", now_s=0.0)
    assert (refused.ticket, refused.message.error) == ("other", "KeyMissing")
