"""Which node holds which block: the directory of all replicas in the cluster. Pure.

Each node has one bit, and each key a mask of the nodes that hold it. A prefix match over all nodes
is then one lookup and one AND per block, however many nodes there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from snowskin.terms.commands import Command, EndLease, GrantLease
from snowskin.terms.errors import InvalidInput
from snowskin.terms.events import (
    BlocksCommitted,
    BlocksEvicted,
    Event,
    NodeJoined,
    NodeLost,
    PlacedBlock,
)
from snowskin.terms.ids import BlockKey, NodeId, RequestId, SlotIndex, Tier

DEFAULT_REPLICA_LIMIT = 50_000_000
"""Most replicas that a directory records. Our choice, because one costs about 200 bytes."""

_READ_ORDER = (Tier.DRAM, Tier.SSD, Tier.HBM)
"""Where a peer reads from first: DRAM is what a Messenger serves."""


class Replica(msgspec.Struct, frozen=True):
    """One copy of a block."""

    node: NodeId
    tier: Tier
    slot: SlotIndex
    generation: int


class DirectoryStat(msgspec.Struct, frozen=True):
    """How full the directory is, and what it had to refuse."""

    nodes: int
    blocks: int
    """Different blocks with at least one replica."""
    replicas: int
    leases: int
    stale_events: int
    """Words of nodes that are not up, or of replicas that were not known."""
    refused_replicas: int
    """Replicas beyond the limit: never recorded, hence never matched."""
    broken_leases: int
    """Blocks that a node evicted while they were leased."""


class _Holdings:
    """What one node holds, by tier."""

    __slots__ = ("bit", "leased", "tiers")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.tiers: dict[Tier, dict[BlockKey, PlacedBlock]] = {tier: {} for tier in _READ_ORDER}
        self.leased: dict[BlockKey, int] = {}


class Directory:
    """Block key → replicas, and the leases on them.

    Changed by ``handle`` only. It answers no commands of its own; the empty tuple keeps the shape
    that all machines share.

    Args:
        replica_limit: replicas beyond it are refused and counted.
    """

    def __init__(self, *, replica_limit: int = DEFAULT_REPLICA_LIMIT) -> None:
        if replica_limit < 1:
            raise InvalidInput(
                f"replica_limit must be at least 1, not {replica_limit}", parameter="replica_limit"
            )
        self._replica_limit = replica_limit
        self._nodes: dict[NodeId, _Holdings] = {}
        self._node_of_bit: dict[int, NodeId] = {}
        self._free_bits: list[int] = []
        self._holders: dict[BlockKey, int] = {}
        self._replica_count = 0
        self._leases: dict[tuple[NodeId, RequestId], tuple[float, tuple[BlockKey, ...]]] = {}
        self._lease_ends: list[tuple[float, NodeId, RequestId]] = []
        self._stale_events = 0
        self._refused_replicas = 0
        self._broken_leases = 0

    def handle(self, event: Event | GrantLease | EndLease, *, now_s: float) -> tuple[Command, ...]:
        """Learn of one event; those that say nothing of blocks or nodes are let pass."""
        if self._lease_ends and self._lease_ends[0][0] <= now_s:
            self._expire(now_s)
        match event:
            case BlocksCommitted():
                self._commit(event)
            case BlocksEvicted():
                self._evict(event)
            case NodeJoined(node=node):
                self._lose(node)
                self._join(node)
            case NodeLost(node=node):
                self._lose(node)
            case GrantLease():
                self._grant(event, now_s)
            case EndLease(node=node, request=request):
                self._end_lease(node, request)
            case _:
                pass
        return ()

    def next_wakeup_s(self) -> float | None:
        """When the next lease runs out; None while there is none."""
        return self._lease_ends[0][0] if self._lease_ends else None

    def longest_prefix(self, keys: Sequence[BlockKey]) -> dict[NodeId, int]:
        """How many leading blocks of ``keys`` each node holds; nodes without the first are absent.

        Nodes stand in the order in which their prefixes end, then in the order of their joining.
        """
        prefixes: dict[NodeId, int] = {}
        holders = self._holders
        alive = -1
        count = 0
        for key in keys:
            still = alive & holders.get(key, 0)
            if still != alive:
                if count:
                    self._note(alive & ~still, count, prefixes)
                if not still:
                    return prefixes
                alive = still
            count += 1
        if count:
            self._note(alive, count, prefixes)
        return prefixes

    def replicas(self, key: BlockKey) -> tuple[Replica, ...]:
        """Every copy of a block, best tier to read from first within each node."""
        return tuple(
            Replica(node, tier, placed.slot, placed.generation)
            for node in self._nodes_of(self._holders.get(key, 0))
            for tier in _READ_ORDER
            if (placed := self._nodes[node].tiers[tier].get(key)) is not None
        )

    def replica_count(self, key: BlockKey) -> int:
        """On how many nodes a block lies."""
        return self._holders.get(key, 0).bit_count()

    def placed(self, node: NodeId, keys: Sequence[BlockKey]) -> tuple[PlacedBlock, ...]:
        """Where ``keys`` lie on ``node``, up to the first that it does not hold."""
        holdings = self._nodes.get(node)
        if holdings is None:
            return ()
        dram = holdings.tiers[Tier.DRAM]
        found: list[PlacedBlock] = []
        for key in keys:
            block = dram.get(key)
            if block is None:
                block = holdings.tiers[Tier.SSD].get(key) or holdings.tiers[Tier.HBM].get(key)
                if block is None:
                    break
            found.append(block)
        return tuple(found)

    def is_leased(self, node: NodeId, key: BlockKey) -> bool:
        """Whether a block must stay where it is for now."""
        holdings = self._nodes.get(node)
        return holdings is not None and key in holdings.leased

    def stat(self) -> DirectoryStat:
        """A snapshot of the counters."""
        return DirectoryStat(
            nodes=len(self._nodes),
            blocks=len(self._holders),
            replicas=self._replica_count,
            leases=len(self._leases),
            stale_events=self._stale_events,
            refused_replicas=self._refused_replicas,
            broken_leases=self._broken_leases,
        )

    def _nodes_of(self, mask: int) -> list[NodeId]:
        nodes: list[NodeId] = []
        while mask:
            bit = mask & -mask
            nodes.append(self._node_of_bit[bit])
            mask ^= bit
        return nodes

    def _note(self, mask: int, count: int, prefixes: dict[NodeId, int]) -> None:
        for node in self._nodes_of(mask):
            prefixes[node] = count

    def _join(self, node: NodeId) -> None:
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._node_of_bit)
        self._node_of_bit[bit] = node
        self._nodes[node] = _Holdings(bit)

    def _lose(self, node: NodeId) -> None:
        holdings = self._nodes.pop(node, None)
        if holdings is None:
            return
        for tier in holdings.tiers.values():
            self._replica_count -= len(tier)
            for key in tier:
                # A key on two tiers comes by twice.
                left = self._holders.get(key, 0) & ~holdings.bit
                if left:
                    self._holders[key] = left
                else:
                    self._holders.pop(key, None)
        del self._node_of_bit[holdings.bit]
        self._free_bits.append(holdings.bit)
        self._free_bits.sort(reverse=True)
        for lease in [lease for lease in self._leases if lease[0] == node]:
            del self._leases[lease]
        self._drop_dead_ends()

    def _commit(self, event: BlocksCommitted) -> None:
        holdings = self._nodes.get(event.node)
        if holdings is None:
            self._stale_events += 1
            return
        tier = holdings.tiers[event.tier]
        holders = self._holders
        bit = holdings.bit
        room = self._replica_limit - self._replica_count
        before = len(tier)
        for block in event.blocks:
            key = block.key
            if key not in tier:
                if len(tier) - before >= room:
                    self._refused_replicas += 1
                    continue
                holders[key] = holders.get(key, 0) | bit
            tier[key] = block
        self._replica_count += len(tier) - before

    def _evict(self, event: BlocksEvicted) -> None:
        holdings = self._nodes.get(event.node)
        if holdings is None:
            self._stale_events += 1
            return
        tier = holdings.tiers[event.tier]
        others = [held for held in holdings.tiers.values() if held and held is not tier]
        holders, leased, bit = self._holders, holdings.leased, holdings.bit
        gone = 0
        for key in event.keys:
            if tier.pop(key, None) is None:
                self._stale_events += 1
                continue
            gone += 1
            if others and any(key in other for other in others):
                continue
            left = holders[key] & ~bit
            if left:
                holders[key] = left
            else:
                del holders[key]
            if key in leased:
                self._broken_leases += 1
        self._replica_count -= gone

    def _grant(self, lease: GrantLease, now_s: float) -> None:
        holdings = self._nodes.get(lease.node)
        if holdings is None:
            self._stale_events += 1
            return
        self._end_lease(lease.node, lease.request)
        until_s = now_s + lease.duration_s
        self._leases[(lease.node, lease.request)] = (until_s, lease.keys)
        heapq.heappush(self._lease_ends, (until_s, lease.node, lease.request))
        for key in lease.keys:
            holdings.leased[key] = holdings.leased.get(key, 0) + 1

    def _end_lease(self, node: NodeId, request: RequestId) -> None:
        lease = self._leases.pop((node, request), None)
        if lease is None:
            return
        leased = self._nodes[node].leased
        for key in lease[1]:
            if leased[key] == 1:
                del leased[key]
            else:
                leased[key] -= 1
        self._drop_dead_ends()

    def _expire(self, now_s: float) -> None:
        while self._lease_ends and self._lease_ends[0][0] <= now_s:
            _, node, request = self._lease_ends[0]
            self._end_lease(node, request)

    def _drop_dead_ends(self) -> None:
        """Keep the earliest end a living lease's, and the heap within twice the living leases."""
        ends = self._lease_ends
        while ends and self._leases.get((ends[0][1], ends[0][2]), (None,))[0] != ends[0][0]:
            heapq.heappop(ends)
        if len(ends) > 64 + 2 * len(self._leases):
            self._lease_ends = [(end[0], *lease) for lease, end in self._leases.items()]
            heapq.heapify(self._lease_ends)
