"""Keeps the node processes running: starts them, notices their end, starts them again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

from snowskin.cluster.progress import STALL_S, StartWatch
from snowskin.terms.errors import SnowskinError
from snowskin.terms.ids import NodeId
from snowskin.transfer.child import Child

log = logging.getLogger("snowskin.supervisor")

FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0
"""A node that was ready for so long restarts without a growing pause."""
STARTS_BEFORE_GIVING_UP = 3
"""A node that has never been ready and fails so often will not come up: the cause is not chance."""
STOP_GRACE_S = 5.0


class NodeStartFailed(SnowskinError):
    """A node could not be started at all; its own message is on stderr."""


class Supervised:
    """One node's process over its restarts."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.child: Child | None = None
        self.starts = 0
        self.ready_since_s: float | None = None
        self.was_ready = False
        self.start_watch: StartWatch | None = None
        """While it starts."""
        self.killed_for: str | None = None
        """Why we ended the present incarnation ourselves."""

    def begin(self) -> None:
        """A new incarnation."""
        self.starts += 1
        self.ready_since_s = None
        self.killed_for = None

    def was_stable(self, *, now_s: float) -> bool:
        """True where the present incarnation was ready for long."""
        return self.ready_since_s is not None and now_s - self.ready_since_s > STABLE_AFTER_S

    @property
    def identity(self) -> str:
        """Names the present incarnation on the control wire."""
        return f"{self.node}#{self.starts}"


class Supervisor:
    """All node processes of one cluster.

    Args:
        spawn: starts a node's process, given the node and its identity.
        on_lost: told once for each process that ended without being asked to.
        on_hopeless: told when a node has never come up and is given up.
        stall_s: a node that does nothing for so long before it is ready is killed.
    """

    def __init__(
        self,
        nodes: tuple[NodeId, ...],
        *,
        spawn: Callable[[NodeId, str], Child],
        on_lost: Callable[[NodeId], None],
        on_hopeless: Callable[[NodeStartFailed], None],
        stall_s: float = STALL_S,
    ) -> None:
        self._supervised = {node: Supervised(node) for node in nodes}
        self._spawn = spawn
        self._on_lost = on_lost
        self._on_hopeless = on_hopeless
        self._stall_s = stall_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all nodes, at the same time."""
        for supervised in self._supervised.values():
            task = asyncio.create_task(self._keep_running(supervised), name=supervised.node)
            self._tasks.append(task)

    def is_current(self, node: NodeId, identity: str) -> bool:
        """True where ``identity`` is the node's present incarnation and not a late word."""
        supervised = self._supervised.get(node)
        return supervised is not None and supervised.identity == identity

    def identity(self, node: NodeId) -> str:
        """Of the node's present incarnation."""
        return self._supervised[node].identity

    def pid(self, node: NodeId) -> int | None:
        """Of the node's process; None while it has none."""
        child = self._supervised[node].child
        return None if child is None else child.pid

    def restarts(self, node: NodeId) -> int:
        """How often the node was started again."""
        return max(0, self._supervised[node].starts - 1)

    def mark_ready(self, node: NodeId) -> None:
        """The node has said that it takes work."""
        supervised = self._supervised[node]
        supervised.was_ready = True
        supervised.ready_since_s = time.monotonic()
        supervised.start_watch = None

    def kill(self, node: NodeId, reason: str) -> None:
        """Stop a node that no longer does its work; it is started again."""
        supervised = self._supervised[node]
        if supervised.child is not None:
            log.error("killing %s: %s", node, reason)
            supervised.killed_for = reason
            supervised.child.kill()

    def kill_stalled(self, *, now_s: float) -> None:
        """Stop the nodes that hang before they are ready. To be called every second or so."""
        for supervised in self._supervised.values():
            watch = supervised.start_watch
            if watch is not None and watch.stalled_s(now_s=now_s) >= self._stall_s:
                supervised.start_watch = None
                self.kill(
                    supervised.node, f"it did nothing for {self._stall_s:g} s while it started"
                )

    async def stop(self) -> None:
        """End all processes: by word first, by force after a while. Returns when none is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        children = [s.child for s in self._supervised.values() if s.child is not None]
        for child in children:
            child.end()
        await asyncio.gather(*(asyncio.to_thread(_reap, child) for child in children))

    async def _keep_running(self, supervised: Supervised) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            supervised.begin()
            ending = await self._run_once(supervised)
            self._on_lost(supervised.node)
            if not supervised.was_ready and supervised.starts >= STARTS_BEFORE_GIVING_UP:
                self._on_hopeless(
                    NodeStartFailed(
                        f"{supervised.node} failed to start {supervised.starts} times "
                        f"({ending}); {_remedy(supervised, ending)}"
                    )
                )
                return
            if supervised.was_stable(now_s=time.monotonic()):
                backoff_s = FIRST_BACKOFF_S
            log.warning(
                "%s ended (%s), starting it again in %.1f s",
                supervised.node,
                ending,
                backoff_s,
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _run_once(self, supervised: Supervised) -> str:
        """One life of a node's process, from its start to its end; how it ended."""
        try:
            child = self._spawn(supervised.node, supervised.identity)
        except OSError as error:  # Out of processes or of files; that may pass.
            return f"it could not be started: {error}"
        supervised.child = child
        supervised.start_watch = StartWatch(child.pid, now_s=time.monotonic())
        try:
            status = await _exit_status(child)
            ending = supervised.killed_for or _ending(status)
        except OSError as error:
            child.kill()
            ending = f"it could not be watched: {error}"
        child.end()
        supervised.child = supervised.start_watch = None
        return ending


def _ending(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed ({signal.Signals(-status).name})"
    except ValueError:
        return f"killed (signal {-status})"


def _remedy(supervised: Supervised, ending: str) -> str:
    """What a user may do about a node that will not come up."""
    if supervised.killed_for is not None:
        return "does the disk with the model answer, and is there memory left?"
    if ending == _ending(-signal.SIGKILL):
        return "most likely the system ran out of memory: give fewer nodes, or less --dram"
    return "its message stands above"


async def _exit_status(child: Child) -> int:
    """Wait for the end of a process without a thread of its own for each."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    pid_fd = os.pidfd_open(child.pid)
    loop.add_reader(pid_fd, _resolve, ended)
    try:
        await ended
    finally:
        loop.remove_reader(pid_fd)
        os.close(pid_fd)
    status = child.wait()
    assert status is not None
    return status


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _reap(child: Child) -> None:
    child.stop(grace_s=STOP_GRACE_S)
