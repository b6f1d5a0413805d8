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
from typing import TypeVar, cast

import msgspec

from snowskin.store.changes import Change, Committed, Evicted, compact
from snowskin.store.runs import Run, make_order, place_of, shared_count
from snowskin.terms.ids import BlockKey, SlotIndex

T = TypeVar("T")


class PoolFull(msgspec.Struct, frozen=True):
    """There is no room: ``wanted`` slots were asked for, ``obtainable`` could be had now."""

    wanted: int
    obtainable: int


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
    """Slots, their states and protections; evicts by a policy when room is needed.

    Sequences of keys or slots are in chain order, keys from the first block of the chain on. Blocks
    are used from the deepest to the first, see ``store.eviction``. What is committed is kept in
    runs, see ``store.runs``.

    A key names all that comes before it in its chain. So whoever walks a chain comes to each of its
    runs at the head, and only heads need to be found by their keys. That holds as long as a block
    is held only after the one before it. Where it is not, since a fetch came too late or the head
    of a chain was evicted before its tail, the runs behind the gap are *loose*: found by every key.
    They stay loose when the gap is filled.

    Args:
        eviction: name of the policy.
    """

    def __init__(self, slot_count: int, eviction: str = "lru") -> None:
        self._slot_count = slot_count
        self._generations = [0] * slot_count
        self._runs: list[Run | None] = [None] * slot_count
        """By slot; None while it is free or reserved."""
        self._index: dict[BlockKey, Run] = {}
        """Every run by its first key, and loose ones by all."""
        self._loose_count = 0
        """Loose runs."""
        self._reserved_count = 0
        """Each reserved slot is pinned once: nobody but who reserved it knows of it."""
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
        keys = tuple(keys)
        count = 0
        while count < len(keys):
            run = self._index.get(keys[count])
            if run is None:
                break
            count += shared_count(run.keys, place_of(run.keys, keys[count]), keys, count)
        return count

    def held(self) -> Committed:
        """Every committed block, run by run."""
        keys: list[BlockKey] = []
        slots: list[SlotIndex] = []
        for run in dict.fromkeys(self._runs):
            if run is not None:
                keys += run.keys
                slots += run.slots
        return Committed(tuple(keys), tuple(slots), self.generations(slots))

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
        self, slots: Sequence[SlotIndex], chain: Sequence[BlockKey], *, depth: int = 0
    ) -> tuple[SlotIndex, ...]:
        """Name reserved slots, whose bytes are whole; those that hold their key from now on.

        Write-once: if a key is held in another slot already, that copy stays, and this slot stays
        private (reserved) until its release.

        Args:
            chain: the keys of these blocks, after those of all blocks before them.
            depth: index in the chain of the first of these blocks.
        """
        chain, slots = tuple(chain), tuple(slots)
        assert len(slots) == len(chain) - depth, (
            f"{len(slots)} slots, but {len(chain) - depth} keys"
        )
        for slot in slots:
            self._check_reserved(slot)
        before = self._run_before(chain, depth) if depth and slots else None
        committed: tuple[SlotIndex, ...] = ()
        at = depth
        while at < len(chain):
            run = self._index.get(chain[at])
            if run is not None:
                run = self._part(run, run.keys, chain, at)
                self._duplicate_commits += len(run.keys)
            else:
                end = self._next_loose(chain, at)
                run = Run(chain[at:end], slots[at - depth : end - depth], at)
                self._hold(run, before)
                committed += run.slots
            before = run
            at += len(run.keys)
        return committed

    def release(self, slots: Sequence[SlotIndex]) -> tuple[SlotIndex, ...]:
        """Undo one pin of each; the reserved slots among them that are free from now on."""
        slots = tuple(slots)
        freed: list[SlotIndex] = []
        unused: list[Run] = []
        at = 0
        while at < len(slots):
            slot = slots[at]
            run = self._runs[slot]
            if run is None:
                self._check_reserved(slot)
                self._generations[slot] += 1
                freed.append(slot)
                at += 1
                continue
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
        """Protect the longest committed prefix of ``keys`` until ``until_s``; its block count.

        A lease that the owner has already is replaced.
        """
        slots: tuple[SlotIndex, ...] = ()
        for run in self._runs_of(tuple(keys)):
            if run.turn:
                self._order.protect(run)
            run.leases += 1
            slots += run.slots
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
        unused: list[Run] = []
        at = 0
        # Runs are only ever split: where the lease ends, one ends.
        while at < len(lease.slots):
            run = self._runs[lease.slots[at]]
            assert run is not None, "a leased block was evicted"
            run.leases -= 1
            if not run.pins and not run.leases:
                unused.append(run)
            at += len(run.slots)
        for run in reversed(unused):
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
            committed_slots=self._commits - self._evictions,
            evictable_slots=self._order.block_count,
            lease_count=len(self._leases),
            committed_total=self._commits,
            evicted_total=self._evictions,
            duplicate_total=self._duplicate_commits,
            refused_total=self._refusals,
        )

    def _check_reserved(self, slot: SlotIndex) -> None:
        assert self._generations[slot] % 2, f"slot {slot} is free"
        assert self._runs[slot] is None, f"slot {slot} is committed"

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
        order, runs, generations = self._order, self._runs, self._generations
        slots: list[SlotIndex] = []
        evicted: list[BlockKey] = []
        while len(slots) < count:
            run, last_count = order.next_run()
            assert not run.pins, f"{run.slots} are pinned"
            assert not run.leases, f"{run.slots} are leased"
            taken = order.take_last(run, min(last_count, count - len(slots)))
            self._forget(run, taken)
            for slot in taken.slots:
                runs[slot] = None
                generations[slot] += 1
            slots += taken.slots
            evicted += reversed(taken.keys)
        self._evictions += count
        self._tell(Evicted(tuple(evicted)))
        return slots

    def _forget(self, run: Run, taken: Run) -> None:
        """Let the last part of a run, or all of it, be found no more."""
        if run.is_loose:
            for key in taken.keys:
                del self._index[key]
            if taken is run:
                self._loose_count -= 1
            return
        if taken is run:
            del self._index[run.keys[0]]
            if run.siblings is not None:
                del run.siblings[run]
        if run.followers:
            self._loosen(run.followers)
        run.followers = None

    def _loosen(self, followers: dict[Run, None]) -> None:
        """These runs, and all that go on from them, are behind a gap from now on."""
        behind = list(followers)
        for run in behind:
            if run.followers:
                behind += run.followers
            run.is_loose, run.siblings, run.followers = True, None, None
            self._enter_loose(run)

    def _enter_loose(self, run: Run) -> None:
        """Let a loose run be found by every key."""
        self._index.update(dict.fromkeys(run.keys, run))
        self._loose_count += 1

    def _run_before(self, chain: tuple[BlockKey, ...], depth: int) -> Run | None:
        """The run that ends just before this depth; None if the block there is not held."""
        run = self._index.get(chain[depth - 1])
        # A run of one block ends where it begins; any other is found by walking.
        if run is None or len(run.keys) > 1:
            runs = self._runs_of(chain[:depth])
            if sum([len(before.keys) for before in runs]) < depth:
                return None
            run = runs[-1]
        return run

    def _next_loose(self, chain: tuple[BlockKey, ...], at: int) -> int:
        """Where the blocks from ``at`` on, which is not held, end: at the next that is, if any."""
        if self._loose_count:
            for end in range(at + 1, len(chain)):
                if chain[end] in self._index:
                    return end
        return len(chain)

    def _hold(self, run: Run, before: Run | None) -> None:
        """From now on reserved slots, pinned once each, hold the keys of this run.

        Args:
            before: the run that it goes on from; None if there is none, or it is not held.
        """
        runs, slots = self._runs, run.slots
        for slot in slots:
            runs[slot] = run
        run.pins = 1
        run.is_loose = run.depth > 0 and (before is None or before.is_loose)
        if run.is_loose:
            self._enter_loose(run)
        else:
            self._index[run.keys[0]] = run
            if before is not None:
                run.follow(before)
        self._reserved_count -= len(slots)
        self._commits += len(slots)
        self._tell(Committed(run.keys, slots, self.generations(slots)))

    def _runs_of(self, keys: tuple[BlockKey, ...]) -> list[Run]:
        """The runs that the longest held prefix of ``keys`` consists of, and nothing else."""
        get = self._index.get
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
        start = place_of(own, wanted[at])
        if start:
            run, own = self._split(run, start), own[start:]
        size = shared_count(own, 0, wanted, at)
        if size < len(own):
            self._split(run, size)
        return run

    def _split(self, run: Run, at: int) -> Run:
        """Part a run after ``at`` blocks; the later part."""
        rest = self._order.split(run, at)
        for slot in rest.slots:
            self._runs[slot] = rest
        if run.is_loose:
            self._enter_loose(rest)
        else:
            self._index[rest.keys[0]] = rest
            rest.followers, run.followers = run.followers, None
            rest.follow(run)
        return rest

    def _tell(self, change: Change) -> None:
        self._changes.append(change)
        self._untold_count += len(change.keys)
        if self._untold_count > self._untold_limit:
            self._changes = compact(self._changes)
            self._untold_count = sum([len(kept.keys) for kept in self._changes])
