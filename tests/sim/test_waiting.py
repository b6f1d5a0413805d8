"""A cluster with one node of a role outlives it, in simulation as in life."""

from __future__ import annotations

import pytest

from snowskin.sim.config import NodeDies
from snowskin.sim.simulate import simulate
from snowskin.terms.ids import NodeId

from .worlds import config, request, trace

REQUESTS = trace(*[request(i / 100, tuple(range(100 * i, 100 * i + 60))) for i in range(10)])
LONE = {"prefill_nodes": 1, "decode_nodes": 1, "blocks": 2000}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_loss_of_the_only_node_of_a_role_costs_time_and_no_request_without_a_token(
    role: str,
) -> None:
    dies = NodeDies(NodeId(f"{role}-0"), at_s=0.05, restart_s=20.0)
    healthy = simulate(REQUESTS, config(**LONE)).summary
    harmed = simulate(REQUESTS, config(**LONE, faults=(dies,)), check=True).summary
    assert harmed["completed"] == 10
    assert harmed["ttft_mean_s"] > healthy["ttft_mean_s"] + 15


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_do_not_wait_for_ever_for_a_node_that_stays_away(role: str) -> None:
    dies = NodeDies(NodeId(f"{role}-0"), at_s=0.05, restart_s=1000.0)
    harmed = simulate(REQUESTS, config(**LONE, faults=(dies,)), check=True).summary
    assert harmed["completed"] == 0
    assert harmed["failed"] == 5, "those that had been placed"
    assert harmed["rejected"] == 5
    assert harmed["span_s"] < 60
