from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.sim.cache_curve import cache_curve
from snowskin.terms.errors import InvalidInput
from snowskin.trace.formats import read_trace
from snowskin.trace.records import TraceBuilder, TraceRequest, trace_of
from snowskin.trace.released import released_trace
from tests.trace.chains import block_ids

RELEASED = released_trace("conversation_trace.jsonl")
PUBLISHED = {
    "lru": {
        1_000: 0.0445,
        5_859: 0.1355,
        10_000: 0.2112,
        30_000: 0.3257,
        50_000: 0.3546,
        100_000: 0.3637,
        None: 0.3664,
    },
    "lfu": {1_000: 0.048, 10_000: 0.132, 30_000: 0.276, 50_000: 0.344, 100_000: 0.363},
}


@pytest.mark.skipif(RELEASED is None, reason="the released trace is not at hand")
@pytest.mark.parametrize("policy", list(PUBLISHED))
def test_the_released_trace_has_the_measured_hit_ratios(policy: str) -> None:
    assert RELEASED is not None
    expected = PUBLISHED[policy]
    points = cache_curve(read_trace(RELEASED), [policy], list(expected))
    for point in points:
        assert point.hit_ratio == pytest.approx(expected[point.blocks], abs=0.002), point


@given(prompts=st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=20))
def test_lru_gains_by_room_and_no_policy_beats_the_bound(prompts: list[list[int]]) -> None:
    trace = trace_of(
        "t",
        [TraceRequest(float(at), 10, 1, ids) for at, ids in enumerate(block_ids(prompts))],
        block_tokens=1,
    )
    sizes = [1, 2, 4, 8, 16, 32, None]
    ratios = [p.hit_ratio for p in cache_curve(trace, ["lru"], sizes)]
    assert ratios == sorted(ratios)
    for policy in ("lru", "lfu", "length-aware"):
        points = cache_curve(trace, [policy, "belady"], sizes)
        for online, bound in zip(points[: len(sizes)], points[len(sizes) :], strict=True):
            assert online.hit_ratio <= bound.hit_ratio + 1e-12


def test_the_bound_keeps_what_is_needed_soonest() -> None:
    trace = trace_of(
        "t",
        [TraceRequest(float(at), 10, 1, (block,)) for at, block in enumerate([1, 2, 3, 1, 2, 3])],
        block_tokens=10,
    )
    (lru, bound) = cache_curve(trace, ["lru", "belady"], [2])
    assert lru.hit_ratio == 0.0
    assert bound.hit_ratio == pytest.approx(2 / 6)


def test_a_trace_without_sharing_has_no_curve() -> None:
    builder = TraceBuilder("azure", block_tokens=512, sharing_known=False)
    builder.add([TraceRequest(0.0, 600, 1, (0,))])
    with pytest.raises(InvalidInput, match="does not tell"):
        cache_curve(builder.build(), ["lru"], [None])
