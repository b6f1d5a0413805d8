"""Hit ratio against cache size, with the store's own eviction policies."""

from __future__ import annotations

import msgspec

from snowskin.store.eviction import POLICIES, make_policy
from snowskin.store.prefix_cache import PrefixCache
from snowskin.terms.errors import InvalidInput
from snowskin.trace.records import Trace

DEFINITION = (
    "block-weighted: blocks in the longest cached prefix of each prompt / all blocks; one cache "
    "shared by all requests, the last partial block named by the trace counts as a block"
)


class CachePoint(msgspec.Struct, frozen=True):
    """One point of a curve."""

    policy: str
    blocks: int | None
    """Blocks that the cache holds; None: without limit."""
    hit_ratio: float


def cache_curve(trace: Trace, policies: list[str], sizes: list[int | None]) -> list[CachePoint]:
    """The hit ratio of every policy at every size; one pass over the trace for each.

    Raises:
        InvalidInput: the trace does not tell what is shared, or a policy or size is wrong.
    """
    if not trace.sharing_known:
        raise InvalidInput(
            f"the trace {trace.name!r} does not tell which prefixes are shared", parameter="trace"
        )
    for name in policies:
        make_policy(name)
    if any(size is not None and size < 1 for size in sizes):
        raise InvalidInput("a cache holds at least 1 block", parameter="blocks")
    ids = trace.block_ids.tolist()
    starts = trace.block_starts.tolist()
    prompts = [ids[starts[row] : starts[row + 1]] for row in range(len(trace))]
    total = max(1, len(ids))
    return [
        CachePoint(name, size, _hits(prompts, name, size) / total)
        for name in policies
        for size in sizes
    ]


def _hits(prompts: list[list[int]], policy: str, size: int | None) -> int:
    cache: PrefixCache[int] = PrefixCache(size, POLICIES[policy]())
    access = cache.access
    return sum(access(prompt) for prompt in prompts)
