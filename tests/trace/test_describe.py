from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.trace.describe import describe, prefix_blocks
from snowskin.trace.picture import draw_trace
from snowskin.trace.records import Trace, TraceRequest, trace_of
from snowskin.trace.released import released_trace
from tests.trace.chains import block_ids

RELEASED = released_trace("conversation_trace.jsonl")


def small() -> Trace:
    return trace_of(
        "small",
        [
            TraceRequest(0.0, 25, 4, (1, 2)),
            TraceRequest(1.0, 40, 6, (1, 2, 3, 4)),
            TraceRequest(4.0, 30, 8, (1, 9, 8)),
            TraceRequest(5.0, 5, 2, ()),
        ],
        block_tokens=10,
    )


def test_sharing_is_counted_by_each_stated_definition() -> None:
    summary = describe(small())
    assert summary.hit_ratio_blocks == pytest.approx(3 / 9)
    assert summary.hit_ratio_tokens == pytest.approx(30 / 100)
    assert summary.hit_ratio_requests == pytest.approx((0 + 20 / 40 + 10 / 30 + 0) / 4)
    assert summary.reusing_ratio == pytest.approx(2 / 4)
    assert (summary.blocks, summary.distinct_blocks) == (9, 6)


def test_lengths_and_rate_are_those_of_the_requests() -> None:
    summary = describe(small())
    assert (summary.requests, summary.duration_s, summary.rate_per_s) == (4, 5.0, 0.6)
    assert summary.prompt_tokens.mean == 25
    assert summary.output_tokens.max == 8


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=12))
def test_prefixes_equal_those_of_a_plain_walk(prompts: list[list[int]]) -> None:
    named = block_ids(prompts)
    trace = trace_of(
        "t",
        [TraceRequest(float(at), 100, 1, ids) for at, ids in enumerate(named)],
        block_tokens=1,
    )
    seen: set[int] = set()
    expected = []
    for ids in named:
        count = 0
        while count < len(ids) and ids[count] in seen:
            count += 1
        expected.append(count)
        seen.update(ids)
    assert prefix_blocks(trace).tolist() == expected


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "trace.png"
    draw_trace(small(), describe(small()), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(RELEASED is None, reason="the released trace is not at hand")
def test_the_released_trace_has_its_published_statistics() -> None:
    from snowskin.trace.formats import read_trace

    assert RELEASED is not None
    summary = describe(read_trace(RELEASED))
    assert summary.requests == 12_031
    assert summary.prompt_tokens.mean == pytest.approx(12_035, rel=0.001)
    assert summary.output_tokens.mean == pytest.approx(343, rel=0.01)
    assert summary.hit_ratio_blocks == pytest.approx(0.3664, abs=0.0001)
    assert summary.hit_ratio_tokens == pytest.approx(0.3736, abs=0.0001)
    assert summary.hit_ratio_requests == pytest.approx(0.4094, abs=0.0001)
