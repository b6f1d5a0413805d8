"""Laws of a node's objects: what is in use or pinned stays, and memory adds up."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from snowskin.store.eviction import POLICIES
from snowskin.store.objects.allocator import ExtentAllocator
from snowskin.store.objects.pool import ObjectPool, ObjectState
from snowskin.store.objects.words import Pin

GRANULE = 1024
CAPACITY = 40 * GRANULE
KEY = st.sampled_from(["a", "b", "c", "d", "e", "f"])


class PoolLaws(RuleBasedStateMachine):
    eviction = "lru"

    def __init__(self):
        super().__init__()
        self.allocator = ExtentAllocator(CAPACITY, granule_bytes=GRANULE)
        self.pool = ObjectPool(self.allocator, eviction=self.eviction)
        self.reserved = {}
        self.held = {}
        self.used = []
        self.evicting = []

    @rule(key=KEY, size=st.integers(0, 20 * GRANULE), pin=st.sampled_from(Pin))
    def reserve(self, key, size, pin):
        if key in self.reserved:
            assert self.pool.is_reserved(key)
            return
        while (item := self.pool.reserve(key, size, pin)) is None:
            victim = self.pool.begin_eviction()
            if victim is None:
                # Only what is in use or pinned is left, and leaves no run that is long enough.
                assert self.stuck_bytes() + self.allocator.free_bytes == CAPACITY
                assert self.allocator.stat().largest_free_bytes < self.allocator.rounded(size)
                return
            assert victim.uses == 0
            assert victim.pin is not Pin.HARD
            others = [other for other in self.held.values() if other not in self.evicting]
            if victim.pin is Pin.SOFT:
                assert all(other.pin is not Pin.NONE or other.uses for other in others)
            assert self.pool.end_eviction(victim)
            assert victim.state is ObjectState.GONE
            del self.held[victim.key]
        self.reserved[key] = item

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), whole=st.booleans())
    def finish(self, data, whole):
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        item = self.reserved[key]
        if whole and self.pool.commit(item, b"d" * 16):
            assert key not in self.held
            self.held[key] = item
        else:
            assert not whole or key in self.held
            self.pool.abort(item)
        del self.reserved[key]

    @rule(key=KEY)
    def use(self, key):
        item = self.pool.get(key)
        assert item is self.held.get(key)
        if item is not None:
            self.pool.use(item)
            self.used.append(item)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def unuse(self, data):
        item = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        leaving = item.state is ObjectState.LEAVING
        assert self.pool.unuse(item) == (leaving and item not in self.used)

    @rule(key=KEY)
    def remove(self, key):
        item = self.held.pop(key, None)
        if item is not None:
            assert self.pool.remove(item) == (item.uses == 0)

    @rule(key=KEY, pin=st.sampled_from(Pin))
    def set_pin(self, key, pin):
        if key in self.held:
            self.pool.set_pin(self.held[key], pin)
            assert self.held[key].pin is pin

    @rule()
    def begin_eviction(self):
        victim = self.pool.begin_eviction()
        if victim is not None:
            assert victim not in self.evicting
            self.evicting.append(victim)

    @precondition(lambda self: self.evicting)
    @rule()
    def end_eviction(self):
        victim = self.evicting.pop(0)
        spared = victim.uses > 0 or victim.pin is Pin.HARD
        was_held = victim.state is ObjectState.COMMITTED
        gone = self.pool.end_eviction(victim)
        assert gone == (not spared or not was_held)
        if gone and was_held:
            del self.held[victim.key]

    def stuck_bytes(self):
        """Memory that no eviction frees."""
        stuck = [
            *self.reserved.values(),
            *(item for item in self.held.values() if item.uses or item.pin is Pin.HARD),
            *(item for item in self.evicting if item.state is ObjectState.COMMITTED),
            *(item for item in self.used if item.state is ObjectState.LEAVING),
        ]
        return sum(sum(e.length_bytes for e in item.extents) for item in {*stuck})

    @invariant()
    def memory_adds_up(self):
        alive = {
            *self.reserved.values(),
            *self.held.values(),
            *(item for item in self.used if item.state is ObjectState.LEAVING),
        }
        taken = sum(extent.length_bytes for item in alive for extent in item.extents)
        assert taken + self.allocator.free_bytes == CAPACITY
        assert {item.key for item in self.pool.held()} == set(self.held)
        for item in self.used:
            assert item.state in (ObjectState.COMMITTED, ObjectState.LEAVING)


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_pool_laws(eviction):
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("Laws", (PoolLaws,), {"eviction": eviction})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=50, stateful_step_count=40, deadline=None)
    )
