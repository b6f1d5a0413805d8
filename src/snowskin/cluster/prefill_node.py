"""A prefill node's worker: fetches a better prefix where told to, then prefills."""

from __future__ import annotations

import threading
from functools import partial

from snowskin.cluster import messages as m
from snowskin.cluster.node import Load, Node
from snowskin.cluster.transfers import Transfers, landed_prefix, pulls
from snowskin.engine import prefill as p
from snowskin.store.pool import PoolFull
from snowskin.terms.errors import TransferFailed
from snowskin.terms.events import FetchFinished
from snowskin.terms.ids import RequestId
from snowskin.transfer.engine import PullResult

FETCH_THREADS = 4
FETCH_TIMEOUT_S = 20.0
"""A fetch that takes longer has cost more than it saves; the prompt is computed instead."""


class PrefillWorker:
    """Fulfils ``Worker``.

    A job with a fetch waits for it outside of the engine's queue, so that others are computed
    meanwhile. What was fetched is committed here: hot blocks spread.
    """

    def __init__(self, node: Node) -> None:
        config = node.config
        self._node = config.node
        self.engine = p.PrefillEngine(
            node.parts.model,
            node.parts.store,
            p.PrefillConfig(
                key_space=config.key_space,
                chunk_tokens=config.chunk_tokens,
                device_tokens=config.device_tokens,
                sequence_limit=config.sequence_limit,
            ),
        )
        self._store = node.parts.store
        self._transfer = node.parts.transfer
        self._say = node.say
        self._wake_engine = node.wake_engine
        self._fetches = Transfers(FETCH_THREADS, fail=node.fail)
        self._handover = threading.Lock()
        """So that a request is cancelled either before it gets to the engine or after."""

    def handle(self, message: m.ToNode) -> None:
        """A message from the front."""
        match message:
            case m.QueuePrefill(job=job, fetch=None):
                self.engine.submit(job)
                self._wake_engine()
            case m.QueuePrefill(job=job):
                self._fetches.start(job.request, partial(self._fetch, message))
            case m.ReleasePrefill(request=request):
                self.engine.release(request)
                self._wake_engine()
            case m.CancelJob(request=request):
                self._cancel(request)
            case _:
                raise AssertionError(f"{self._node} is a prefill node and was sent {message}")

    def step(self) -> list[m.FromNode]:
        """One prefill pass."""
        return [self._word(output) for output in self.engine.step()]

    def _word(self, output: p.PrefillOutput) -> m.FromNode:
        match output:
            case p.Started():
                return m.PrefillAnnounced(
                    request=output.request,
                    reused_tokens=output.reused_tokens,
                    blocks=output.blocks,
                )
            case p.FirstToken():
                return m.FirstTokenOut(
                    request=output.request,
                    first=output.token,
                    prefill_s=output.prefill_s,
                    work_s=output.work_s,
                    finish_reason=output.finish_reason,
                )
            case p.Failed():
                return m.JobFailed(request=output.request, reason=output.reason)

    def load(self) -> Load:
        """For the heartbeat."""
        return Load(
            running_sequences=self.engine.running_count,
            waiting_sequences=self.engine.waiting_count + len(self._fetches),
            context_tokens=self.engine.device_tokens_used,
        )

    def close(self) -> None:
        """Stop the fetches."""
        self._fetches.close()

    def _cancel(self, request: RequestId) -> None:
        self._fetches.cancel(request)
        with self._handover:
            self.engine.cancel(request)
        self._wake_engine()

    # --- on a fetch thread -----------------------------------------------------------------

    def _fetch(self, message: m.QueuePrefill, cancelled: threading.Event) -> None:
        order = message.fetch
        assert order is not None
        fetched_blocks, result = self._pull(message, cancelled)
        self._say(
            m.FetchDone(
                fetch=FetchFinished(
                    request=message.job.request,
                    node=self._node,
                    source=order.peer.node,
                    fetched_blocks=fetched_blocks,
                    kv_bytes=result.kv_bytes if result else 0,
                    transfer_s=result.transfer_s if result else 0.0,
                ),
                asked_blocks=len(order.blocks),
            )
        )
        with self._handover:
            if not cancelled.is_set():
                self.engine.submit(message.job)
        self._wake_engine()

    def _pull(
        self, message: m.QueuePrefill, cancelled: threading.Event
    ) -> tuple[int, PullResult | None]:
        """How many blocks were fetched: the unbroken first part of what was asked.

        They are committed and not pinned: pins of a long queue could starve its own head, and
        as the newest blocks of the pool they are the last to be evicted.
        """
        order = message.fetch
        assert order is not None
        reserved = self._store.reserve([block.key for block in order.blocks])
        if isinstance(reserved, PoolFull):
            return 0, None
        slots = tuple(block.slot for block in reserved)
        try:
            result = self._transfer.pull(
                order.peer,
                pulls(order.blocks, reserved),
                timeout_s=FETCH_TIMEOUT_S,
                cancelled=cancelled,
            )
            whole = landed_prefix(result)
            depth = message.job.keys.index(order.blocks[0].key)
            chain = message.job.keys[: depth + whole]
            self._store.commit(slots[:whole], chain, depth=depth)
        except TransferFailed:
            return 0, None
        finally:
            self._store.release(slots)
        return whole, result
