from __future__ import annotations

import pytest

from snowskin.terms.errors import InvalidInput
from snowskin.trace.records import Trace, TraceRequest, trace_of


def trace(*prompts: tuple[int, ...]) -> Trace:
    requests = [TraceRequest(float(at), 100, 1, blocks) for at, blocks in enumerate(prompts)]
    return trace_of("t", requests, block_tokens=10)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([(1, 2, 3), (), (1, 9, 3)], "'t': block 3 follows 9 in request 3, but 2 in request 1"),
        ([(4,), (6,), (5, 4)], "block 4 follows 5 in request 3, but nothing in request 1"),
        ([(2**60, 7), (7,)], f"block 7 follows nothing in request 2, but {2**60} in request 1"),
        ([(3, 3)], "block 3 follows 3 in request 1, but nothing in request 1"),
    ],
)
def test_a_block_that_does_not_stand_for_its_prefix_is_refused_by_name(
    prompts: list[tuple[int, ...]], told: str
) -> None:
    with pytest.raises(InvalidInput, match=told):
        trace(*prompts)


def test_requests_are_counted_as_they_stand_whenever_they_arrive() -> None:
    requests = [TraceRequest(float(at), 10, 1, blocks) for at, blocks in ((2, (1, 2)), (1, (2,)))]
    with pytest.raises(InvalidInput, match="follows nothing in request 2, but 1 in request 1"):
        trace_of("t", requests, block_tokens=10)


def test_prompts_may_part_and_have_no_blocks() -> None:
    assert len(trace((1, 2, 3), (), (1, 2, 9), (1, 2, 3, 2**60), ())) == 5


def test_requests_come_within_a_year() -> None:
    far = [TraceRequest(0.0, 100, 1, ()), TraceRequest(366 * 86_400 + 1.0, 100, 1, ())]
    with pytest.raises(InvalidInput, match="more than a year"):
        trace_of("t", far, block_tokens=10)
    with pytest.raises(InvalidInput, match=r"at speed 1e-09 the last request of 't'"):
        trace((1,), (2,)).sped_up(1e-9)
