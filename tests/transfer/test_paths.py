import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from snowskin.transfer.paths import (
    COOLDOWN_LEAST_S,
    COOLDOWN_LONE_S,
    COOLDOWN_MOST_S,
    ESTIMATE_LIFE_S,
    LinkEstimate,
    Path,
    PathTable,
)

PREFERRED = [Path("peer", "tcp", f"10.0.0.{number}", 7) for number in (1, 2)]
SECONDARY = [Path("peer", "tcp", "10.0.0.9", 7, tier=1)]
PATHS = [*PREFERRED, *SECONDARY]
MIB = 1 << 20


def fail(table, path, now_s, cost_s=0.0):
    table.fail(table.begin(path, MIB), now_s, cost_s=cost_s)


def carry(table, path, bytes_per_s, length_bytes=MIB):
    flight = table.begin(path, length_bytes)
    flight.landed_bytes = length_bytes
    table.end(flight, 0.0, active_s=length_bytes / bytes_per_s)


def test_the_secondary_path_is_taken_only_when_no_preferred_one_can_be():
    table = PathTable()
    assert table.usable(PATHS, 0.0) == tuple(PREFERRED)
    fail(table, PREFERRED[0], 0.0, cost_s=9.0)
    assert table.usable(PATHS, 0.0) == (PREFERRED[1],)
    fail(table, PREFERRED[1], 0.0, cost_s=9.0)
    assert table.usable(PATHS, 0.0) == tuple(SECONDARY)


def test_a_path_cools_down_twice_as_long_after_each_failure_up_to_a_bound():
    table, now_s = PathTable(), 0.0
    lengths_s = []
    for _ in range(12):
        fail(table, PREFERRED[0], now_s)
        lengths_s.append(table.path_stat(now_s)[0].cooling_s)
        now_s += lengths_s[-1]
    assert lengths_s[:3] == pytest.approx([COOLDOWN_LEAST_S * 2**power for power in range(3)])
    assert lengths_s[-1] == pytest.approx(COOLDOWN_MOST_S)
    assert table.usable(PREFERRED[:1], now_s) == (PREFERRED[0],)
    carry(table, PREFERRED[0], 1e9)
    fail(table, PREFERRED[0], now_s)
    assert table.path_stat(now_s)[0].cooling_s == pytest.approx(COOLDOWN_LEAST_S)


def test_a_failure_that_took_long_to_notice_cools_down_longer():
    table = PathTable()
    fail(table, PREFERRED[0], 5.0, cost_s=1.0)
    assert table.path_stat(5.0)[0].cooling_s == pytest.approx(4.0)


def test_the_last_path_is_tried_again_soon():
    table = PathTable()
    fail(table, PREFERRED[0], 0.0, cost_s=100.0)
    assert table.usable(PREFERRED[:1], COOLDOWN_LONE_S - 0.01) == ()
    assert table.choose(PREFERRED[:1], MIB, COOLDOWN_LONE_S - 0.01) is None
    assert table.usable_in_s(PREFERRED[:1], COOLDOWN_LONE_S - 0.5) == pytest.approx(0.5)
    assert table.choose(PREFERRED[:1], MIB, COOLDOWN_LONE_S) == PREFERRED[0]


def test_the_path_is_taken_that_would_be_done_first():
    table = PathTable()
    carry(table, PREFERRED[0], 1e9)
    carry(table, PREFERRED[1], 4e9)
    taken = []
    for _ in range(5):
        taken.append(table.choose(PREFERRED, MIB, 0.0))
        table.begin(taken[-1], MIB)
    assert [PREFERRED.index(path) for path in taken] == [1, 1, 1, 0, 1]


def test_a_path_that_was_never_tried_is_tried():
    table = PathTable()
    carry(table, PREFERRED[0], 1e9)
    table.begin(PREFERRED[0], MIB)
    assert table.choose(PREFERRED, MIB, 0.0) == PREFERRED[1]


def test_a_link_is_as_fast_as_its_usable_paths_together_and_as_busy_as_all():
    table = PathTable()
    carry(table, PREFERRED[0], MIB)
    carry(table, PREFERRED[1], 2 * MIB)
    assert table.link_stat(0.0) == (LinkEstimate("peer", 0, 3 * MIB, None, 2, 2),)
    table.begin(PREFERRED[0], 300)
    fail(table, PREFERRED[1], 0.0)
    assert table.link_stat(0.0) == (LinkEstimate("peer", 300, MIB, None, 2, 1),)


def test_the_rate_of_a_link_is_forgotten_when_it_was_not_measured_for_long():
    table = PathTable()
    carry(table, PREFERRED[0], MIB)
    table.end(table.begin(PREFERRED[0], 10), ESTIMATE_LIFE_S, latency_s=0.5)
    assert table.link_stat(ESTIMATE_LIFE_S) == (LinkEstimate("peer", 0, MIB, 0.5, 1, 1),)
    assert table.link_stat(ESTIMATE_LIFE_S + 1) == (LinkEstimate("peer", 0, None, 0.5, 1, 1),)


def test_what_the_source_has_not_written_yet_makes_no_path_busy():
    table = PathTable()
    flight = table.begin(PREFERRED[0], 5 * MIB)
    flight.landed_bytes = MIB
    assert table.link_stat(0.0)[0].bytes_in_flight == 4 * MIB
    flight.is_waiting = True
    assert table.link_stat(0.0)[0].bytes_in_flight == 0
    assert table.choose(PREFERRED, MIB, 0.0) == PREFERRED[0]


def test_what_a_failed_path_did_not_bring_is_counted():
    table = PathTable()
    flight = table.begin(PREFERRED[0], 10 * MIB)
    flight.landed_bytes = 3 * MIB
    table.fail(flight, 1.0, cost_s=0.0)
    stat = table.path_stat(1.0)[0]
    assert (stat.landed_bytes, stat.retried_bytes, stat.bytes_in_flight) == (3 * MIB, 7 * MIB, 0)
    assert (stat.failures, stat.cooldowns) == (1, 1)


@given(st.lists(st.integers(0, 40), max_size=200))
def test_no_more_paths_are_remembered_than_allowed(numbers):
    table = PathTable(limit=8)
    for number in numbers:
        carry(table, Path("peer", "tcp", "10.0.0.1", number), 1e9)
    assert len(table.path_stat(0.0)) == min(8, len(set(numbers)))


class PathUse(RuleBasedStateMachine):
    """Whatever happens to paths, there is always one to be taken, now or soon."""

    def __init__(self):
        super().__init__()
        self.table = PathTable()
        self.now_s = 0.0
        self.asked = []

    @rule(by_s=st.floats(0, 3))
    def wait(self, by_s):
        self.now_s += by_s

    @rule(length_bytes=st.integers(1, 1 << 30))
    def ask(self, length_bytes):
        path = self.table.choose(PATHS, length_bytes, self.now_s)
        assert (path is None) == (self.table.usable_in_s(PATHS, self.now_s) > 0)
        if path is not None:
            assert path in self.table.usable(PATHS, self.now_s)
            self.asked.append(self.table.begin(path, length_bytes))

    @rule(how=st.sampled_from(["end", "fail", "cancel"]), part=st.floats(0, 1))
    def settle(self, how, part):
        if not self.asked:
            return
        flight = self.asked.pop(0)
        flight.landed_bytes = int(part * flight.asked_bytes)
        if how == "end":
            self.table.end(flight, self.now_s, active_s=part + 1e-3)
        elif how == "cancel":
            self.table.cancel(flight)
        else:
            self.table.fail(flight, self.now_s, cost_s=10 * part)

    @rule(part=st.floats(0, 1), waits=st.booleans())
    def go_on(self, part, waits):
        for flight in self.asked[:1]:
            flight.landed_bytes = int(part * flight.asked_bytes)
            flight.is_waiting = waits

    @invariant()
    def bytes_in_flight_are_those_on_their_way(self):
        busy = sum(
            flight.asked_bytes - flight.landed_bytes
            for flight in self.asked
            if not flight.is_waiting
        )
        assert sum(stat.bytes_in_flight for stat in self.table.path_stat(self.now_s)) == busy

    @invariant()
    def some_path_may_be_used_before_long(self):
        assert self.table.usable_in_s(PATHS, self.now_s) <= COOLDOWN_LONE_S
        assert self.table.usable(PATHS, self.now_s + COOLDOWN_LONE_S)


TestPathUse = PathUse.TestCase
