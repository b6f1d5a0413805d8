"""What must hold at every moment of a simulation. A broken law is a bug, and stops the run."""

from __future__ import annotations

from snowskin.measure.records import Ending
from snowskin.sim.nodes import DecodeNode, PrefillNode, SimNode
from snowskin.sim.world import World
from snowskin.terms.ids import Tier

FULL_CHECK_EVERY = 97
"""The directory is compared with what every node holds after so many events: it costs a walk
over all blocks."""


class Laws:
    """Checks of one world, to be called after each event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last_s = 0.0
        self._events = 0

    def check(self) -> None:
        """All laws that are cheap, and now and then the dear ones.

        Raises:
            AssertionError: names the law and the numbers that break it.
        """
        world = self._world
        now_s = world.calendar.now_s
        assert now_s >= self._last_s, f"time went back from {self._last_s} to {now_s}"
        self._last_s = now_s
        self._check_requests()
        for node in world.nodes.values():
            _check_node(node)
        self._events += 1
        if self._events % FULL_CHECK_EVERY == 0:
            self._check_directory()

    def check_end(self) -> None:
        """Nothing is left behind when all requests have left."""
        world = self._world
        self._check_requests()
        self._check_directory()
        assert world.is_over, "the calendar is empty, but requests are in flight"
        for node in world.nodes.values():
            stat = node.memory.pool.stat()
            assert stat.reserved_slots == 0, f"{node.name} has reserved slots of nobody"
            assert stat.evictable_slots == stat.committed_slots, f"{node.name} has pins of nobody"
            if isinstance(node, PrefillNode):
                assert not node.queue, f"{node.name} has a queue of nobody"
            elif isinstance(node, DecodeNode):
                assert node.batch.running_count == node.batch.waiting_count == 0
                assert node.batch.context_tokens == node.batch.reserved_tokens == 0
        assert world.network.active_count == 0, "bytes are on their way to nobody"

    def _check_requests(self) -> None:
        world = self._world
        stat = world.conductor.stat()
        left = stat.completed + stat.rejected + stat.failed + stat.cancelled
        assert stat.arrived == left + stat.in_flight, f"requests in ≠ requests out: {stat}"
        assert stat.arrived == len(world.jobs), f"the Conductor missed an arrival: {stat}"
        flights = len(world.journey.flights)
        assert stat.in_flight == flights, f"{flights} requests in flight, Conductor: {stat}"
        endings = world.journey.endings
        assert endings[Ending.COMPLETED] == stat.completed, f"{endings} against {stat}"
        assert endings[Ending.REJECTED] == stat.rejected, f"{endings} against {stat}"
        assert endings[Ending.FAILED] == stat.failed, f"{endings} against {stat}"

    def _check_directory(self) -> None:
        """The directory knows exactly what the nodes hold."""
        world = self._world
        directory = world.conductor.directory
        held = 0
        for node in world.nodes.values():
            keys = node.memory.pool.held().keys
            held += len(keys)
            for key in keys:
                tiers = [
                    replica.tier for replica in directory.replicas(key) if replica.node == node.name
                ]
                assert tiers == [Tier.DRAM], f"{node.name} holds a block that nobody knows of"
        known = directory.stat().replicas
        assert known == held, f"the directory knows {known} replicas, the nodes hold {held}"
        assert directory.stat().broken_leases == 0, "a leased block was evicted"


def _check_node(node: SimNode) -> None:
    stat = node.memory.pool.stat()
    total = stat.free_slots + stat.reserved_slots + stat.committed_slots
    assert total == stat.slot_count == node.memory.block_count, f"{node.name} lost slots: {stat}"
    if isinstance(node, PrefillNode):
        # A free node with a queue is waiting for a fetch or for room.
        if node.running is None and node.queue and node.queue[0].fetch_flow is None:
            assert stat.reserved_slots or stat.evictable_slots < stat.committed_slots, (
                f"{node.name} is idle with a queue"
            )
    elif isinstance(node, DecodeNode):
        batch = node.batch
        assert batch.running_count <= batch.sequence_limit, f"{node.name} runs too many"
        assert batch.context_tokens <= batch.reserved_tokens <= batch.token_limit, (
            f"{node.name}: {batch.context_tokens} ≤ {batch.reserved_tokens} ≤ {batch.token_limit}"
        )
