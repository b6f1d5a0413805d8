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
        ([(1, 2, 3), (), (1, 9, 3)], "request 1: block 3 follows 2 here, but 9 elsewhere"),
        ([(4,), (5, 4)], "request 1: block 4 follows nothing here, but 5 elsewhere"),
        ([(2**60, 7), (7,)], "request 1: block 7 follows 1152921504606846976 here, but nothing"),
        ([(3, 3)], "request 1: block 3 follows nothing here, but 3 elsewhere"),
    ],
)
def test_a_block_that_does_not_stand_for_its_prefix_is_refused_by_name(
    prompts: list[tuple[int, ...]], told: str
) -> None:
    with pytest.raises(InvalidInput, match=told):
        trace(*prompts)


def test_prompts_may_part_and_have_no_blocks() -> None:
    assert len(trace((1, 2, 3), (), (1, 2, 9), (1, 2, 3, 2**60), ())) == 5
