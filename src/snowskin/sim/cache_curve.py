"""Hit ratio against cache size, with the store's own eviction policies."""

from __future__ import annotations

import heapq

import msgspec
import numpy as np

from snowskin.store.eviction import POLICIES
from snowskin.store.prefix_cache import PrefixCache
from snowskin.terms.errors import InvalidInput
from snowskin.trace.records import Trace

DEFINITION = (
    "block-weighted: blocks in the longest cached prefix of each prompt / all blocks; one cache "
    "shared by all requests, the last partial block named by the trace counts as a block"
)

BELADY = "belady"
"""Not a policy but a bound: it knows the future. Whatever of a prompt's blocks is held counts, even
behind a missing one, and of all blocks the one that is needed last goes, the new one included. No
policy has more hits at the same size."""


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
        if name not in (BELADY, *POLICIES):
            raise InvalidInput(
                f"no eviction policy {name!r}; choose from {', '.join((*POLICIES, BELADY))}",
                parameter="policy",
            )
    if any(size is not None and size < 1 for size in sizes):
        raise InvalidInput("a cache holds at least 1 block", parameter="blocks")
    ids = trace.block_ids.tolist()
    starts = trace.block_starts.tolist()
    prompts = [ids[starts[row] : starts[row + 1]] for row in range(len(trace))]
    total = max(1, len(ids))
    upcoming = next_uses(trace) if BELADY in policies else []

    def hits(name: str, size: int | None) -> int:
        return bound_hits(ids, upcoming, size) if name == BELADY else _hits(prompts, name, size)

    return [CachePoint(name, size, hits(name, size) / total) for name in policies for size in sizes]


def _hits(prompts: list[list[int]], policy: str, size: int | None) -> int:
    cache: PrefixCache[int] = PrefixCache(size, POLICIES[policy]())
    access = cache.access
    return sum(access(prompt) for prompt in prompts)


def next_uses(trace: Trace) -> list[int]:
    """For each block of the trace, where the same block comes next; the trace's length if never."""
    ids = trace.block_ids
    count = len(ids)
    order = np.lexsort((np.arange(count), ids))
    upcoming = np.full(count, count, dtype=np.int64)
    same = ids[order[1:]] == ids[order[:-1]]
    upcoming[order[:-1][same]] = order[1:][same]
    return list(upcoming.tolist())


def bound_hits(ids: list[int], upcoming: list[int], size: int | None) -> int:
    """Hits of Belady's bound (see ``BELADY``) with room for ``size`` blocks."""
    never = len(ids)
    held: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    hits = 0
    for block, later in zip(ids, upcoming, strict=True):
        if held.pop(block, None) is not None:
            hits += 1
        if later == never:
            continue
        held[block] = later
        heapq.heappush(furthest, (-later, block))
        while size is not None and len(held) > size:
            use, victim = heapq.heappop(furthest)
            if held.get(victim) == -use:
                del held[victim]
    return hits
