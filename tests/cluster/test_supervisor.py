"""A node that cannot even be started is tried again, like one that has ended."""

from __future__ import annotations

import asyncio
import errno
import signal

import msgspec

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
