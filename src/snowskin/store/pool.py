"""Who has which slot of a segment: the pure bookkeeping of a node's DRAM pool. It moves no bytes.

A slot is *free*; or *reserved* (being written, readable to no one by its key); or *committed*
(its key is held, whole, and never changes). Pins and leases protect it: a pin is a local use, a
lease is a peer's use with a deadline. A committed slot without either may be evicted.

A slot's generation is even while it is free and odd while it is in use, and grows by one at each
change; it is the same number as in the segment's table (see ``transfer.memory``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import cast

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

Run = tuple[type[Committed] | type[Evicted], list[PlacedBlock]]
"""Events of one kind that followed each other."""


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
        # One list for each fact about a slot: a pool has thousands of slots, and a simulated
        # cluster hundreds of pools. A slot that holds its key is committed; one that is in use
        # without a key is reserved.
        self._slot_count = slot_count
        self._keys: list[BlockKey | None] = [None] * slot_count
        self._blocks: list[PlacedBlock | None] = [None] * slot_count
        self._generations = [0] * slot_count
        self._pins = [0] * slot_count
        self._leased: dict[SlotIndex, int] = {}
        # The lowest free slot first: neighbours are copied in one piece. Slots from
        # ``_untouched`` on were never in use.
        self._free: list[int] = []
        self._untouched = 0
        self._held: dict[BlockKey, SlotIndex] = {}
        self._policy = policy
        self._leases: dict[str, _Lease] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._runs: list[Run] = []
        self._untold_count = 0
        self._untold_limit = 4 * slot_count + 64
        self._reserved_count = 0
        self._commits = 0
        self._evictions = 0
        self._duplicate_commits = 0
        self._refusals = 0

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are committed here. Counts as no use."""
        held = self._held
        for index, key in enumerate(keys):
            if key not in held:
                return index
        return len(keys)

    def held(self) -> tuple[PlacedBlock, ...]:
        """Every committed block, in order of commitment."""
        return tuple(self._block(index) for index in self._held.values())

    def pin(self, keys: Sequence[BlockKey]) -> tuple[PlacedBlock, ...]:
        """Pin the longest committed prefix of ``keys``, once more each; its blocks."""
        matched = keys[: self.match(keys)]
        for key in reversed(matched):
            index = self._held[key]
            self._protect(index, key)
            self._pins[index] += 1
            self._policy.touch(key)
        return tuple([self._block(self._held[key]) for key in matched])

    def reserve(self, keys: Sequence[BlockKey]) -> tuple[PlacedBlock, ...] | PoolFull:
        """Take a slot for each key to write into, pinned once, evicting as needed; all or none.

        The keys are names only: nobody finds a block by its key before ``commit``.
        """
        count = len(keys)
        free_count = self._free_count()
        obtainable = free_count + self._policy.exposed_count()
        if count > obtainable:
            self._refusals += 1
            return PoolFull(wanted=count, obtainable=obtainable)
        generations, pins, blocks = self._generations, self._pins, self._blocks
        taken: list[PlacedBlock] = []
        for key, index in zip(keys, self._take(count, free_count), strict=True):
            generation = generations[index] + 1
            generations[index] = generation
            pins[index] = 1
            block = PlacedBlock(key, index, generation)
            blocks[index] = block
            taken.append(block)
        self._reserved_count += count
        return tuple(taken)

    def commit(
        self, slots: Sequence[SlotIndex], keys: Sequence[BlockKey], *, depth: int = 0
    ) -> tuple[SlotIndex, ...]:
        """Name reserved slots, whose bytes are whole; those that hold their key from now on.

        Write-once: if a key is held in another slot already, that copy stays, and this slot stays
        private (reserved) until its release.

        Args:
            depth: index in its chain of the first of these blocks.
        """
        blocks: list[PlacedBlock] = []
        uses: list[tuple[BlockKey, int]] = []
        held, names = self._held, self._keys
        for index, key in zip(slots, keys, strict=True):
            block = self._blocks[index]
            assert block is not None, f"slot {index} is not reserved"
            assert names[index] is None, f"slot {index} is not reserved"
            if key in held:
                self._duplicate_commits += 1
            else:
                if block.key != key:
                    block = self._blocks[index] = PlacedBlock(key, index, block.generation)
                names[index] = key
                held[key] = index
                blocks.append(block)
                uses.append((key, depth))
            depth += 1
        uses.reverse()
        self._policy.insert_protected(uses)
        self._reserved_count -= len(blocks)
        self._commits += len(blocks)
        self._tell(Committed, blocks)
        return tuple([block.slot for block in blocks])

    def release(self, slots: Sequence[SlotIndex]) -> tuple[SlotIndex, ...]:
        """Undo one pin of each; the reserved slots among them that are free from now on."""
        freed: list[SlotIndex] = []
        unused: list[BlockKey] = []
        for index in reversed(slots):
            pins = self._pins[index]
            assert pins > 0, f"slot {index} is not pinned"
            self._pins[index] = pins - 1
            if pins > 1:
                continue
            key = self._keys[index]
            if key is None:
                self._make_free(index)
                freed.append(index)
            elif index not in self._leased:
                unused.append(key)
        self._policy.expose_all(unused)
        self._reserved_count -= len(freed)
        freed.reverse()
        return tuple(freed)

    def grant_lease(self, owner: str, keys: Sequence[BlockKey], until_s: float) -> int:
        """Protect those of ``keys`` that are committed until ``until_s``; how many they are.

        A lease that the owner has already is replaced.
        """
        slots = tuple(self._held[key] for key in keys if key in self._held)
        for index in reversed(slots):
            key = self._keys[index]
            assert key is not None
            self._protect(index, key)
            self._leased[index] = self._leased.get(index, 0) + 1
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
        unused: list[BlockKey] = []
        for index in reversed(lease.slots):
            left = self._leased.pop(index) - 1
            if left:
                self._leased[index] = left
            elif not self._pins[index]:
                key = self._keys[index]
                assert key is not None
                unused.append(key)
        self._policy.expose_all(unused)
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
        return tuple([kind(block) for kind, blocks in self.drain_runs() for block in blocks])

    def drain_runs(self) -> list[Run]:
        """The same as ``drain_events``, one entry for each run of events of one kind."""
        runs, self._runs = self._runs, []
        self._untold_count = 0
        return runs

    def stat(self) -> PoolStat:
        """Counts, see ``PoolStat``."""
        return PoolStat(
            slot_count=self._slot_count,
            free_slots=self._free_count(),
            reserved_slots=self._reserved_count,
            committed_slots=len(self._held),
            evictable_slots=self._policy.exposed_count(),
            lease_count=len(self._leases),
            committed_total=self._commits,
            evicted_total=self._evictions,
            duplicate_total=self._duplicate_commits,
            refused_total=self._refusals,
        )

    def _free_count(self) -> int:
        return len(self._free) + self._slot_count - self._untouched

    def _take(self, count: int, free_count: int) -> list[SlotIndex]:
        """The lowest free slots; all of them and evicted ones where they do not suffice."""
        free = self._free
        if count > free_count:
            evicted = self._evict(count - free_count)
            taken = sorted([*free, *range(self._untouched, self._slot_count), *evicted])
            free.clear()
            self._untouched = self._slot_count
        else:
            # Slots that were in use before are all lower than those that never were.
            used = min(count, len(free))
            first = self._untouched
            self._untouched += count - used
            taken = [heapq.heappop(free) for _ in range(used)]
            taken += range(first, self._untouched)
        return cast(list[SlotIndex], taken)

    def _evict(self, count: int) -> list[SlotIndex]:
        """The slots of the next ``count`` victims, which are nobody's from now on."""
        victims = self._policy.evict(count)
        assert len(victims) == count, "the policy counts exposed keys that it does not give"
        pop = self._held.pop
        slots = [pop(key) for key in victims]
        evicted: list[PlacedBlock] = []
        for index in slots:
            assert not self._pins[index], f"slot {index} is pinned"
            assert index not in self._leased, f"slot {index} is leased"
            evicted.append(self._block(index))
            self._generations[index] += 1
            self._keys[index] = None
        self._evictions += count
        self._tell(Evicted, evicted)
        return slots

    def _make_free(self, index: SlotIndex) -> None:
        self._generations[index] += 1
        self._keys[index] = None
        self._blocks[index] = None
        heapq.heappush(self._free, index)

    def _block(self, index: SlotIndex) -> PlacedBlock:
        block = self._blocks[index]
        assert block is not None, f"slot {index} is free"
        return block

    def _protect(self, index: SlotIndex, key: BlockKey) -> None:
        """Before a pin or lease is added to a committed slot."""
        if not self._pins[index] and index not in self._leased:
            self._policy.protect(key)

    def _tell(self, kind: type[Committed] | type[Evicted], blocks: list[PlacedBlock]) -> None:
        if not blocks:
            return
        self._runs.append((kind, blocks))
        self._untold_count += len(blocks)
        if self._untold_count > self._untold_limit:
            self._runs = _compact(self._runs)
            self._untold_count = sum(len(run) for _, run in self._runs)


def _compact(runs: list[Run]) -> list[Run]:
    """The same net effect in at most two events per key that was held before or is held after.

    The events of one key alternate. Its first is kept if it is an eviction (the key was known),
    its last if it is a commitment (the key is held now).
    """
    first: dict[BlockKey, int] = {}
    last: dict[BlockKey, int] = {}
    listed = [(kind, block) for kind, blocks in runs for block in blocks]
    for position, (_, block) in enumerate(listed):
        first.setdefault(block.key, position)
        last[block.key] = position
    kept = {at for at in first.values() if listed[at][0] is Evicted}
    kept.update(at for at in last.values() if listed[at][0] is Committed)
    return [(kind, [block]) for at, (kind, block) in enumerate(listed) if at in kept]
