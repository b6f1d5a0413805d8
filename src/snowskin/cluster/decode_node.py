"""A decode node's worker: takes the KV of prompts from prefill nodes, then decodes."""

from __future__ import annotations

import threading
import time
from functools import partial

from snowskin.cluster import messages as m
from snowskin.cluster.node import Load, Node
from snowskin.cluster.transfers import Transfers, landed_prefix, pulls
from snowskin.engine import decode as d
from snowskin.store.pool import PoolFull
from snowskin.terms.errors import TransferFailed
from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import BlockKey, RequestId
from snowskin.terms.request import GenerationRequest

PULL_THREADS = 16
PULL_TIMEOUT_S = 600.0
"""A pull lasts as long as the prefill that it follows; a dead or cancelled one ends at once."""
ROOM_POLL_S = 0.02
"""How often a pull that found the pool full looks again."""


class DecodeWorker:
    """Fulfils ``Worker``."""

    def __init__(self, node: Node) -> None:
        config = node.config
        self._node = config.node
        self.engine = d.DecodeEngine(
            node.parts.model,
            node.parts.store,
            d.DecodeConfig(
                key_space=config.key_space,
                device_tokens=config.device_tokens,
                sequence_limit=config.sequence_limit,
            ),
        )
        self._store = node.parts.store
        self._transfer = node.parts.transfer
        self._say = node.say
        self._wake_engine = node.wake_engine
        self._pulls = Transfers(PULL_THREADS, fail=node.fail)
        self._finding_room = threading.Lock()
        """One at a time: the pins of one try that fails must not make another fail."""
        self._lock = threading.Lock()
        self._landed: dict[RequestId, tuple[GenerationRequest, tuple[PlacedBlock, ...]]] = {}
        """Prompts whose KV is here, pinned, waiting for their first token."""

    def handle(self, message: m.ToNode) -> None:
        """A message from the front."""
        match message:
            case m.PullKv(job=job):
                self._pulls.start(job.request, partial(self._take, message))
            case m.StartDecode(request=request, first=first):
                with self._lock:
                    job, blocks = self._landed.pop(request)
                self.engine.submit(d.DecodeJob(request=job, blocks=blocks, first=first))
                self._wake_engine()
            case m.CancelJob(request=request):
                self._cancel(request)
            case _:
                raise AssertionError(f"{self._node} is a decode node and was sent {message}")

    def step(self) -> list[m.FromNode]:
        """One decode step."""
        words: list[m.FromNode] = []
        tokens: list[m.TokenOut] = []
        for output in self.engine.step():
            match output:
                case d.Joined(request=request):
                    words.append(m.BatchJoined(request=request))
                case d.Token():
                    tokens.append(
                        m.TokenOut(
                            request=output.request,
                            token=output.token,
                            finish_reason=output.finish_reason,
                        )
                    )
                case d.Failed(request=request, reason=reason):
                    words.append(m.JobFailed(request=request, reason=reason))
        if tokens:
            words.append(m.TokensOut(tokens=tuple(tokens)))
        return words

    def load(self) -> Load:
        """For the heartbeat."""
        waiting = len(self._pulls) + len(self._landed)
        return Load(
            running_sequences=self.engine.running_count,
            waiting_sequences=waiting + self.engine.waiting_count,
            context_tokens=self.engine.device_tokens_used,
            skipped_writebacks=self.engine.skipped_writebacks,
        )

    def close(self) -> None:
        """Stop the pulls."""
        self._pulls.close()

    def _cancel(self, request: RequestId) -> None:
        self._pulls.cancel(request)
        with self._lock:
            landed = self._landed.pop(request, None)
        if landed is not None:
            self._store.release([block.slot for block in landed[1]])
        self.engine.cancel(request)
        self._wake_engine()

    # --- on a pull thread ------------------------------------------------------------------

    def _take(self, message: m.PullKv, cancelled: threading.Event) -> None:
        request = message.job.request
        word = self._pull(message, cancelled)
        with self._lock:
            if isinstance(word, tuple) and not cancelled.is_set():
                blocks, arrived = word
                self._landed[request] = (message.job, blocks)
                self._say(arrived)
                return
        if isinstance(word, tuple):
            self._store.release([block.slot for block in word[0]])
        elif not cancelled.is_set():
            self._say(word)

    def _pull(
        self, message: m.PullKv, cancelled: threading.Event
    ) -> tuple[tuple[PlacedBlock, ...], m.KvArrived] | m.JobFailed:
        """The prompt's blocks, all pinned, or why they could not be had (and none is pinned)."""
        request, keys = message.job.request, message.job.keys
        places = self._find_room(message, cancelled)
        if places is None:
            return m.JobFailed(request=request, reason="its DRAM pool stayed full")
        held, own = places
        blocks = (*held, *own)
        wanted = message.blocks[len(held) :]
        try:
            result = self._transfer.pull(
                message.peer, pulls(wanted, own), timeout_s=PULL_TIMEOUT_S, cancelled=cancelled
            )
        except TransferFailed as error:
            self._store.release([block.slot for block in blocks])
            return m.JobFailed(request=request, reason=str(error), peer_failed=True)
        if landed_prefix(result) < len(own):
            self._store.release([block.slot for block in blocks])
            reason = f"the KV of the prompt did not arrive whole from {message.peer.node}"
            return m.JobFailed(request=request, reason=reason, peer_failed=True)
        full = len(keys) - len(held)
        self._store.commit([block.slot for block in own[:full]], keys, depth=len(held))
        arrived = m.KvArrived(
            request=request, kv_bytes=result.kv_bytes, transfer_s=result.transfer_s
        )
        return blocks, arrived

    def _find_room(
        self, message: m.PullKv, cancelled: threading.Event
    ) -> tuple[tuple[PlacedBlock, ...], tuple[PlacedBlock, ...]] | None:
        """The prompt's blocks held here already, and room for the others; all of them pinned.

        A prompt that waits for room pins nothing meanwhile: several that each kept what they have
        would wait for each other without end.
        """
        keys = message.job.keys
        deadline_s = time.monotonic() + PULL_TIMEOUT_S
        while not cancelled.is_set() and time.monotonic() < deadline_s:
            with self._finding_room:
                held = self._store.pin(keys)
                missing: list[BlockKey | None] = [*keys[len(held) :]]
                missing += [None] * (len(message.blocks) - len(keys))
                own = self._store.reserve(missing)
                if not isinstance(own, PoolFull):
                    return held, own
                self._store.release([block.slot for block in held])
            cancelled.wait(ROOM_POLL_S)
        return None
