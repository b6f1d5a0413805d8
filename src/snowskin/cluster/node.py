"""A node: one model, one engine thread, one segment with its Messenger, one control wire.

The event loop carries messages; the engine thread computes; worker threads wait for transfers.
The loop alone sends, so what a node says arrives in the order in which it became true.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import threading
import time
from collections import deque
from typing import Protocol

import msgspec

from snowskin.cluster import messages as m
from snowskin.cluster.config import NodeConfig
from snowskin.cluster.parts import NodeParts
from snowskin.cluster.wire import NodeWire
from snowskin.terms.events import IncomingTraffic, NodeReported

log = logging.getLogger("snowskin.node")

HEARTBEAT_S = 0.5
STOP_GRACE_S = 3.0
IDLE_WAIT_S = 0.25
"""The engine thread looks for work at least so often, should a wake-up be lost."""
STEP_SAMPLES = 32


class MessengerDied(Exception):
    """Peers can no longer read here; the node ends and is started again with a new Messenger."""


class Load(msgspec.Struct, frozen=True):
    """What an engine has before it."""

    running_sequences: int
    waiting_sequences: int
    context_tokens: int
    skipped_writebacks: int = 0


class Engine(Protocol):
    """What the engine thread asks of either engine."""

    @property
    def has_work(self) -> bool:
        """True where a step would do something."""

    @property
    def passes(self) -> int:
        """Forward passes so far."""


class Worker(Protocol):
    """The part of a node that differs by role."""

    @property
    def engine(self) -> Engine:
        """What ``step`` drives."""

    def handle(self, message: m.ToNode) -> None:
        """A message from the front. On the event loop; never waits."""

    def step(self) -> list[m.FromNode]:
        """One engine pass, and what there is to say of it. On the engine thread."""

    def load(self) -> Load:
        """For the heartbeat."""

    def close(self) -> None:
        """Stop worker threads; nothing is finished, all is dropped."""


class Node:
    """The common part: wire, heartbeat, engine thread."""

    def __init__(
        self,
        config: NodeConfig,
        parts: NodeParts,
        wire: NodeWire,
        stop: asyncio.Event,
    ) -> None:
        self.config = config
        self.parts = parts
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._stop = stop
        self._work = threading.Event()
        self._step_s: deque[float] = deque(maxlen=STEP_SAMPLES)
        self._failure: BaseException | None = None

    def say(self, *words: m.FromNode) -> None:
        """Tell the front, from any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed: the node is stopping.
            self._loop.call_soon_threadsafe(self._send, words)

    def wake_engine(self) -> None:
        """There is work for the engine thread."""
        self._work.set()

    def fail(self, failure: BaseException) -> None:
        """Something broke that nobody expects to break: the process ends. From any thread."""
        self._failure = failure
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)

    def _send(self, words: tuple[m.FromNode, ...]) -> None:
        changes = self.parts.store.drain_events()
        if changes:
            self._wire.send(m.StoreChanged(changes=changes))
        for word in words:
            self._wire.send(word)

    async def run(self, worker: Worker, ready: m.NodeReady) -> None:
        """Serve until told to stop.

        Raises:
            Exception: whatever broke the engine thread; the process ends and is started again.
        """
        engine = threading.Thread(target=self._compute, args=(worker,), name="engine", daemon=True)
        engine.start()
        self._send((ready,))
        tasks = [
            asyncio.create_task(self._listen(worker)),
            asyncio.create_task(self._beat(worker)),
            asyncio.create_task(self._stop.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._stopping.set()
            self._work.set()
            for task in tasks:
                task.cancel()
            worker.close()
            await asyncio.to_thread(engine.join, STOP_GRACE_S)
        if self._failure is not None:
            raise self._failure

    async def _listen(self, worker: Worker) -> None:
        while True:
            message = await self._wire.receive()
            match message:
                case m.LeaseBlocks(owner=owner, keys=keys, duration_s=duration_s):
                    self.parts.store.grant_lease(owner, keys, time.monotonic() + duration_s)
                case m.DropLease(owner=owner):
                    self.parts.store.end_lease(owner)
                case _:
                    worker.handle(message)

    async def _beat(self, worker: Worker) -> None:
        while True:
            if not self.parts.messenger.alive():
                raise MessengerDied(self.config.node)
            self.parts.store.expire(time.monotonic())
            load = worker.load()
            steps_s = tuple(self._step_s)
            report = NodeReported(
                node=self.config.node,
                running_sequences=load.running_sequences,
                waiting_sequences=load.waiting_sequences,
                context_tokens=load.context_tokens,
                step_s=statistics.median(steps_s) if steps_s else None,
                incoming=tuple(
                    IncomingTraffic(
                        peer=link.node,
                        bytes_in_flight=link.bytes_in_flight,
                        bytes_per_s=link.bytes_per_s,
                        latency_s=link.latency_s,
                    )
                    for link in self.parts.transfer.link_stat()
                    if link.bytes_in_flight or link.bytes_per_s is not None
                ),
            )
            self._send((m.Heartbeat(report=report, counters=self._counters(load)),))
            await asyncio.sleep(HEARTBEAT_S)

    def _counters(self, load: Load) -> m.NodeCounters:
        stored, moved = self.parts.store.stat(), self.parts.transfer.stat()
        return m.NodeCounters(
            blocks_total=stored.slot_count,
            blocks_used=stored.slot_count - stored.free_slots,
            committed_blocks=stored.committed_total,
            evicted_blocks=stored.evicted_total,
            checksum_failures=moved.checksum_failures,
            failed_pulls=moved.failed_pulls,
            skipped_writebacks=load.skipped_writebacks,
        )

    def _compute(self, worker: Worker) -> None:
        try:
            while not self._stopping.is_set():
                if not worker.engine.has_work:
                    self._work.wait(IDLE_WAIT_S)
                    self._work.clear()
                    continue
                began_s, passes = time.perf_counter(), worker.engine.passes
                words = worker.step()
                if worker.engine.passes > passes:  # Steps that only start or wait would mislead.
                    self._step_s.append(time.perf_counter() - began_s)
                if words:
                    self.say(*words)
        except BaseException as failure:
            self.fail(failure)
