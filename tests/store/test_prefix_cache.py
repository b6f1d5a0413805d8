"""The hit ratios of the released conversation trace, as FAST '25's authors' file gives them."""

import json
import os
from pathlib import Path

import pytest

from snowskin.store.eviction import LFU, LRU, LengthAware
from snowskin.store.prefix_cache import PrefixCache

TRACES = Path(
    os.environ.get("SNOWSKIN_TRACES", Path(__file__).parents[2].parent / "shared" / "traces")
)
TRACE = TRACES / "conversation_trace.jsonl"


@pytest.fixture(scope="module")
def requests():
    if not TRACE.is_file():
        pytest.skip(f"no {TRACE}; set SNOWSKIN_TRACES to the folder of the released traces")
    with TRACE.open() as lines:
        return [tuple(json.loads(line)["hash_ids"]) for line in lines]


def hit_ratio(requests, capacity, policy):
    cache = PrefixCache(capacity, policy)
    return sum(map(cache.access, requests)) / sum(map(len, requests))


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (1000, 0.0445),
        (5859, 0.1355),
        (10_000, 0.2112),
        (30_000, 0.3257),
        (50_000, 0.3546),
        (100_000, 0.3637),
        (None, 0.3664),
    ],
)
def test_lru_reaches_the_published_hit_ratio(requests, capacity, expected):
    assert hit_ratio(requests, capacity, LRU()) == pytest.approx(expected, abs=0.002)


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(1000, 0.048), (10_000, 0.132), (30_000, 0.276), (50_000, 0.344), (100_000, 0.363)],
)
def test_lfu_reaches_the_published_hit_ratio(requests, capacity, expected):
    assert hit_ratio(requests, capacity, LFU()) == pytest.approx(expected, abs=0.002)


def test_length_aware_evicts_the_deepest_of_the_least_used():
    cache = PrefixCache(3, LengthAware())
    cache.access((1, 2, 3))
    cache.access((1,))
    cache.access((9,))
    assert [cache.match((key,)) for key in (1, 2, 3, 9)] == [1, 1, 0, 1]


def test_a_cache_of_no_block_never_hits():
    cache = PrefixCache(0, LRU())
    assert [cache.access((1, 2)), cache.access((1, 2)), len(cache)] == [0, 0, 0]


def test_only_a_contiguous_prefix_is_a_hit():
    cache = PrefixCache(None, LRU())
    cache.access((1, 2, 3))
    assert cache.access((1, 9, 3)) == 1
    assert cache.match((9, 3)) == 2
    assert cache.match((8, 3)) == 0
