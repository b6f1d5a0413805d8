"""Which objects a node holds in DRAM: the pure bookkeeping of places, uses and eviction.

An object is *reserved* (being written, found by no one), then *committed* (whole, never changes),
then *leaving* (removed or evicted, but still in use by a reader), then gone, and its memory free.
A use (a reader that sends it, or a lease) protects it, as does a hard pin; nothing else does.
"""

from __future__ import annotations

from enum import Enum

from snowskin.store.eviction import EvictionPolicy, make_policy
from snowskin.store.objects.allocator import AllocatorStat, Extent, ExtentAllocator
from snowskin.store.objects.words import Pin


class ObjectState(Enum):
    """Where an object is in its life."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    LEAVING = "leaving"
    GONE = "gone"


# A member that is looked up in its class costs as much as all else of an operation.
_RESERVED, _COMMITTED = ObjectState.RESERVED, ObjectState.COMMITTED
_LEAVING, _GONE = ObjectState.LEAVING, ObjectState.GONE
_HARD = Pin.HARD


class PoolObject:
    """An object in DRAM.

    Attributes:
        generation: of the slot that it begins in, as the segment's table has it.
        uses: readers and leases.
        demoting: an eviction of it has begun.
        removed: it was removed, not evicted.
        reply: what a READ of all of it is answered with, once it was.
    """

    __slots__ = (
        "demoting",
        "digest",
        "extents",
        "generation",
        "key",
        "pin",
        "removed",
        "reply",
        "size_bytes",
        "state",
        "uses",
    )

    def __init__(self, key: str, size_bytes: int, pin: Pin, extents: tuple[Extent, ...]) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.pin = pin
        self.extents = extents
        self.digest = b""
        self.generation = 0
        self.uses = 0
        self.state = _RESERVED
        self.demoting = False
        self.removed = False
        self.reply: tuple[memoryview, ...] | None = None


class ObjectPool:
    """Objects and their memory. Whoever lets an object go must retire its slot at once."""

    def __init__(self, allocator: ExtentAllocator, *, eviction: str) -> None:
        self._allocator = allocator
        self._held: dict[str, PoolObject] = {}
        self._reserved: dict[str, PoolObject] = {}
        self._policies: dict[Pin, EvictionPolicy[str]] = {
            Pin.NONE: make_policy(eviction),
            Pin.SOFT: make_policy(eviction),
        }

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> tuple[PoolObject, ...]:
        """All committed objects, the longest held first."""
        return tuple(self._held.values())

    def get(self, key: str) -> PoolObject | None:
        """A committed object. Counts as no use."""
        return self._held.get(key)

    def acquire(self, key: str) -> PoolObject | None:
        """A committed object, with one more use."""
        item = self._held.get(key)
        if item is not None:
            self.use(item)
        return item

    def is_reserved(self, key: str) -> bool:
        """Whether it is being written just now."""
        return key in self._reserved

    def allocator_stat(self) -> AllocatorStat:
        """Of the memory."""
        return self._allocator.stat()

    def used_ratio(self) -> float:
        """Of the memory, 0 to 1."""
        return 1 - self._allocator.free_bytes / self._allocator.capacity_bytes

    def fits_at_all(self, size_bytes: int) -> bool:
        """Whether an empty pool could hold it."""
        return self._allocator.rounded(size_bytes) <= self._allocator.capacity_bytes

    def reserve(self, key: str, size_bytes: int, pin: Pin) -> PoolObject | None:
        """Memory to write an object into; None: evict first."""
        assert key not in self._reserved, f"{key!r} is being written already"
        extents = self._allocator.allocate(size_bytes)
        if extents is None:
            return None
        reserved = self._reserved[key] = PoolObject(key, size_bytes, pin, extents)
        return reserved

    def commit(self, item: PoolObject, digest: bytes) -> bool:
        """Let it be found from now on; False (and it is to be aborted) if the key is held."""
        assert item.state is _RESERVED, f"{item.key!r} is not reserved"
        if item.key in self._held:
            return False
        del self._reserved[item.key]
        item.digest = digest
        item.state = _COMMITTED
        self._held[item.key] = item
        if item.pin is not _HARD:
            self._policies[item.pin].insert(item.key)
        return True

    def abort(self, item: PoolObject) -> None:
        """Free an object that was never whole."""
        assert item.state is _RESERVED, f"{item.key!r} is not reserved"
        del self._reserved[item.key]
        self._free(item)

    def use(self, item: PoolObject) -> None:
        """One more reader or lease; undone by ``unuse``."""
        assert item.state is _COMMITTED, f"{item.key!r} is not committed"
        if item.pin is not _HARD:
            policy = self._policies[item.pin]
            policy.touch(item.key)
            if item.uses == 0 and not item.demoting:
                policy.protect(item.key)
        item.uses += 1

    def unuse(self, item: PoolObject) -> bool:
        """Undo one use; whether its memory became free."""
        assert item.uses > 0, f"{item.key!r} is not in use"
        item.uses -= 1
        if item.uses:
            return False
        if item.state is _LEAVING:
            self._free(item)
            return True
        if item.pin is not _HARD and not item.demoting:
            self._policies[item.pin].expose(item.key)
        return False

    def remove(self, item: PoolObject) -> bool:
        """Let it be found no more; whether its memory became free already."""
        assert item.state is _COMMITTED, f"{item.key!r} is not committed"
        del self._held[item.key]
        if item.pin is not _HARD:
            self._policies[item.pin].remove(item.key)
        item.state = _LEAVING
        if item.uses:
            return False
        self._free(item)
        return True

    def set_pin(self, item: PoolObject, pin: Pin) -> None:
        """Pin or unpin."""
        if item.pin is pin or item.state is not _COMMITTED:
            return
        if item.pin is not _HARD:
            self._policies[item.pin].remove(item.key)
        item.pin = pin
        if pin is not _HARD:
            self._policies[pin].insert(item.key)
            if item.uses or item.demoting:
                self._policies[pin].protect(item.key)

    def begin_eviction(self) -> PoolObject | None:
        """The object to go next, which stays readable until ``end_eviction``; None: none may go."""
        for policy in self._policies.values():
            key = policy.victim()
            if key is not None:
                policy.protect(key)
                victim = self._held[key]
                victim.demoting = True
                return victim
        return None

    def end_eviction(self, item: PoolObject, *, spare: bool = False) -> bool:
        """Remove a victim, unless a reader came or it was pinned meanwhile; whether it was removed.

        Its memory is free when it is removed.
        """
        item.demoting = False
        if item.state is not _COMMITTED:
            return True
        if item.uses or spare or item.pin is _HARD:
            if not item.uses and item.pin is not _HARD:
                self._policies[item.pin].expose(item.key)
            return False
        self.remove(item)
        return True

    def _free(self, item: PoolObject) -> None:
        item.state = _GONE
        self._allocator.free(item.extents)
