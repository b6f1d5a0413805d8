"""What the front remembers: ended requests and their reasons, totals, one log line per request."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict

from snowskin.cluster.flight import Flight
from snowskin.cluster.served import Served
from snowskin.terms.commands import RejectCause
from snowskin.terms.events import FetchFinished
from snowskin.terms.ids import RequestId
from snowskin.terms.serving import Explanation, RequestState, TransferKind, TransferTotals

log = logging.getLogger("snowskin.requests")

REMEMBERED_REQUESTS = 10_000
"""Ended requests that ``snowskin explain`` can still tell about."""


class Ledger:
    """The front's book. Bounded in every way.

    Args:
        served: takes each request that ends.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._explanations: OrderedDict[RequestId, Explanation] = OrderedDict()
        self.rejections: Counter[RejectCause] = Counter()
        self._transfers = {kind: TransferTotals(kind=kind) for kind in TransferKind}

    @property
    def transfers(self) -> tuple[TransferTotals, ...]:
        """Totals of each kind."""
        return tuple(self._transfers.values())

    def explanation(self, request: RequestId) -> Explanation | None:
        """Of an ended request."""
        return self._explanations.get(request)

    def count_rejection(self, cause: RejectCause) -> None:
        """A request was turned away."""
        self.rejections[cause] += 1

    def count_fetch(self, fetch: FetchFinished, *, asked_blocks: int) -> None:
        """A prefix was fetched, whole or in part."""
        self._count(
            TransferKind.FETCH,
            kv_bytes=fetch.kv_bytes,
            transfer_s=fetch.transfer_s,
            failed=fetch.fetched_blocks < asked_blocks,
        )

    def count_stream(self, *, kv_bytes: int, transfer_s: float) -> None:
        """A prompt's KV has reached its decode node."""
        self._count(TransferKind.STREAM, kv_bytes=kv_bytes, transfer_s=transfer_s, failed=False)

    def count_failed_stream(self) -> None:
        """A prompt's KV has not reached its decode node."""
        self._count(TransferKind.STREAM, kv_bytes=0, transfer_s=0.0, failed=True)

    def close(self, flight: Flight) -> None:
        """A request has ended: remember why and how, and say so in the log."""
        explanation = flight.explanation()
        if explanation is not None:
            self._explanations[flight.id] = explanation
            while len(self._explanations) > REMEMBERED_REQUESTS:
                self._explanations.popitem(last=False)
        self._served.note(flight)
        log.info("%s", _line(flight))

    def _count(self, kind: TransferKind, *, kv_bytes: int, transfer_s: float, failed: bool) -> None:
        was = self._transfers[kind]
        self._transfers[kind] = TransferTotals(
            kind=kind,
            transfers=was.transfers + 1,
            transfer_bytes=was.transfer_bytes + kv_bytes,
            transfer_s=was.transfer_s + transfer_s,
            failures=was.failures + failed,
        )


def _line(flight: Flight) -> str:
    parts = [f"{flight.id} {flight.state}", f"prompt={len(flight.request.tokens)}"]
    if flight.state is RequestState.REJECTED:
        return " ".join([*parts, f"reason={flight.failure}"])
    parts += [
        f"cached={flight.cached_tokens or 0}",
        f"output={len(flight.token_times_s)}",
    ]
    if flight.prefill is not None:
        parts.append(f"path={flight.prefill}>{flight.decode}")
    if flight.fetched_from is not None:
        parts.append(f"fetched={flight.fetched_blocks or 0}@{flight.fetched_from}")
    if flight.ttft_s is not None:
        parts.append(f"ttft={flight.ttft_s:.3f}s")
    if flight.tbt_s is not None:
        parts.append(f"tbt={flight.tbt_s * 1000:.1f}ms")
    if flight.finish_reason is not None:
        parts.append(f"finish={flight.finish_reason}")
    if flight.failure is not None:
        parts.append(f"error={flight.failure}")
    return " ".join(parts)
