import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from snowskin.store.eviction import LFU, LRU, POLICIES, LengthAware, make_policy
from snowskin.terms.errors import InvalidInput


def order(policy):
    """All exposed keys in the order of their eviction."""
    keys = []
    while (key := policy.victim()) is not None:
        policy.remove(key)
        keys.append(key)
    return keys


def with_keys(policy, *keys):
    for depth, key in enumerate(keys):
        policy.insert(key, depth=depth)
    return policy


def test_lru_evicts_what_was_used_longest_ago():
    policy = with_keys(LRU(), "a", "b", "c")
    policy.touch("a")
    assert order(policy) == ["b", "c", "a"]


def test_lfu_evicts_what_was_used_least_and_among_equals_longest_ago():
    policy = with_keys(LFU(), "a", "b", "c", "d")
    for key in "aabd":
        policy.touch(key)
    assert order(policy) == ["c", "b", "d", "a"]


def test_lfu_forgets_the_count_of_an_evicted_key():
    policy = with_keys(LFU(), "a")
    policy.touch("a")
    policy.remove("a")
    policy.insert("b")
    policy.insert("a")
    assert order(policy) == ["b", "a"]


def test_length_aware_evicts_the_deepest_among_equally_used():
    policy = with_keys(LengthAware(), "root", "middle", "leaf")
    policy.touch("leaf")
    assert order(policy) == ["middle", "root", "leaf"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_protected_key_is_never_the_victim_but_its_uses_count(name):
    policy = with_keys(make_policy(name), "a", "b")
    policy.protect("a")
    policy.touch("a")
    assert (policy.victim(), policy.exposed_count()) == ("b", 1)
    policy.expose("a")
    assert order(policy) == ["b", "a"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_key_is_not_inserted_twice(name):
    policy = with_keys(make_policy(name), "a")
    with pytest.raises(AssertionError, match="'a' is held already"):
        policy.insert("a")
    policy.protect("a")
    with pytest.raises(AssertionError, match="'a' is held already"):
        policy.insert("a")
    policy.remove("a")
    assert policy.victim() is None


def test_an_unknown_policy_is_refused_with_the_choice():
    with pytest.raises(InvalidInput, match="no eviction policy 'fifo'; choose from lru, lfu"):
        make_policy("fifo")


class Plain:
    """The policies by their definition: sort by rank, then by the time of the last use."""

    def __init__(self, rank):
        self.rank = rank
        self.keys = {}  # key -> [count, depth, protected, used at]
        self.clock = 0

    def tick(self):
        self.clock += 1
        return self.clock

    def insert(self, key, *, depth=0):
        self.keys[key] = [1, depth, False, self.tick()]

    def touch(self, key):
        self.keys[key][0] += 1
        self.keys[key][3] = self.tick()

    def protect(self, key):
        self.keys[key][2] = True

    def expose(self, key):
        self.keys[key][2] = False
        self.keys[key][3] = self.tick()

    def remove(self, key):
        del self.keys[key]

    def victim(self):
        exposed = [
            (self.rank(*use[:2]), use[3], key) for key, use in self.keys.items() if not use[2]
        ]
        return min(exposed)[2] if exposed else None


RANKS = {
    "lru": lambda count, depth: (),
    "lfu": lambda count, depth: (count,),
    "length-aware": lambda count, depth: (count, -depth),
}


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None, max_examples=150)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=80))
def test_every_policy_agrees_with_its_definition(name, steps):
    fast, plain = make_policy(name), Plain(RANKS[name])
    for action, key in steps:
        if key not in plain.keys:
            verbs = [("insert", {"depth": key // 2})]
        elif action == 0:
            verbs = [("touch", {})]
        elif action == 1:
            verbs = [("expose" if plain.keys[key][2] else "protect", {})]
        elif action == 2:
            verbs = [("remove", {})]
        else:
            victim = plain.victim()
            assert fast.victim() == victim
            if victim is not None:
                fast.remove(victim)
                plain.remove(victim)
            continue
        for verb, arguments in verbs:
            getattr(fast, verb)(key, **arguments)
            getattr(plain, verb)(key, **arguments)
        assert fast.victim() == plain.victim()
        assert fast.exposed_count() == sum(not use[2] for use in plain.keys.values())
    assert len(order(fast)) == sum(not use[2] for use in plain.keys.values())


@pytest.mark.parametrize("name", POLICIES)
def test_the_inner_tables_do_not_grow_with_the_number_of_operations(name):
    policy = make_policy(name)
    for number in range(20_000):
        policy.insert(number, depth=number % 50)
        for _ in range(number % 4):
            policy.touch(number)
        if number >= 100:
            policy.remove(policy.victim())
    policy.insert("hot")
    for _ in range(20_000):
        policy.touch("hot")
    assert policy.exposed_count() == 101
    names = [name for name in dir(policy) if not name.startswith("__")]
    tables = [getattr(policy, name) for name in names]
    sizes = [len(table) for table in tables if hasattr(table, "__len__")]
    assert max(sizes) < 1000
