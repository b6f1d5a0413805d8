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
from typing import TypeVar, cast

import msgspec

from snowskin.store.runs import Run, make_order, shared_count
from snowskin.terms.events import BlocksCommitted, BlocksEvicted
from snowskin.terms.ids import BlockKey, NodeId, SlotIndex, Tier

T = TypeVar("T")

_DRAM = Tier.DRAM
"""Looked up once: a member of an enumeration takes as long as the rest of a message."""


class PoolFull(msgspec.Struct, frozen=True):
    """There is no room: ``wanted`` slots were asked for, ``obtainable`` could be had now."""

    wanted: int
    obtainable: int


class Committed(msgspec.Struct, frozen=True, gc=False):
    """These keys are held from now on, each in its slot."""

    keys: tuple[BlockKey, ...]
    slots: tuple[SlotIndex, ...]
    generations: tuple[int, ...]

    def event(self, node: NodeId) -> BlocksCommitted:
        """As a node tells it of its DRAM."""
        return BlocksCommitted(node, _DRAM, self.keys, self.slots, self.generations)


class Evicted(msgspec.Struct, frozen=True, gc=False):
    """These keys are held no more, and their slots may be reused."""

    keys: tuple[BlockKey, ...]

    def event(self, node: NodeId) -> BlocksEvicted:
        """As a node tells it of its DRAM."""
        return BlocksEvicted(node, _DRAM, self.keys)


Change = Committed | Evicted


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
    __slots__ = ("keys", "until_s")

    def __init__(self, keys: tuple[BlockKey, ...], until_s: float) -> None:
        self.keys = keys
        self.until_s = until_s


class BlockPool:
    """Slots, their states and protections; evicts by a policy when room is needed.

    Sequences of keys or slots are in chain order (first block first). Blocks are used from the
    deepest to the first, see ``store.eviction``. What is committed is kept in runs, see
    ``store.runs``.

    Args:
        eviction: name of the policy.
    """

    def __init__(self, slot_count: int, eviction: str = "lru") -> None:
        self._slot_count = slot_count
        self._generations = [0] * slot_count
        self._keys: list[BlockKey | None] = [None] * slot_count
        """By slot; None while it is free or reserved."""
        self._reserved_count = 0
        """Each reserved slot is pinned once: nobody but who reserved it knows of it."""
        self._held: dict[BlockKey, Run] = {}
        self._order = make_order(eviction)
        # The lowest free slot first: neighbours are copied in one piece. Slots from
        # ``_untouched`` on were never in use.
        self._free: list[int] = []
        self._untouched = 0
        self._leases: dict[str, _Lease] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._changes: list[Change] = []
        self._untold_count = 0
        self._untold_limit = 4 * slot_count + 64
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

    def held(self) -> Committed:
        """Every committed block, in order of commitment."""
        keys, slots = tuple(self._held), tuple(self._slots_of(self._held))
        return Committed(keys, slots, self.generations(slots))

    def generations(self, slots: Sequence[SlotIndex]) -> tuple[int, ...]:
        """The generation of each slot's newest use."""
        generations = self._generations
        return tuple([generations[slot] for slot in slots])

    def pin(self, keys: Sequence[BlockKey]) -> tuple[SlotIndex, ...]:
        """Pin the longest committed prefix of ``keys``, once more each; its slots."""
        slots: tuple[SlotIndex, ...] = ()
        for run in self._runs_of(tuple(keys)):
            if run.turn:
                self._order.protect(run)
            run.pins += 1
            run.uses += 1
            slots += run.slots
        return slots

    def reserve(self, count: int) -> tuple[SlotIndex, ...] | PoolFull:
        """Take so many slots to write into, pinned once, evicting as needed; all or none."""
        free_count = self._free_count()
        obtainable = free_count + self._order.block_count
        if count > obtainable:
            self._refusals += 1
            return PoolFull(wanted=count, obtainable=obtainable)
        generations = self._generations
        slots = self._take(count, free_count)
        for slot in slots:
            generations[slot] += 1
        self._reserved_count += count
        return tuple(slots)

    def commit(
        self, slots: Sequence[SlotIndex], keys: Sequence[BlockKey], *, depth: int = 0
    ) -> tuple[SlotIndex, ...]:
        """Name reserved slots, whose bytes are whole; those that hold their key from now on.

        Write-once: if a key is held in another slot already, that copy stays, and this slot stays
        private (reserved) until its release.

        Args:
            depth: index in its chain of the first of these blocks.
        """
        assert len(slots) == len(keys), f"{len(slots)} slots, but {len(keys)} keys"
        for slot in slots:
            self._check_reserved(slot)
        if not keys:
            return ()
        run = Run(tuple(keys), tuple(slots), depth)
        if self._enter(run):
            self._hold(run)
            return run.slots
        if len(keys) == 1:
            self._duplicate_commits += 1
            return ()
        # Halves, until a half is all new or a single duplicate.
        half = len(keys) // 2
        return self.commit(slots[:half], keys[:half], depth=depth) + self.commit(
            slots[half:], keys[half:], depth=depth + half
        )

    def release(self, slots: Sequence[SlotIndex]) -> tuple[SlotIndex, ...]:
        """Undo one pin of each; the reserved slots among them that are free from now on."""
        slots = tuple(slots)
        freed: list[SlotIndex] = []
        unused: list[Run] = []
        at = 0
        while at < len(slots):
            slot = slots[at]
            key = self._keys[slot]
            if key is None:
                self._check_reserved(slot)
                self._generations[slot] += 1
                freed.append(slot)
                at += 1
                continue
            run = self._held[key]
            run = self._part(run, run.slots, slots, at)
            assert run.pins > 0, f"slot {slot} is not pinned"
            run.pins -= 1
            if not run.pins and not run.leases:
                unused.append(run)
            at += len(run.slots)
        for run in reversed(unused):
            self._order.expose(run)
        self._reserved_count -= len(freed)
        for slot in freed:
            heapq.heappush(self._free, slot)
        return tuple(freed)

    def grant_lease(self, owner: str, keys: Sequence[BlockKey], until_s: float) -> int:
        """Protect those of ``keys`` that are committed until ``until_s``; how many they are.

        A lease that the owner has already is replaced.
        """
        leased = tuple([key for key in keys if key in self._held])
        for run in self._runs_of(leased):
            if run.turn:
                self._order.protect(run)
            run.leases += 1
        self.end_lease(owner)
        if leased:
            self._leases[owner] = _Lease(leased, until_s)
            heapq.heappush(self._deadlines, (until_s, owner))
        return len(leased)

    def end_lease(self, owner: str) -> bool:
        """End an owner's lease early; False if it had none."""
        lease = self._leases.pop(owner, None)
        if lease is None:
            return False
        for run in reversed(self._runs_of(lease.keys)):
            run.leases -= 1
            if not run.pins and not run.leases:
                self._order.expose(run)
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

    def drain_changes(self) -> list[Change]:
        """What was committed and evicted since the last call, in true order.

        If nobody drains for long, keys that came and went in between are left out; to replay the
        changes onto what was known gives exactly what is held all the same.
        """
        changes, self._changes = self._changes, []
        self._untold_count = 0
        return changes

    def stat(self) -> PoolStat:
        """Counts, see ``PoolStat``."""
        return PoolStat(
            slot_count=self._slot_count,
            free_slots=self._free_count(),
            reserved_slots=self._reserved_count,
            committed_slots=len(self._held),
            evictable_slots=self._order.block_count,
            lease_count=len(self._leases),
            committed_total=self._commits,
            evicted_total=self._evictions,
            duplicate_total=self._duplicate_commits,
            refused_total=self._refusals,
        )

    def _check_reserved(self, slot: SlotIndex) -> None:
        assert self._generations[slot] % 2, f"slot {slot} is free"
        assert self._keys[slot] is None, f"slot {slot} is committed"

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
        order, held, names, generations = self._order, self._held, self._keys, self._generations
        slots: list[SlotIndex] = []
        evicted: list[BlockKey] = []
        while len(slots) < count:
            run, last_count = order.next_run()
            assert not run.pins, f"{run.slots} are pinned"
            assert not run.leases, f"{run.slots} are leased"
            run = order.take_last(run, min(last_count, count - len(slots)))
            for key in run.keys:
                del held[key]
            for slot in run.slots:
                names[slot] = None
                generations[slot] += 1
            slots += run.slots
            evicted += reversed(run.keys)
        self._evictions += count
        self._tell(Evicted(tuple(evicted)))
        return slots

    def _enter(self, run: Run) -> bool:
        """Let the keys of a run be found, if none of them is held already; whether so."""
        held, keys = self._held, run.keys
        before = len(held)
        entered = 0
        for key in keys:
            if held.setdefault(key, run) is not run:
                break
            entered += 1
        if len(held) == before + len(keys):
            return True
        # Held already, or twice among these.
        for key in keys[:entered]:
            held.pop(key, None)
        return False

    def _hold(self, run: Run) -> None:
        """From now on reserved slots, pinned once each, hold the keys of this run."""
        names, keys, slots = self._keys, run.keys, run.slots
        for slot, key in zip(slots, keys):
            names[slot] = key
        run.pins = 1
        self._reserved_count -= len(slots)
        self._commits += len(keys)
        self._tell(Committed(keys, slots, self.generations(slots)))

    def _slots_of(self, keys: Iterable[BlockKey]) -> list[SlotIndex]:
        """The slots of held keys."""
        slots: list[SlotIndex] = []
        for key in keys:
            run = self._held[key]
            slots.append(run.slots[run.keys.index(key)])
        return slots

    def _runs_of(self, keys: tuple[BlockKey, ...]) -> list[Run]:
        """The runs that the longest held prefix of ``keys`` consists of, and nothing else."""
        get = self._held.get
        runs: list[Run] = []
        at = 0
        while at < len(keys):
            run = get(keys[at])
            if run is None:
                break
            run = self._part(run, run.keys, keys, at)
            runs.append(run)
            at += len(run.keys)
        return runs

    def _part(self, run: Run, own: tuple[T, ...], wanted: tuple[T, ...], at: int) -> Run:
        """The part of a run that ``wanted`` goes through from index ``at`` on, split off.

        Args:
            own: the run's keys if ``wanted`` are keys, its slots if they are slots.
        """
        if own[0] != wanted[at]:
            start = own.index(wanted[at])
            run, own = self._split(run, start), own[start:]
        size = shared_count(own, 0, wanted, at)
        if size < len(own):
            self._split(run, size)
        return run

    def _split(self, run: Run, at: int) -> Run:
        """Part a run after ``at`` blocks; the later part."""
        rest = self._order.split(run, at)
        self._held.update(dict.fromkeys(rest.keys, rest))
        return rest

    def _tell(self, change: Change) -> None:
        self._changes.append(change)
        self._untold_count += len(change.keys)
        if self._untold_count > self._untold_limit:
            self._changes = _compact(self._changes)
            self._untold_count = sum([len(kept.keys) for kept in self._changes])


def _compact(changes: list[Change]) -> list[Change]:
    """The same net effect in at most two events per key that was held before or is held after.

    The events of one key alternate. Its first is kept if it is an eviction (the key was known),
    its last if it is a commitment (the key is held now).
    """
    single = [one for change in changes for one in _one_by_one(change)]
    first: dict[BlockKey, int] = {}
    last: dict[BlockKey, int] = {}
    for position, one in enumerate(single):
        first.setdefault(one.keys[0], position)
        last[one.keys[0]] = position
    kept = {at for at in first.values() if isinstance(single[at], Evicted)}
    kept.update([at for at in last.values() if isinstance(single[at], Committed)])
    return [single[at] for at in sorted(kept)]


def _one_by_one(change: Change) -> list[Change]:
    if isinstance(change, Evicted):
        return [Evicted((key,)) for key in change.keys]
    rows = zip(change.keys, change.slots, change.generations, strict=True)
    return [Committed((key,), (slot,), (generation,)) for key, slot, generation in rows]
