"""A node that cannot be started, or hangs before it is ready, is tried again, and then told of."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from snowskin.cluster.progress import StartWatch, work_of
from snowskin.cluster.supervisor import NodeStartFailed, Supervisor
from snowskin.terms.ids import NodeId
from snowskin.transfer.child import Child

NODE = NodeId("prefill-0")


class Nothing(msgspec.Struct):
    """A configuration without content."""


def test_a_node_that_the_system_has_no_room_for_is_started_later() -> None:
    started: list[Child] = []
    lost: list[NodeId] = []

    def spawn(_: NodeId, identity: str) -> Child:
        if identity == f"{NODE}#1":
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(Child("http.server", Nothing()))
        return started[-1]

    async def run() -> None:
        given_up: list[NodeStartFailed] = []
        supervisor = Supervisor(
            (NODE,), spawn=spawn, on_lost=lost.append, on_hopeless=given_up.append
        )
        supervisor.start()
        async with asyncio.timeout(30):
            while supervisor.pid(NODE) is None:
                await asyncio.sleep(0.01)
        assert supervisor.is_current(NODE, f"{NODE}#2")
        assert not given_up
        await supervisor.stop()

    asyncio.run(run())
    assert lost == [NODE]
    assert [child.wait() for child in started] == [-signal.SIGKILL]


async def started(supervisor: Supervisor, until: Callable[[], bool]) -> None:
    supervisor.start()
    async with asyncio.timeout(60):
        while not until():
            supervisor.kill_stalled(now_s=time.monotonic())
            await asyncio.sleep(0.02)
    await supervisor.stop()


def test_a_node_that_hangs_before_it_is_ready_is_killed_and_at_last_told_of() -> None:
    given_up: list[NodeStartFailed] = []

    def spawn(_: NodeId, __: str) -> Child:
        child = Child("http.server", Nothing())
        os.kill(child.pid, signal.SIGSTOP)
        return child

    supervisor = Supervisor(
        (NODE,), spawn=spawn, on_lost=lambda _: None, on_hopeless=given_up.append, stall_s=0.3
    )
    asyncio.run(started(supervisor, lambda: bool(given_up)))
    assert str(given_up[0]) == (
        "prefill-0 failed to start 3 times (it did nothing for 0.3 s while it started); "
        "does the disk with the model answer, and is there memory left?"
    )


def test_a_node_that_is_killed_from_outside_is_told_of_by_the_signals_name() -> None:
    given_up: list[NodeStartFailed] = []

    def spawn(_: NodeId, __: str) -> Child:
        child = Child("http.server", Nothing())
        os.kill(child.pid, signal.SIGKILL)
        return child

    supervisor = Supervisor(
        (NODE,), spawn=spawn, on_lost=lambda _: None, on_hopeless=given_up.append
    )
    asyncio.run(started(supervisor, lambda: bool(given_up)))
    assert "(killed (SIGKILL)); most likely the system ran out of memory" in str(given_up[0])


def test_who_computes_gets_on_and_who_sleeps_does_not() -> None:
    watch = StartWatch(os.getpid(), now_s=0.0)
    assert watch.stalled_s(now_s=5.0) == 5.0
    before = work_of(os.getpid())
    assert before is not None
    while time.process_time() - before.cpu_s < 0.7:
        pass
    assert watch.stalled_s(now_s=9.0) == 0.0
    assert watch.stalled_s(now_s=10.0) == 1.0


def test_who_reads_gets_on() -> None:
    watch = StartWatch(os.getpid(), now_s=0.0)
    with Path("/dev/zero").open("rb", buffering=0) as zeros:
        zeros.read(2 << 20)
    assert watch.stalled_s(now_s=5.0) == 0.0


def test_who_has_ended_does_not_hang() -> None:
    watch = StartWatch(2**22 + 1, now_s=0.0)
    assert watch.stalled_s(now_s=1000.0) == 0.0


@pytest.mark.parametrize("ready", [True, False])
def test_a_node_that_is_ready_may_rest(ready: bool) -> None:
    children: list[Child] = []

    def spawn(_: NodeId, __: str) -> Child:
        children.append(Child("http.server", Nothing()))
        os.kill(children[-1].pid, signal.SIGSTOP)
        return children[-1]

    async def run() -> None:
        supervisor = Supervisor(
            (NODE,), spawn=spawn, on_lost=lambda _: None, on_hopeless=print, stall_s=5.0
        )
        supervisor.start()
        while not children:
            await asyncio.sleep(0.01)
        if ready:
            supervisor.mark_ready(NODE)
        supervisor.kill_stalled(now_s=time.monotonic() + 100)
        assert (children[0].wait(0.2) is None) == ready
        await supervisor.stop()

    asyncio.run(run())
