"""The waiting room: requests that no node can take now, but soon will.

Where a cluster has one node of a role, its loss would otherwise fail every queued request, though
the node is back in seconds.
"""

from __future__ import annotations

from math import inf

from snowskin.conductor.state import Flight
from snowskin.terms.ids import RequestId


class WaitingRoom:
    """Requests that wait for a node, each for at most ``hold_s``, in the order of their coming.

    New ones are let in only while the loss of a node is fresh, and only as many as the prefill
    nodes would have queued: a cluster that stays broken says so at once.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._until_s: dict[RequestId, float] = {}
        self.flights: dict[RequestId, Flight] = {}
        """To be read; in the order of their coming."""
        self._closes_s = -inf
        self._places = 0

    def __len__(self) -> int:
        return len(self.flights)

    def __contains__(self, request: RequestId) -> bool:
        return request in self.flights

    def open(self, now_s: float, *, places: int) -> None:
        """The last node of a role is gone, and on its way back as far as anybody knows."""
        self._closes_s = now_s + self._hold_s
        self._places = places

    def is_open(self, now_s: float) -> bool:
        """Whether it is worth waiting for a node."""
        return now_s < self._closes_s

    def is_full(self) -> bool:
        """Whether as many wait as may be queued."""
        return len(self.flights) >= self._places

    def add(self, flight: Flight, now_s: float) -> None:
        """A request waits from now on."""
        request = flight.arrived.request
        self.flights[request] = flight
        self._until_s[request] = now_s + self._hold_s

    def remove(self, request: RequestId) -> Flight | None:
        """A request waits no longer; None if it did not."""
        self._until_s.pop(request, None)
        return self.flights.pop(request, None)

    def first(self) -> Flight | None:
        """Who has waited longest."""
        return next(iter(self.flights.values()), None)

    def next_expiry_s(self) -> float | None:
        """When the first has waited for too long; None where nobody waits."""
        return next(iter(self._until_s.values()), None)
