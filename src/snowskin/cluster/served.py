"""The requests that were served of late, as a trace has them: lengths and sharing, no text."""

from __future__ import annotations

import hashlib
from collections import deque
from itertools import islice

from snowskin.cluster.flight import Flight
from snowskin.terms.ids import BlockKey
from snowskin.terms.serving import ServedRequest

REMEMBERED_REQUESTS = 10_000
REMEMBERED_BLOCKS = 500_000
"""Over all remembered requests: about 20 MB."""
PAGE_BLOCKS = 50_000
"""A page ends with the request that reaches so many: about 1 MB on a wire."""
PAGE_REQUESTS = 1000
SALT_BYTES = 16


class Served:
    """The last served requests, in the order of their ends. Bounded in requests and in blocks.

    A block's name is a keyed hash of its key: equal prefixes have equal names, and without the
    salt, which leaves this process in no way, no guess at a prompt can be tested against a name.

    Args:
        salt: secret and random; another one gives other names.
        started_s: the moment from which arrivals are counted, on the flights' clock.
    """

    def __init__(self, *, salt: bytes, started_s: float) -> None:
        self._salt = salt
        self._started_s = started_s
        self._requests: deque[ServedRequest] = deque()
        self._blocks = 0
        self._last = 0

    def note(self, flight: Flight) -> None:
        """A request has ended. Without any token, how much it would have taken is unknown."""
        if not flight.token_times_s:
            return
        self._last += 1
        request = flight.request
        served = ServedRequest(
            number=self._last,
            arrival_s=flight.arrived_s - self._started_s,
            prompt_tokens=len(request.tokens),
            output_tokens=len(flight.token_times_s),
            blocks=tuple(map(self._name, request.keys)),
        )
        self._requests.append(served)
        self._blocks += len(served.blocks)
        while len(self._requests) > REMEMBERED_REQUESTS or self._blocks > REMEMBERED_BLOCKS:
            self._blocks -= len(self._requests.popleft().blocks)

    def after(self, number: int) -> tuple[ServedRequest, ...]:
        """The next page of requests with a number above ``number``; empty when there is none."""
        page: list[ServedRequest] = []
        blocks = 0
        known = self._last - len(self._requests)
        for request in islice(self._requests, max(0, number - known), None):
            page.append(request)
            blocks += len(request.blocks)
            if len(page) == PAGE_REQUESTS or blocks >= PAGE_BLOCKS:
                break
        return tuple(page)

    def _name(self, key: BlockKey) -> int:
        digest = hashlib.blake2b(key, key=self._salt, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1
