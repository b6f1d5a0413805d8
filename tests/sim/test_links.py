from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snowskin.sim.calendar import Calendar, Rank
from snowskin.sim.links import Flow, Network
from snowskin.terms.ids import NodeId

A, B, C, D = (NodeId(name) for name in "abcd")


class Bench:
    def __init__(self, rate: float = 100.0, latency_s: float = 0.0) -> None:
        self.calendar = Calendar()
        self.network = Network(self.calendar, latency_s=latency_s, rate_bytes_per_s=rate)
        for node in (A, B, C, D):
            self.network.join(node)
        self.done: dict[str, float] = {}

    def send(
        self, name: str, source: NodeId, to: NodeId, size: float, *, cap: float = math.inf
    ) -> Flow:
        return self.network.start(
            source, to, size, cap_bytes_per_s=cap, on_done=self._done, about=name
        )

    def _done(self, name: str) -> None:
        self.done[name] = self.calendar.now_s


def test_a_lone_flow_takes_latency_and_size_over_rate() -> None:
    bench = Bench(latency_s=0.5)
    bench.send("only", A, B, 200.0)
    bench.calendar.run()
    assert bench.done == {"only": pytest.approx(2.5)}
    assert bench.network.moved_bytes == 200.0


def test_two_flows_out_of_one_node_share_its_port_and_the_longer_speeds_up() -> None:
    bench = Bench()
    bench.send("short", A, B, 100.0)
    bench.send("long", A, C, 200.0)
    bench.calendar.run()
    assert bench.done == {"short": pytest.approx(2.0), "long": pytest.approx(3.0)}


def test_two_flows_into_one_node_share_its_port() -> None:
    bench = Bench()
    bench.send("one", A, C, 100.0)
    bench.send("other", B, C, 100.0)
    bench.calendar.run()
    assert bench.done == {"one": pytest.approx(2.0), "other": pytest.approx(2.0)}


def test_flows_that_meet_at_no_port_do_not_slow_each_other() -> None:
    bench = Bench()
    bench.send("one", A, B, 100.0)
    bench.send("other", C, D, 100.0)
    bench.calendar.run()
    assert bench.done == {"one": pytest.approx(1.0), "other": pytest.approx(1.0)}


def test_latency_delays_a_flow_once_however_often_its_rate_changes() -> None:
    bench = Bench(latency_s=0.5)
    bench.send("long", A, B, 200.0)
    bench.calendar.at(1.0, Rank.COMPUTE, lambda _: bench.send("short", A, C, 50.0), None)
    bench.calendar.run()
    # Sent: 100 bytes alone, 50 beside the short one, 50 alone again, by 2.5 s.
    assert bench.done["short"] == pytest.approx(2.5)
    assert bench.done["long"] == pytest.approx(3.0)


def test_a_capped_flow_leaves_the_rest_to_others_until_it_is_uncapped() -> None:
    bench = Bench()
    capped = bench.send("capped", A, B, 60.0, cap=20.0)
    bench.send("free", A, C, 80.0)
    bench.calendar.at(1.0, Rank.COMPUTE, bench.network.uncap, capped)
    bench.calendar.run()
    assert bench.done == {"free": pytest.approx(1.0), "capped": pytest.approx(1.4)}


def test_a_cancelled_flow_never_arrives_and_frees_its_share() -> None:
    bench = Bench()
    cancelled = bench.send("cancelled", A, B, 1000.0)
    bench.send("stays", A, C, 100.0)
    bench.calendar.at(1.0, Rank.FAULT, bench.network.cancel, cancelled)
    bench.calendar.run()
    assert bench.done == {"stays": pytest.approx(1.5)}
    assert bench.network.active_count == 0


def test_a_slow_link_slows_what_is_under_way() -> None:
    bench = Bench()
    bench.send("only", A, B, 100.0)
    bench.calendar.at(0.5, Rank.FAULT, lambda _: bench.network.set_rate(B, 0.1), None)
    bench.calendar.run()
    assert bench.done == {"only": pytest.approx(5.5)}


flows = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from([A, B]), st.sampled_from([C, D]), st.floats(1, 500)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(flows)
def test_every_byte_arrives_and_no_port_carries_more_than_its_rate(
    wanted: list[tuple[float, NodeId, NodeId, float]],
) -> None:
    bench = Bench()
    for index, (at_s, source, to, size) in enumerate(wanted):
        bench.calendar.at(
            at_s,
            Rank.COMPUTE,
            lambda about: bench.send(*about),
            (str(index), source, to, size),
        )

    def ports_hold() -> None:
        for node in (A, B, C, D):
            for port in bench.network.ports(node):
                rates = [flow.rate_bytes_per_s for flow in port.flows]
                assert sum(rates) <= port.rate_bytes_per_s * (1 + 1e-9)

    bench.calendar.run(ports_hold)
    assert len(bench.done) == len(wanted)
    total = sum(size for _, _, _, size in wanted)
    assert bench.network.moved_bytes == pytest.approx(total)
    for node in (A, B):
        starts = [at_s for at_s, source, _, _ in wanted if source == node]
        sizes = [size for _, source, _, size in wanted if source == node]
        names = [str(i) for i, (_, source, _, _) in enumerate(wanted) if source == node]
        if names:
            last_s = max(bench.done[name] for name in names)
            assert last_s >= min(starts) + sum(sizes) / 100.0 - 1e-6
