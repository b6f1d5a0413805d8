"""Laws of the endpoint pool: bounded, nothing lost, and SIEVE spares what is in use."""

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from snowskin.transfer.endpoints import EndpointPool

PATHS = st.integers(0, 9)


class PoolUse(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = EndpointPool(limit=6, per_path=3)
        self.made = 0
        self.idle = {}
        self.out = []

    def close(self, endpoints):
        for endpoint in endpoints:
            self.idle.pop(endpoint, None)

    @rule(path=PATHS)
    def open_and_give(self, path):
        self.made += 1
        self.idle[self.made] = path
        self.close(self.pool.give(path, self.made))

    @rule(path=PATHS)
    def take(self, path):
        endpoint = self.pool.take(path)
        if endpoint is None:
            assert path not in self.idle.values()
        else:
            assert self.idle.pop(endpoint) == path
            self.out.append((path, endpoint))

    @rule()
    def give_back(self):
        if self.out:
            path, endpoint = self.out.pop()
            self.idle[endpoint] = path
            self.close(self.pool.give(path, endpoint))

    @rule(path=PATHS)
    def drop(self, path):
        dropped = self.pool.drop(path)
        assert all(self.idle[endpoint] == path for endpoint in dropped)
        self.close(dropped)
        assert path not in self.idle.values()

    @invariant()
    def it_holds_what_was_given_and_not_closed(self):
        assert len(self.pool) == len(self.idle) <= 6

    def teardown(self):
        assert set(self.pool.clear()) == set(self.idle)
        assert len(self.pool) == 0


TestPoolUse = PoolUse.TestCase


def test_the_endpoint_last_used_is_taken_first():
    pool = EndpointPool(limit=8, per_path=2)
    pool.give("a", 1)
    pool.give("a", 2)
    assert pool.give("a", 3) == (3,)
    assert (pool.take("a"), pool.take("a"), pool.take("a")) == (2, 1, None)


def test_a_path_in_use_is_spared_and_the_oldest_unused_goes():
    pool = EndpointPool(limit=3, per_path=1)
    for path in "abc":
        pool.give(path, path)
    pool.give("a", pool.take("a"))
    assert pool.give("d", "d") == ("b",)
    assert pool.give("e", "e") == ("c",)
    assert pool.give("f", "f") == ("d",), "the hand walks on; a was spared but once, yet is behind"
    assert pool.evicted_total == 3


@given(st.lists(st.integers(0, 400), min_size=200, max_size=600))
def test_paths_seen_once_do_not_push_out_those_in_steady_use(crowd):
    pool = EndpointPool(limit=8, per_path=1)
    steady = [f"steady {number}" for number in range(4)]
    for path in steady:
        pool.give(path, path)
    for once in crowd:
        for path in steady:
            pool.give(path, pool.take(path) or path)
        pool.give(once, pool.take(once) or once)
    assert all(pool.take(path) == path for path in steady)
