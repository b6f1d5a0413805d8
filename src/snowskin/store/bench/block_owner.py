"""A node as far as its peers can tell: a segment full of blocks, its Messenger, and an engine.

The engine is a loop that computes and never lets go of its interpreter's lock for long. Beside the
Messenger, threads of this process serve the same blocks: what it would be without a Messenger.
"""

from __future__ import annotations

import os
import socket
import threading

import msgspec

from snowskin.terms.ids import NodeId
from snowskin.transfer.authentication import authenticate_as_server
from snowskin.transfer.child import Child, Parent
from snowskin.transfer.memory import Segment, SegmentLayout
from snowskin.transfer.messenger import MessengerProcess
from snowskin.transfer.peer import Peer
from snowskin.transfer.serving import Tally, serve_requests
from snowskin.transfer.wire import tune

START_S = 60.0
HELD_COUNT = 500_000
"""Numbers that are summed up at a time, in one call: some 10 ms without giving up the lock."""


class OwnerConfig(msgspec.Struct, frozen=True):
    """What the process is told at its start."""

    layout: SegmentLayout
    cluster_key: bytes
    nixl: bool


class OwnerReady(msgspec.Struct, frozen=True):
    """Where its blocks can be read."""

    peer: Peer
    inside: Peer
    """Served by threads of the owner itself, over TCP."""
    generations: tuple[int, ...]


class OwnerState(msgspec.Struct, frozen=True):
    """Its answer when it was told to begin or to end computing."""

    is_computing: bool


class BlockOwner:
    """The handle of such a process. ``stop`` it.

    Raises:
        InvalidInput: NIXL is wanted and not installed.
        OSError: it did not start; its own message is on standard error.
    """

    def __init__(self, config: OwnerConfig) -> None:
        self._child = Child("snowskin.store.bench.block_owner", config)
        try:
            self.ready = self._child.hear(OwnerReady, timeout_s=START_S)
        except BaseException:
            self.stop()
            raise
        self._is_computing = False

    def compute(self, wanted: bool) -> None:
        """Have its engine compute from now on, or rest."""
        if wanted != self._is_computing:
            state = self._child.ask(OwnerState, timeout_s=START_S)
            self._is_computing = state.is_computing

    def stop(self) -> None:
        """End it. Idempotent."""
        self._child.stop(grace_s=5.0)


def _serve_inside(listening: socket.socket, segment: Segment, key: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        with connection:
            authenticate_as_server(connection, key)
            tune(connection)
            serve_requests(connection, segment, Tally(), idle_timeout_s=600.0, send_timeout_s=600.0)

    while True:
        connection, _ = listening.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def _compute(wanted: threading.Event) -> None:
    while True:
        wanted.wait()
        sum(range(HELD_COUNT))


def main() -> None:
    """The owner's process."""
    parent = Parent()
    config = parent.hear(OwnerConfig)
    segment = Segment.create(config.layout)
    generations = []
    for slot in range(config.layout.slot_count):
        generations.append(segment.begin(slot, None))
        segment.data[slot] = slot % 251
        segment.seal(slot)
    messenger = MessengerProcess.start(
        segment, node=NodeId("owner"), cluster_key=config.cluster_key, nixl=config.nixl
    )
    listening = socket.create_server(("127.0.0.1", 0))
    wanted = threading.Event()
    for target, arguments in (
        (_serve_inside, (listening, segment, config.cluster_key)),
        (_compute, (wanted,)),
    ):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    inside = msgspec.structs.replace(
        messenger.peer, node=NodeId("inside"), port=listening.getsockname()[1], nixl=None
    )
    parent.say(OwnerReady(messenger.peer, inside, tuple(generations)))

    def turn() -> OwnerState:
        if wanted.is_set():
            wanted.clear()
        else:
            wanted.set()
        return OwnerState(wanted.is_set())

    parent.answer(turn)
    messenger.stop()
    os._exit(0)


if __name__ == "__main__":
    main()
