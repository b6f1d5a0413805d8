"""Laws of the pool under random sequences of operations, against a model that is plainly right."""

from itertools import takewhile

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snowskin.store.changes import Committed, Evicted
from snowskin.store.eviction import POLICIES, make_policy
from snowskin.store.pool import BlockPool, PoolFull
from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import BlockKey

SLOTS = 6
# The second chain shares two blocks with the first, the third one.
SHARED = [0, 2, 1, 0]
CHAINS = [
    [BlockKey(bytes([chain if depth >= shared else 0, depth]) * 8) for depth in range(4)]
    for chain, shared in enumerate(SHARED)
]
CHAIN = st.sampled_from(CHAINS)
LENGTH = st.integers(1, 4)


def blocks_of(change):
    return map(PlacedBlock, change.keys, change.slots, change.generations)


class PoolLaws(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(SLOTS, self.policy)
        self.now_s = 0.0
        self.held = {}  # key -> PlacedBlock
        self.known = {}  # the same, as a directory knows it from the events
        self.reserved = []  # PlacedBlocks not committed, pinned once
        self.pins = []  # PlacedBlocks, once for each pin of a committed block
        self.leases = {}  # owner -> (keys, until_s)
        self.generations = [0] * SLOTS
        self.order = make_policy(self.policy)  # key by key what the pool does run by run

    def protected(self):
        leased = {key for keys, _ in self.leases.values() for key in keys}
        return leased | {block.key for block in self.pins}

    def protect(self, keys):
        for key in keys:
            if key not in self.protected():
                self.order.protect(key)

    def expose(self, keys):
        for key in keys:
            if key not in self.protected():
                self.order.expose(key)

    def next_victims(self, count):
        victims = set()
        for _ in range(count):
            key = self.order.victim()
            self.order.remove(key)
            victims.add(key)
        return victims

    @rule(chain=CHAIN, length=LENGTH)
    def reserve(self, chain, length):
        protected = self.protected()
        evictable = [key for key in self.held if key not in protected]
        free = SLOTS - len(self.held) - len(self.reserved)
        before = dict(self.held)
        result = self.pool.reserve(length)
        if free + len(evictable) < length:
            assert result == PoolFull(wanted=length, obtainable=free + len(evictable))
            return
        generations = self.pool.generations(result)
        result = list(map(PlacedBlock, chain[:length], result, generations))
        taken = {block.slot for block in result}
        assert len(taken) == length
        for key, block in before.items():
            if block.slot in taken:
                assert key in evictable
                del self.held[key]
        assert before.keys() - self.held.keys() == self.next_victims(max(0, length - free))
        assert not taken & {block.slot for block in self.reserved}
        for block in result:
            assert block.generation % 2 == 1
            assert block.generation > self.generations[block.slot]
            self.generations[block.slot] = block.generation
        self.reserved += result

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), chain=CHAIN, depth=st.integers(0, 3))
    def commit(self, data, chain, depth):
        block = data.draw(st.sampled_from(self.reserved))
        key = chain[depth]
        committed = self.pool.commit([block.slot], chain[: depth + 1], depth=depth)
        if key in self.held:
            assert committed == ()
            return
        assert committed == (block.slot,)
        self.reserved.remove(block)
        named = type(block)(key=key, slot=block.slot, generation=block.generation)
        self.held[key] = named
        self.order.insert(key, depth=depth)
        self.order.protect(key)
        self.pins.append(named)

    @rule(chain=CHAIN, length=LENGTH)
    def hold(self, chain, length):
        self.reserve(chain, length)
        blocks = [block for block in self.reserved if block.key in chain[:length]]
        blocks = list({block.key: block for block in blocks}.values())
        blocks.sort(key=lambda block: chain.index(block.key))
        new = [block for block in blocks if block.key not in self.held]
        start = chain.index(blocks[0].key) if blocks else 0
        if [block.key for block in blocks] != chain[start : start + len(blocks)]:
            return
        committed = self.pool.commit(
            [block.slot for block in blocks], chain[: start + len(blocks)], depth=start
        )
        assert committed == tuple(block.slot for block in new)
        for block in reversed(new):
            self.reserved.remove(block)
            self.held[block.key] = block
            self.order.insert(block.key, depth=chain.index(block.key))
            self.order.protect(block.key)
            self.pins.append(block)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abandon(self, data):
        block = data.draw(st.sampled_from(self.reserved))
        assert self.pool.release([block.slot]) == (block.slot,)
        self.reserved.remove(block)

    @rule(chain=CHAIN, length=LENGTH)
    def pin(self, chain, length):
        expected = []
        for key in chain[:length]:
            if key not in self.held:
                break
            expected.append(self.held[key])
        assert self.pool.match(chain[:length]) == len(expected)
        assert self.pool.pin(chain[:length]) == tuple(block.slot for block in expected)
        self.protect([block.key for block in expected])
        for block in reversed(expected):
            self.order.touch(block.key)
        self.pins += expected

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from(self.pins))
        assert self.pool.release([block.slot]) == ()
        self.pins.remove(block)
        self.expose([block.key])

    @rule(chain=CHAIN, length=LENGTH)
    def release_together(self, chain, length):
        pinned = [self.held[key] for key in chain[:length] if self.held.get(key) in self.pins]
        assert self.pool.release([block.slot for block in pinned]) == ()
        for block in reversed(pinned):
            self.pins.remove(block)
            self.expose([block.key])

    @rule(owner=st.sampled_from("abc"), chain=CHAIN, wait_s=st.integers(0, 5))
    def grant(self, owner, chain, wait_s):
        keys = list(takewhile(self.held.__contains__, chain))
        assert self.pool.grant_lease(owner, chain, self.now_s + wait_s) == len(keys)
        self.protect(keys)
        replaced, _ = self.leases.pop(owner, ((), None))
        if keys:
            self.leases[owner] = (keys, self.now_s + wait_s)
        self.expose(reversed(replaced))

    @rule(owner=st.sampled_from("abc"))
    def end_lease(self, owner):
        ended, _ = self.leases.pop(owner, ((), None))
        assert self.pool.end_lease(owner) == bool(ended)
        self.expose(reversed(ended))

    @rule(passed_s=st.integers(0, 3))
    def expire(self, passed_s):
        self.now_s += passed_s
        over = {owner for owner, (_, until_s) in self.leases.items() if until_s <= self.now_s}
        ended = self.pool.expire(self.now_s)
        assert set(ended) == over
        for owner in ended:
            keys, _ = self.leases.pop(owner)
            self.expose(reversed(keys))

    @rule()
    def drain(self):
        for change in self.pool.drain_changes():
            match change:
                case Committed():
                    new = {block.key: block for block in blocks_of(change)}
                    assert self.known.keys().isdisjoint(new)
                    self.known |= new
                case Evicted():
                    for key in change.keys:
                        del self.known[key]
        assert self.known == self.held

    @invariant()
    def slots_add_up_and_each_key_has_one_slot(self):
        stat = self.pool.stat()
        assert stat.slot_count == SLOTS
        assert stat.free_slots + stat.reserved_slots + stat.committed_slots == SLOTS
        assert stat.reserved_slots == len(self.reserved)
        assert stat.lease_count == len(self.leases)
        assert stat.evictable_slots == len(self.held.keys() - self.protected())
        assert {block.key: block for block in blocks_of(self.pool.held())} == self.held
        assert len({block.slot for block in self.held.values()}) == len(self.held)

    def teardown(self):
        """Once nothing is pinned, all can be evicted, and nothing is left."""
        for block in self.pins + self.reserved:
            self.pool.release([block.slot])
        for owner in list(self.leases):
            self.pool.end_lease(owner)
        assert not isinstance(self.pool.reserve(SLOTS), PoolFull)
        assert not self.pool._index
        assert not self.pool._loose_count
        assert self.pool._runs == [None] * SLOTS


def machine_for(name):
    machine = type(f"PoolLaws_{name}", (PoolLaws,), {"policy": name})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return machine.TestCase


TestLruPool = machine_for("lru")
TestLfuPool = machine_for("lfu")
TestLengthAwarePool = machine_for("length-aware")


@pytest.mark.parametrize("policy", POLICIES)
def test_events_that_nobody_drains_stay_bounded_and_exact(policy):
    pool = BlockPool(3, policy)
    known = {}

    def apply(changes):
        for change in changes:
            if isinstance(change, Committed):
                known.update({block.key: block for block in blocks_of(change)})
            else:
                for key in change.keys:
                    del known[key]

    def hold(number):
        key = BlockKey(number.to_bytes(16, "big"))
        slots = pool.reserve(1)
        pool.commit(slots, [key])
        pool.release(slots)

    for number in range(5):
        hold(number)
    apply(pool.drain_changes())
    for number in range(2000):
        hold(3 + number * 7 % 900)
    changes = pool.drain_changes()
    assert sum(len(change.keys) for change in changes) <= 4 * 3 + 64
    apply(changes)
    assert known == {block.key: block for block in blocks_of(pool.held())}


def test_leases_that_are_replaced_for_ever_leave_no_trail():
    pool = BlockPool(2, "lru")
    key = BlockKey(bytes(16))
    slots = pool.reserve(1)
    pool.commit(slots, [key])
    pool.release(slots)
    for turn in range(5000):
        pool.grant_lease("reader", [key], until_s=1e6 + turn)
    assert pool.stat().lease_count == 1
    assert len(pool._deadlines) < 200
    assert pool.next_expiry_s() is not None
    pool.end_lease("reader")
    assert pool.stat().evictable_slots == 1
