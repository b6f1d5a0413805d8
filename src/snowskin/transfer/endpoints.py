"""Which idle connections are kept. Pure: it holds endpoints of any kind and opens none.

Endpoints (connections that are open and idle) are pooled by path. When there are too many, SIEVE
chooses the path whose endpoints are closed: a hand walks from the oldest entry to the newest,
spares once what has been used since it last came by, and takes the first that has not. Unlike LRU,
an endpoint that is used again moves nowhere, and a crowd of paths that are used once does not push
out those in steady use. Source: Zhang et al., "SIEVE is Simpler than LRU", NSDI '24; Mooncake's
Transfer Engine keeps its endpoints the same way.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
E = TypeVar("E")


class EndpointPool(Generic[K, E]):
    """Idle endpoints by path, bounded, with SIEVE eviction.

    Args:
        limit: most idle endpoints of all paths together.
        per_path: most of one path.
    """

    def __init__(self, limit: int, per_path: int) -> None:
        self._limit = limit
        self._per_path = per_path
        self._idle: dict[K, list[E]] = {}
        """In the order in which the paths came."""
        self._visited: dict[K, bool] = {}
        self._hand: K | None = None
        self._count = 0
        self.evicted_total = 0

    def __len__(self) -> int:
        return self._count

    def take(self, path: K) -> E | None:
        """An idle endpoint of the path, the one last used; its taker may give it back."""
        idle = self._idle.get(path)
        if not idle:
            return None
        self._visited[path] = True
        self._count -= 1
        return idle.pop()

    def give(self, path: K, endpoint: E) -> tuple[E, ...]:
        """Keep an endpoint for later; those to be closed instead."""
        idle = self._idle.get(path)
        if idle is None:
            self._idle[path] = [endpoint]
            self._visited[path] = False
        elif len(idle) >= self._per_path:
            return (endpoint,)
        else:
            idle.append(endpoint)
        self._count += 1
        closed: list[E] = []
        while self._count > self._limit or len(self._idle) > self._limit:
            closed.extend(self._evict())
        return tuple(closed)

    def drop(self, path: K) -> tuple[E, ...]:
        """Forget a path; its endpoints are to be closed."""
        if path not in self._idle:
            return ()
        if self._hand == path:
            self._hand = self._after(path)
        del self._visited[path]
        endpoints = self._idle.pop(path)
        self._count -= len(endpoints)
        return tuple(endpoints)

    def clear(self) -> tuple[E, ...]:
        """Forget all paths; their endpoints are to be closed."""
        return tuple(endpoint for path in list(self._idle) for endpoint in self.drop(path))

    def _evict(self) -> tuple[E, ...]:
        hand = self._hand if self._hand is not None else next(iter(self._idle))
        while self._visited[hand]:
            self._visited[hand] = False
            newer = self._after(hand)
            hand = newer if newer is not None else next(iter(self._idle))
        self._hand = hand
        self.evicted_total += 1
        return self.drop(hand)

    def _after(self, path: K) -> K | None:
        """The path that came after this one, None where it was the newest."""
        paths = iter(self._idle)
        for one in paths:
            if one == path:
                return next(paths, None)
        return None
