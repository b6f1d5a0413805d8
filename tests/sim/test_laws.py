from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snowskin.sim.config import Fault, LinkSlows, NodeDies
from snowskin.sim.simulate import simulate
from snowskin.terms.ids import NodeId
from snowskin.trace.records import TraceRequest
from tests.sim.worlds import BLOCK_TOKENS, config, trace

NAMES = [NodeId(f"{role}-{index}") for role in ("prefill", "decode") for index in range(3)]


@st.composite
def chains(draw: st.DrawFn) -> TraceRequest:
    """A request of one of few families, so that prefixes are shared."""
    family = draw(st.integers(0, 3))
    shared = draw(st.integers(0, 12))
    own = draw(st.integers(0, 12))
    serial = draw(st.integers(0, 10_000))
    # Equal blocks follow equal blocks: what is its own is told apart by what it follows.
    first = 1_000_000 + ((family * 13 + shared) * 10_001 + serial) * 100
    blocks = (*range(family * 100, family * 100 + shared), *range(first, first + own))
    tokens = len(blocks) * BLOCK_TOKENS + draw(st.integers(1, BLOCK_TOKENS - 1))
    return TraceRequest(draw(st.floats(0, 20)), tokens, draw(st.integers(0, 300)), blocks)


faults: st.SearchStrategy[Fault] = st.one_of(
    st.builds(NodeDies, st.sampled_from(NAMES), st.floats(0, 25), st.floats(0.1, 10)),
    st.builds(
        LinkSlows,
        st.sampled_from(NAMES),
        st.floats(0, 25),
        st.floats(0.1, 10),
        st.sampled_from([0.5, 0.01, 0.0001]),
    ),
)


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(chains(), min_size=1, max_size=16),
    blocks=st.sampled_from([26, 40, 500]),
    policy=st.sampled_from(["kvcache-centric", "cache-aware", "load-balance", "random"]),
    admission=st.sampled_from(["none", "baseline", "early", "predicted"]),
    slo=st.sampled_from([(30.0, 0.1), (2.0, 0.028)]),
    sequence_limit=st.sampled_from([1, 3, 64]),
    sudden=st.lists(faults, max_size=3),
    overlap=st.booleans(),
)
def test_random_worlds_with_faults_keep_every_law(
    requests: list[TraceRequest],
    blocks: int,
    policy: str,
    admission: str,
    slo: tuple[float, float],
    sequence_limit: int,
    sudden: list[Fault],
    overlap: bool,
) -> None:
    settings_ = config(
        prefill_nodes=3,
        decode_nodes=3,
        blocks=blocks,
        policy=policy,
        admission=admission,
        ttft_slo_s=slo[0],
        tbt_slo_s=slo[1],
        sequence_limit=sequence_limit,
        device_tokens=20_000,
        faults=tuple(sudden),
        overlap=overlap,
    )
    outcome = simulate(trace(*requests), settings_, check=True)
    summary = outcome.summary
    assert summary["requests"] == len(requests)
    left = summary["completed"] + summary["rejected"] + summary["failed"]
    assert left == summary["requests"]
