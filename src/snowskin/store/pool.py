"""Who has which slot of a segment: the pure bookkeeping of a node's DRAM pool. It moves no bytes.

A slot is *free*; or *reserved* (being written, readable to no one by its key); or *committed*
(its key is held, whole, and never changes). Pins and leases protect it: a pin is a local use, a
lease is a peer's use with a deadline. A committed slot without either may be evicted.

A slot's generation is even while it is free and odd while it is in use, and grows by one at each
change; it is the same number as in the segment's table (see ``transfer.memory``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from snowskin.store.eviction import EvictionPolicy
from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import BlockKey, SlotIndex


class PoolFull(msgspec.Struct, frozen=True):
    """There is no room: ``wanted`` slots were asked for, ``obtainable`` could be had now."""

    wanted: int
    obtainable: int


class Committed(msgspec.Struct, frozen=True):
    """The block's key is held here from now on."""

    block: PlacedBlock


class Evicted(msgspec.Struct, frozen=True):
    """The block's key is held no more, and its slot may be reused."""

    block: PlacedBlock


PoolEvent = Committed | Evicted


class PoolStat(msgspec.Struct, frozen=True):
    """Slots now (free + reserved + committed = slot_count), and events since the start."""

    slot_count: int
    free_slots: int
    reserved_slots: int
    committed_slots: int
    evictable_slots: int
    lease_count: int
    committed_total: int
    evicted_total: int
    duplicate_total: int
    """Commits of a key that another slot held already."""
    refused_total: int
    """Reservations that found no room."""


class _State(Enum):
    FREE = "free"
    RESERVED = "reserved"
    COMMITTED = "committed"


class _Slot:
    __slots__ = ("generation", "key", "leases", "pins", "state")

    def __init__(self) -> None:
        self.state = _State.FREE
        self.generation = 0
        self.key: BlockKey | None = None
        self.pins = 0
        self.leases = 0


class _Lease:
    __slots__ = ("slots", "until_s")

    def __init__(self, slots: tuple[SlotIndex, ...], until_s: float) -> None:
        self.slots = slots
        self.until_s = until_s


class BlockPool:
    """Slots, their states and protections; evicts by ``policy`` when room is needed.

    Sequences of keys or slots are in chain order (first block first). Uses are told to the policy
    from the deepest to the first, see ``store.eviction``.
    """

    def __init__(self, slot_count: int, policy: EvictionPolicy[BlockKey]) -> None:
        self._slots = [_Slot() for _ in range(slot_count)]
        # The lowest free slot first: neighbours are copied in one piece.
        self._free = list(range(slot_count))
        self._held: dict[BlockKey, SlotIndex] = {}
        self._policy = policy
        self._leases: dict[str, _Lease] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._events: list[PoolEvent] = []
        self._events_limit = 4 * slot_count + 64
        self._reserved_count = 0
        self._commits = 0
        self._evictions = 0
        self._duplicate_commits = 0
        self._refusals = 0

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are committed here. Counts as no use."""
        for index, key in enumerate(keys):
            if key not in self._held:
                return index
        return len(keys)

    def held(self) -> tuple[PlacedBlock, ...]:
        """Every committed block, in order of commitment."""
        return tuple(self._placed(key, index) for key, index in self._held.items())

    def pin(self, keys: Sequence[BlockKey]) -> tuple[PlacedBlock, ...]:
        """Pin the longest committed prefix of ``keys``, once more each; its blocks."""
        matched = keys[: self.match(keys)]
        for key in reversed(matched):
            index = self._held[key]
            self._protect(index)
            self._slots[index].pins += 1
            self._policy.touch(key)
        return tuple(self._placed(key, self._held[key]) for key in matched)

    def reserve(self, keys: Sequence[BlockKey]) -> tuple[PlacedBlock, ...] | PoolFull:
        """Take a slot for each key to write into, pinned once, evicting as needed; all or none.

        The keys are names only: nobody finds a block by its key before ``commit``.
        """
        count = len(keys)
        obtainable = len(self._free) + self._policy.exposed_count()
        if count > obtainable:
            self._refusals += 1
            return PoolFull(wanted=count, obtainable=obtainable)
        while len(self._free) < count:
            self._evict_one()
        taken = tuple(SlotIndex(heapq.heappop(self._free)) for _ in range(count))
        for index in taken:
            slot = self._slots[index]
            slot.state = _State.RESERVED
            slot.generation += 1
            slot.pins = 1
        self._reserved_count += count
        return tuple(self._placed(key, index) for key, index in zip(keys, taken, strict=True))

    def commit(
        self, slots: Sequence[SlotIndex], keys: Sequence[BlockKey], *, depth: int = 0
    ) -> tuple[SlotIndex, ...]:
        """Name reserved slots, whose bytes are whole; those that hold their key from now on.

        Write-once: if a key is held in another slot already, that copy stays, and this slot stays
        private (reserved) until its release.

        Args:
            depth: index in its chain of the first of these blocks.
        """
        committed: list[tuple[BlockKey, SlotIndex, int]] = []
        for offset, (index, key) in enumerate(zip(slots, keys, strict=True)):
            slot = self._slots[index]
            assert slot.state is _State.RESERVED, f"slot {index} is not reserved"
            if key in self._held:
                self._duplicate_commits += 1
                continue
            slot.state = _State.COMMITTED
            slot.key = key
            self._held[key] = index
            committed.append((key, index, depth + offset))
            self._tell(Committed(self._placed(key, index)))
        for key, _, key_depth in reversed(committed):
            self._policy.insert(key, depth=key_depth)
            self._policy.protect(key)
        self._reserved_count -= len(committed)
        self._commits += len(committed)
        return tuple(index for _, index, _ in committed)

    def release(self, slots: Sequence[SlotIndex]) -> tuple[SlotIndex, ...]:
        """Undo one pin of each; the reserved slots among them that are free from now on."""
        freed: list[SlotIndex] = []
        for index in reversed(slots):
            slot = self._slots[index]
            assert slot.pins > 0, f"slot {index} is not pinned"
            slot.pins -= 1
            if slot.state is _State.COMMITTED:
                self._expose_if_unused(slot)
            elif slot.pins == 0:
                self._make_free(index)
                self._reserved_count -= 1
                freed.append(index)
        freed.reverse()
        return tuple(freed)

    def grant_lease(self, owner: str, keys: Sequence[BlockKey], until_s: float) -> int:
        """Protect those of ``keys`` that are committed until ``until_s``; how many they are.

        A lease that the owner has already is replaced.
        """
        slots = tuple(self._held[key] for key in keys if key in self._held)
        for index in reversed(slots):
            self._protect(index)
            self._slots[index].leases += 1
        self.end_lease(owner)
        if slots:
            self._leases[owner] = _Lease(slots, until_s)
            heapq.heappush(self._deadlines, (until_s, owner))
        return len(slots)

    def end_lease(self, owner: str) -> bool:
        """End an owner's lease early; False if it had none."""
        lease = self._leases.pop(owner, None)
        if lease is None:
            return False
        for index in reversed(lease.slots):
            slot = self._slots[index]
            slot.leases -= 1
            self._expose_if_unused(slot)
        if len(self._deadlines) > 2 * len(self._leases) + 64:
            self._deadlines = [(held.until_s, name) for name, held in self._leases.items()]
            heapq.heapify(self._deadlines)
        return True

    def expire(self, now_s: float) -> tuple[str, ...]:
        """End every lease whose deadline has come; their owners, the earliest first."""
        ended: list[str] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            until_s, owner = heapq.heappop(self._deadlines)
            lease = self._leases.get(owner)
            if lease is not None and lease.until_s == until_s:
                self.end_lease(owner)
                ended.append(owner)
        return tuple(ended)

    def next_expiry_s(self) -> float | None:
        """When ``expire`` may next have something to do."""
        return self._deadlines[0][0] if self._deadlines else None

    def drain_events(self) -> tuple[PoolEvent, ...]:
        """What was committed and evicted since the last call, in true order.

        If nobody drains for long, keys that came and went in between are left out; to replay the
        events onto what was known gives exactly what is held all the same.
        """
        events, self._events = tuple(self._events), []
        return events

    def stat(self) -> PoolStat:
        """Counts, see ``PoolStat``."""
        return PoolStat(
            slot_count=len(self._slots),
            free_slots=len(self._free),
            reserved_slots=self._reserved_count,
            committed_slots=len(self._held),
            evictable_slots=self._policy.exposed_count(),
            lease_count=len(self._leases),
            committed_total=self._commits,
            evicted_total=self._evictions,
            duplicate_total=self._duplicate_commits,
            refused_total=self._refusals,
        )

    def _evict_one(self) -> None:
        key = self._policy.victim()
        assert key is not None, "the policy counts an exposed key that it does not name"
        index = self._held.pop(key)
        slot = self._slots[index]
        assert slot.pins == 0, f"slot {index} is pinned"
        assert slot.leases == 0, f"slot {index} is leased"
        self._policy.remove(key)
        self._tell(Evicted(self._placed(key, index)))
        self._make_free(index)
        self._evictions += 1

    def _make_free(self, index: SlotIndex) -> None:
        slot = self._slots[index]
        slot.state = _State.FREE
        slot.generation += 1
        slot.key = None
        heapq.heappush(self._free, index)

    def _placed(self, key: BlockKey, index: SlotIndex) -> PlacedBlock:
        return PlacedBlock(key=key, slot=index, generation=self._slots[index].generation)

    def _protect(self, index: SlotIndex) -> None:
        """Before a pin or lease is added to a committed slot."""
        slot = self._slots[index]
        assert slot.key is not None
        if slot.pins == 0 and slot.leases == 0:
            self._policy.protect(slot.key)

    def _expose_if_unused(self, slot: _Slot) -> None:
        """After a pin or lease of a committed slot has gone."""
        assert slot.key is not None
        if slot.pins == 0 and slot.leases == 0:
            self._policy.expose(slot.key)

    def _tell(self, event: PoolEvent) -> None:
        self._events.append(event)
        if len(self._events) > self._events_limit:
            self._events = _compact(self._events)


def _compact(events: Iterable[PoolEvent]) -> list[PoolEvent]:
    """The same net effect in at most two events per key that was held before or is held after.

    The events of one key alternate. Its first is kept if it is an eviction (the key was known),
    its last if it is a commitment (the key is held now).
    """
    first: dict[BlockKey, int] = {}
    last: dict[BlockKey, int] = {}
    listed = list(events)
    for position, event in enumerate(listed):
        first.setdefault(event.block.key, position)
        last[event.block.key] = position
    kept = {at for at in first.values() if isinstance(listed[at], Evicted)}
    kept.update(at for at in last.values() if isinstance(listed[at], Committed))
    return [event for position, event in enumerate(listed) if position in kept]
