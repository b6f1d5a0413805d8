"""What the API needs from the cluster; ``cluster.front`` fulfils it without importing this room."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from snowskin.terms.ids import RequestId
from snowskin.terms.request import GenerationRequest
from snowskin.terms.serving import (
    ClusterStatus,
    Explanation,
    ServedPage,
    ServingInfo,
    TokensArrived,
)


class Generation(Protocol):
    """One generation under way. It is iterated once, by one reader.

    Iteration ends after the message with a finish reason. It raises RequestFailed if the
    generation cannot be finished (Overloaded or NodeUnavailable too, should the verdict come after
    ``submit`` returned, but never after a token). Tokens that the reader has not yet taken are
    merged into fewer messages or held in a bounded queue: a slow reader costs bounded memory.
    """

    @property
    def request(self) -> GenerationRequest:
        """What was submitted."""
        ...

    def __aiter__(self) -> AsyncIterator[TokensArrived]:
        """The tokens as they come."""
        ...

    def complete(self) -> None:
        """The answer is whole although the model would go on: a stop string has appeared.

        Frees all that the generation holds, at once. Harmless after the end.
        """
        ...

    def cancel(self) -> None:
        """Free all that the generation holds, at once. Harmless after the end, or twice.

        It does not wait; an iteration that waits for a token ends soon.
        """
        ...


class Backend(Protocol):
    """The cluster as the API sees it. All methods are called on the event loop."""

    @property
    def info(self) -> ServingInfo:
        """What is served."""
        ...

    async def submit(self, request: GenerationRequest) -> Generation:
        """Place a request.

        If the caller is cancelled while this waits, the request is cancelled too.

        Raises:
            Overloaded: not admitted; answered as 429 with Retry-After.
            NodeUnavailable: no node of a needed role is up; answered as 503.
        """
        ...

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request went where it went; None if it is unknown or forgotten."""
        ...

    def served(self, after: int) -> ServedPage:
        """The next of the remembered requests whose number is above ``after``. Bounded."""
        ...

    def status(self) -> ClusterStatus:
        """One snapshot, for ``/health``, ``/metrics`` and ``/snowskin/status``. Cheap."""
        ...
