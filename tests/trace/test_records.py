from __future__ import annotations

import pytest

from snowskin.terms.errors import InvalidInput
from snowskin.trace.records import Trace, TraceRequest, trace_of


def trace(*prompts: tuple[int, ...]) -> Trace:
    requests = [TraceRequest(float(at), 100, 1, blocks) for at, blocks in enumerate(prompts)]
    return trace_of("t", requests, block_tokens=10)


@pytest.mark.parametrize(
    "prompts",
    [
        [(1, 2, 3), (), (1, 9, 3), (9, 3), (1, 2, 3)],
        [(4,), (6,), (5, 4), (5, 4)],
        [(2**60, 7), (7,), (2**60, 7, 7)],
        [(3, 3), (3, 3, 3)],
    ],
)
def test_ids_of_what_blocks_hold_become_ids_of_prefixes(prompts: list[tuple[int, ...]]) -> None:
    named = [request.blocks for request in trace(*prompts)]
    assert list(map(len, named)) == list(map(len, prompts))
    prefixes = [blocks[: end + 1] for blocks in prompts for end in range(len(blocks))]
    names = [name for blocks in named for name in blocks]
    pairs = set(zip(prefixes, names, strict=True))
    assert len(pairs) == len(set(prefixes)) == len(set(names))


def test_ids_of_prefixes_are_kept() -> None:
    prompts = [(1, 2, 3), (), (1, 2, 9), (1, 2, 3, 2**60), ()]
    assert [request.blocks for request in trace(*prompts)] == prompts


def test_requests_come_within_a_year() -> None:
    far = [TraceRequest(0.0, 100, 1, ()), TraceRequest(366 * 86_400 + 1.0, 100, 1, ())]
    with pytest.raises(InvalidInput, match="more than a year"):
        trace_of("t", far, block_tokens=10)
    with pytest.raises(InvalidInput, match=r"at speed 1e-09 the last request of 't'"):
        trace((1,), (2,)).sped_up(1e-9)
