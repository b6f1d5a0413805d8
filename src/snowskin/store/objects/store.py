"""A node's objects: the pool's bookkeeping and the segment's bytes, in step for all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import xxhash

from snowskin.store.objects.allocator import Extent, ExtentAllocator
from snowskin.store.objects.pool import ObjectPool, ObjectState, PoolObject
from snowskin.store.objects.words import NodeUsage, ObjectFact, Pin
from snowskin.transfer.memory import Segment, SegmentLayout

GRANULE_BYTES = 1024
"""Objects begin on multiples of it. Each granule has a slot in the segment's table (37 bytes)."""

_COUNTED = (
    "evicted_total",
    "demoted_total",
    "promoted_total",
    "read_bytes",
    "written_bytes",
    "checksum_failures",
    "refused_writes",
)
EVICTION_WAIT_S = 10.0
"""How long a writer waits for an eviction that another thread does."""


def object_layout(dram_bytes: int) -> SegmentLayout:
    """The segment that holds so many bytes of objects."""
    return SegmentLayout(
        slot_count=max(1, dram_bytes // GRANULE_BYTES), slot_bytes=GRANULE_BYTES, part_count=1
    )


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where an object lies in its node's segment, for readers that map it.

    While the generation of the slot at the first extent is the one told, the bytes are those meant
    (see ``transfer.memory``).
    """

    size_bytes: int
    digest: bytes
    slot: int
    generation: int
    extents: tuple[tuple[int, int], ...]
    """Offset and length of each, in order. The last may be longer than what is left."""


def digest_of(*parts: bytes | memoryview) -> bytes:
    """The name of a content: xxh3-128 of all parts together."""
    if len(parts) == 1:
        return bytes(xxhash.xxh3_128_digest(parts[0]))
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return bytes(hasher.digest())


def cut(
    extents: tuple[Extent, ...] | tuple[tuple[int, int], ...], first: int, count: int
) -> list[tuple[int, int]]:
    """Offsets and lengths of ``count`` bytes of an object from byte ``first`` on."""
    pieces: list[tuple[int, int]] = []
    for offset, length in extents:
        if count <= 0:
            break
        if first >= length:
            first -= length
            continue
        taken = min(length - first, count)
        pieces.append((offset + first, taken))
        first = 0
        count -= taken
    return pieces


class ObjectStore:
    """The DRAM of one node. Safe to use from any thread.

    One lock guards the bookkeeping; nothing under it blocks or copies an object.

    Args:
        eviction: name of the policy, see ``store.eviction.POLICIES``.
        demote: given each object before it is evicted, in any thread; whether it was saved.
        on_evicted: told its key afterwards.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        eviction: str,
        demote: Callable[[PoolObject], bool],
        on_evicted: Callable[[PoolObject], None],
    ) -> None:
        assert segment.owner, "an ObjectStore needs the segment's owner"
        self.segment = segment
        self.bytes = segment.data.reshape(-1).data.cast("B")
        self._pool = ObjectPool(
            ExtentAllocator(segment.layout.data_bytes, granule_bytes=GRANULE_BYTES),
            eviction=eviction,
        )
        self._demote = demote
        self._on_evicted = on_evicted
        self._lock = threading.Lock()
        self._evicted = threading.Condition(self._lock)
        self._evicting = 0
        self._counts = dict.fromkeys(_COUNTED, 0)

    # Writing.

    def reserve(self, key: str, size_bytes: int, pin: Pin) -> PoolObject | None:
        """Memory for an object that is about to come, evicting as needed; None: there is none."""
        while True:
            with self._lock:
                if self._pool.is_reserved(key):
                    return None
                item = self._pool.reserve(key, size_bytes, pin)
                if item is not None:
                    item.generation = self.segment.begin(self._slot(item), None)
                    return item
                if not self._pool.fits_at_all(size_bytes):
                    self._count(refused_writes=1)
                    return None
            if not self.evict_one():
                self.count(refused_writes=1)
                return None

    def views(self, item: PoolObject, first: int = 0, count: int | None = None) -> list[memoryview]:
        """The memory of an object's bytes, or of some of them. Write only what is reserved."""
        wanted = item.size_bytes - first if count is None else count
        return [
            self.bytes[offset : offset + length]
            for offset, length in cut(item.extents, first, wanted)
        ]

    def commit(self, item: PoolObject, digest: bytes) -> bool:
        """Let an object that is whole be read; it is in use until ``release``, so that it cannot
        go before it is reported. False: the key was held, and the reservation is void."""
        with self._lock:
            if not self._pool.commit(item, digest):
                self._pool.abort(item)
                self._retire(item)
                return False
            self._pool.use(item)
            self._counts["written_bytes"] += item.size_bytes
            return True

    def abort(self, item: PoolObject) -> None:
        """Free an object that did not come."""
        with self._lock:
            self._pool.abort(item)
            self._retire(item)

    # Reading.

    def acquire(self, key: str) -> PoolObject | None:
        """A committed object, in use until ``release``."""
        with self._lock:
            return self._pool.acquire(key)

    def release(self, item: PoolObject, *, read_bytes: int = 0) -> None:
        """Undo one ``acquire``, or the use that ``commit`` began; so many bytes were read."""
        with self._lock:
            self._pool.unuse(item)
            self._counts["read_bytes"] += read_bytes

    @contextmanager
    def reading(self, key: str) -> Iterator[PoolObject | None]:
        """A committed object, in use for the time of the block."""
        item = self.acquire(key)
        try:
            yield item
        finally:
            if item is not None:
                self.release(item)

    def place(self, item: PoolObject) -> Place:
        """Where it lies."""
        extents = tuple((extent.offset, extent.length_bytes) for extent in item.extents)
        return Place(item.size_bytes, item.digest, self._slot(item), item.generation, extents)

    def is_reserved(self, key: str) -> bool:
        """Whether it is being written just now."""
        with self._lock:
            return self._pool.is_reserved(key)

    # Keeping.

    def fact(self, key: str) -> ObjectFact | None:
        """What the master should know of it."""
        with self._lock:
            item = self._pool.get(key)
            return None if item is None else _fact(item)

    def facts(self) -> tuple[ObjectFact, ...]:
        """Of everything that is held."""
        with self._lock:
            return tuple(_fact(item) for item in self._pool.held())

    def remove(self, key: str) -> bool:
        """Serve it no more; its memory becomes free when the last use of it ends."""
        with self._lock:
            item = self._pool.get(key)
            if item is None:
                return False
            self._pool.remove(item)
            item.removed = True
            self._retire(item)
            return True

    def set_pin(self, key: str, pin: Pin) -> bool:
        """Pin or unpin; False if it is not held."""
        with self._lock:
            item = self._pool.get(key)
            if item is not None:
                self._pool.set_pin(item, pin)
            return item is not None

    def used_ratio(self) -> float:
        """Of the memory, 0 to 1."""
        with self._lock:
            return self._pool.used_ratio()

    def evict_one(self) -> bool:
        """Make room by one object, or wait for someone who does; False if nothing may go."""
        with self._lock:
            victim = self._pool.begin_eviction()
            if victim is None:
                return self._evicting > 0 and self._evicted.wait(EVICTION_WAIT_S)
            self._evicting += 1
        saved = False
        try:
            saved = self._demote(victim)
        finally:
            with self._lock:
                self._evicting -= 1
                self._evicted.notify_all()
                removed_meanwhile = victim.state is not ObjectState.COMMITTED
                gone = self._pool.end_eviction(victim) and not removed_meanwhile
                if gone:
                    self._retire(victim)
                    self._count(**{"demoted_total" if saved else "evicted_total": 1})
        if gone or removed_meanwhile:
            self._on_evicted(victim)
        return True

    def count(self, **increments: int) -> None:
        """Raise counts of ``NodeUsage`` by name."""
        with self._lock:
            self._count(**increments)

    def usage(self) -> NodeUsage:
        """A snapshot of what there is and the counts since the start."""
        with self._lock:
            memory = self._pool.allocator_stat()
            return NodeUsage(
                **self._counts,
                dram_bytes=memory.capacity_bytes,
                dram_used_bytes=memory.capacity_bytes - memory.free_bytes,
                dram_free_bytes=memory.free_bytes,
                largest_free_bytes=memory.largest_free_bytes,
                fragmentation_ratio=memory.fragmentation_ratio,
                objects=len(self._pool),
            )

    def _count(self, **increments: int) -> None:
        for name, by in increments.items():
            self._counts[name] += by

    def _slot(self, item: PoolObject) -> int:
        return item.extents[0].offset // GRANULE_BYTES

    def _retire(self, item: PoolObject) -> None:
        """Readers miss it from now on. Under the same hold of the lock that let it go."""
        self.segment.retire(self._slot(item))


def _fact(item: PoolObject) -> ObjectFact:
    return ObjectFact(item.key, item.size_bytes, item.digest, item.pin)
