"""Which node holds which block: the directory of all replicas in the cluster. Pure.

Each node has one bit. Keys that follow each other in a chain and lie on the same nodes are one
*span*, with a mask of those nodes. A prefix match over all nodes is then one lookup and one AND per
span, however many nodes there are; and a node's word of dozens of blocks costs that of a few spans.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from snowskin.store.runs import place_of, shared_count
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

_LISTED_MASKS = 1024
"""Lists of nodes that are remembered: at most so many times the number of nodes."""

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


class _Span:
    """Keys that follow each other in a chain, and lie on the same nodes and tiers."""

    __slots__ = ("keys", "mask")

    def __init__(self, keys: tuple[BlockKey, ...], mask: int) -> None:
        self.keys = keys
        self.mask = mask
        """The bits of the nodes that hold them, on whatever tier."""


class _Places:
    """Where a node has the blocks of a span: key by key, from ``start`` on in what it once told."""

    __slots__ = ("generations", "slots", "start")

    def __init__(
        self, slots: tuple[SlotIndex, ...], generations: tuple[int, ...], start: int
    ) -> None:
        self.slots = slots
        self.generations = generations
        self.start = start

    def part(self, start: int, end: int) -> _Places:
        """The places of the keys from ``start`` to before ``end``."""
        start, end = self.start + start, self.start + end
        if len(self.slots) <= 4 * (end - start):
            return _Places(self.slots, self.generations, start)
        # A short part must not keep all of a long chain's places: our choice, at most four times
        # what it needs.
        return _Places(self.slots[start:end], self.generations[start:end], 0)


_Shelf = dict[_Span, _Places]
"""What a node holds on one tier."""


class _Holdings:
    """What one node holds, by tier."""

    __slots__ = ("bit", "leased", "shelves")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.shelves: dict[Tier, _Shelf] = {tier: {} for tier in _READ_ORDER}
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
        self._spans: dict[BlockKey, _Span] = {}
        self._listed: dict[int, list[NodeId]] = {}
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

        Nodes stand in the order in which their prefixes end, then in that of their bits: a lost
        node's goes to the next that joins.
        """
        keys = tuple(keys)
        prefixes: dict[NodeId, int] = {}
        get = self._spans.get
        alive = -1
        count = 0
        while count < len(keys):
            span = get(keys[count])
            still = alive & span.mask if span is not None else 0
            if still != alive:
                if count:
                    self._note(alive & ~still, count, prefixes)
                alive = still
            if not still or span is None:
                return prefixes
            count += shared_count(span.keys, place_of(span.keys, keys[count]), keys, count)
        if count:
            self._note(alive, count, prefixes)
        return prefixes

    def replicas(self, key: BlockKey) -> tuple[Replica, ...]:
        """Every copy of a block, best tier to read from first within each node."""
        span = self._spans.get(key)
        if span is None:
            return ()
        place = place_of(span.keys, key)
        return tuple(
            Replica(
                node,
                tier,
                places.slots[places.start + place],
                places.generations[places.start + place],
            )
            for node in self._nodes_of(span.mask)
            for tier in _READ_ORDER
            if (places := self._nodes[node].shelves[tier].get(span)) is not None
        )

    def replica_count(self, key: BlockKey) -> int:
        """On how many nodes a block lies."""
        span = self._spans.get(key)
        return span.mask.bit_count() if span is not None else 0

    def placed(self, node: NodeId, keys: Sequence[BlockKey]) -> tuple[PlacedBlock, ...]:
        """Where ``keys`` lie on ``node``, up to the first that it does not hold."""
        holdings = self._nodes.get(node)
        if holdings is None:
            return ()
        keys = tuple(keys)
        shelves = [holdings.shelves[tier] for tier in _READ_ORDER]
        found: list[PlacedBlock] = []
        while len(found) < len(keys):
            at = len(found)
            span = self._spans.get(keys[at])
            if span is None:
                break
            held = next((shelf[span] for shelf in shelves if span in shelf), None)
            if held is None:
                break
            start = place_of(span.keys, keys[at])
            end = start + shared_count(span.keys, start, keys, at)
            first, last = held.start + start, held.start + end
            slots, generations = held.slots[first:last], held.generations[first:last]
            found += map(PlacedBlock, span.keys[start:end], slots, generations)
        return tuple(found)

    def is_leased(self, node: NodeId, key: BlockKey) -> bool:
        """Whether a block must stay where it is for now."""
        holdings = self._nodes.get(node)
        return holdings is not None and key in holdings.leased

    def stat(self) -> DirectoryStat:
        """A snapshot of the counters."""
        return DirectoryStat(
            nodes=len(self._nodes),
            blocks=len(self._spans),
            replicas=self._replica_count,
            leases=len(self._leases),
            stale_events=self._stale_events,
            refused_replicas=self._refused_replicas,
            broken_leases=self._broken_leases,
        )

    def _nodes_of(self, mask: int) -> list[NodeId]:
        """The nodes of a mask, in the order of their bits. The first block of a hot chain lies
        on hundreds of nodes, and always on the same: the lists of some masks are remembered."""
        nodes = self._listed.get(mask)
        if nodes is not None:
            return nodes
        if len(self._listed) >= _LISTED_MASKS:
            self._listed.clear()
        self._listed[mask] = nodes = []
        while mask:
            bit = mask & -mask
            nodes.append(self._node_of_bit[bit])
            mask ^= bit
        return nodes

    def _note(self, mask: int, count: int, prefixes: dict[NodeId, int]) -> None:
        prefixes.update(dict.fromkeys(self._nodes_of(mask), count))

    def _join(self, node: NodeId) -> None:
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._node_of_bit)
        self._node_of_bit[bit] = node
        self._listed.clear()
        self._nodes[node] = _Holdings(bit)

    def _lose(self, node: NodeId) -> None:
        holdings = self._nodes.pop(node, None)
        if holdings is None:
            return
        for shelf in holdings.shelves.values():
            for span in shelf:
                self._replica_count -= len(span.keys)
                # A span on two tiers comes by twice.
                span.mask &= ~holdings.bit
                if not span.mask:
                    for key in span.keys:
                        self._spans.pop(key, None)
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
        shelf = holdings.shelves[event.tier]
        room = self._replica_limit - self._replica_count
        if len(event.keys) > room:
            event = self._first_that_fit(shelf, event, room)
        keys = event.keys
        whole = _Places(event.slots, event.generations, 0)
        at = 0
        while at < len(keys):
            span = self._spans.get(keys[at])
            span = self._begin_span(keys, at) if span is None else self._part(span, keys, at)
            size = len(span.keys)
            if span not in shelf:
                self._replica_count += size
                span.mask |= holdings.bit
            shelf[span] = whole if size == len(keys) else whole.part(at, at + size)
            at += size

    def _first_that_fit(self, shelf: _Shelf, event: BlocksCommitted, room: int) -> BlocksCommitted:
        """Those of a node's blocks that it holds already, and so many new ones as there is room."""
        fitting: list[int] = []
        for at, key in enumerate(event.keys):
            if self._spans.get(key) not in shelf:
                if not room:
                    self._refused_replicas += 1
                    continue
                room -= 1
            fitting.append(at)
        return BlocksCommitted(
            event.node,
            event.tier,
            tuple([event.keys[at] for at in fitting]),
            tuple([event.slots[at] for at in fitting]),
            tuple([event.generations[at] for at in fitting]),
        )

    def _evict(self, event: BlocksEvicted) -> None:
        holdings = self._nodes.get(event.node)
        if holdings is None:
            self._stale_events += 1
            return
        shelf = holdings.shelves[event.tier]
        others = [held for held in holdings.shelves.values() if held and held is not shelf]
        # A chain loses its tail first; spans run from the first block to the deepest.
        keys = event.keys[::-1]
        at = 0
        while at < len(keys):
            span = self._spans.get(keys[at])
            if span is None:
                self._stale_events += 1
                at += 1
                continue
            span = self._part(span, keys, at)
            size = len(span.keys)
            at += size
            if shelf.pop(span, None) is None:
                self._stale_events += size
                continue
            self._replica_count -= size
            if not any(span in other for other in others):
                self._let_go(span, holdings)

    def _let_go(self, span: _Span, holdings: _Holdings) -> None:
        """A node holds a span no more, on any tier."""
        leased = holdings.leased
        if leased:
            self._broken_leases += sum([key in leased for key in span.keys])
        span.mask &= ~holdings.bit
        if not span.mask:
            for key in span.keys:
                del self._spans[key]

    def _begin_span(self, keys: tuple[BlockKey, ...], at: int) -> _Span:
        """A span, on no node yet, of ``keys`` from ``at`` on, up to the next that is known."""
        span = _Span((), 0)
        spans = self._spans
        before, end = len(spans), at
        for key in keys[at:]:
            if spans.setdefault(key, span) is not span:
                break
            end += 1
        if len(spans) - before != end - at:
            # A node has named a key twice: the span ends before its return.
            entered = keys[at:end]
            kept: set[BlockKey] = set()
            end = at
            while keys[end] not in kept:
                kept.add(keys[end])
                end += 1
            for key in entered:
                if key not in kept:
                    spans.pop(key, None)
        span.keys = keys[at:end]
        return span

    def _part(self, span: _Span, keys: tuple[BlockKey, ...], at: int) -> _Span:
        """The part of a span that ``keys`` go through from index ``at`` on, split off."""
        start = place_of(span.keys, keys[at])
        if start:
            span = self._split(span, start)[1]
        size = shared_count(span.keys, 0, keys, at)
        if size < len(span.keys):
            span = self._split(span, size)[0]
        return span

    def _split(self, span: _Span, at: int) -> tuple[_Span, _Span]:
        """Part a span after ``at`` keys; both parts."""
        keys, mask = span.keys, span.mask
        size = len(keys)
        if 2 * at < size:
            # The shorter part is the new one: its keys are entered anew.
            first, rest = _Span(keys[:at], mask), span
            rest.keys = keys[at:]
            new = first
        else:
            first, rest = span, _Span(keys[at:], mask)
            first.keys = keys[:at]
            new = rest
        for node in self._nodes_of(mask):
            for shelf in self._nodes[node].shelves.values():
                places = shelf.get(span) if shelf else None
                if places is not None:
                    shelf[first] = places.part(0, at)
                    shelf[rest] = places.part(at, size)
        spans = self._spans
        for key in new.keys:
            spans[key] = new
        return first, rest

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
