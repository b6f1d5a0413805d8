"""A node's objects on SSD: names and contents over the tier's plain keys and values.

An object is cut into parts, so that its size is not bounded by the tier's queue and files. The key
of a part is the content's digest, the part's number, the number of parts, then the object's key:
so a restart finds out from the keys alone which objects are whole, and what they should contain.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from snowskin.store.objects.words import ObjectFact, Pin
from snowskin.store.ssd import Miss, SsdConfig, SsdStat, SsdTier, WriteOutcome

PART_BYTES = 8 << 20
QUEUE_WAIT_S = 10.0
"""How long an eviction waits for the disk before the object is dropped instead."""
QUEUE_PAUSE_S = 0.002
SETTLE_S = 10.0
"""For so long after it was written it is looked whether an object really reached the disk."""
SETTLE_TICK_S = 1.0

_HEAD = struct.Struct("<16sII")


class _Shelved:
    """An object on disk; ``sizes`` of its parts, in order. The pin is forgotten by a restart."""

    __slots__ = ("digest", "pin", "sizes")

    def __init__(self, digest: bytes, sizes: tuple[int, ...]) -> None:
        self.digest = digest
        self.pin = Pin.NONE
        self.sizes = sizes

    def part_key(self, name: str, number: int) -> bytes:
        return _HEAD.pack(self.digest, number, len(self.sizes)) + name.encode()


class ShelfMiss(Exception):
    """The object turned out not to be there, or not to be what it was; it is dropped."""


class Shelf:
    """Objects on SSD. Safe to use from any thread.

    Raises:
        InvalidInput: the directory cannot be used, or another process has it.
    """

    def __init__(self, directory: Path, config: SsdConfig) -> None:
        self._tier = SsdTier(directory, config)
        self._part_bytes = min(PART_BYTES, self._tier.value_limit_bytes)
        self._lock = threading.Lock()
        self._held: dict[str, _Shelved] = {}
        self._unsettled: OrderedDict[str, float] = OrderedDict()
        self._settle_s = 0.0
        self._find_whole()
        self._tier.drain_changes()

    def facts(self) -> tuple[ObjectFact, ...]:
        """Everything that is here."""
        with self._lock:
            return tuple(_fact(name, shelved) for name, shelved in self._held.items())

    def fact(self, name: str) -> ObjectFact | None:
        """An object, if it is here."""
        with self._lock:
            shelved = self._held.get(name)
        return None if shelved is None else _fact(name, shelved)

    def set_pin(self, name: str, pin: Pin) -> bool:
        """Remember how firmly an object is to stay when it is back in DRAM; False: not here."""
        with self._lock:
            shelved = self._held.get(name)
            if shelved is not None:
                shelved.pin = pin
            return shelved is not None

    def put(self, name: str, digest: bytes, views: Sequence[memoryview]) -> bool:
        """Write an object, waiting for the disk if it does not keep up; False if it failed."""
        with self._lock:
            held = self._held.get(name)
        if held is not None:
            if held.digest == digest:
                return True
            self.remove(name)
        parts = list(_parts(views, self._part_bytes))
        shelved = _Shelved(digest, tuple(len(part) for part in parts))
        deadline_s = time.monotonic() + QUEUE_WAIT_S
        for number, part in enumerate(parts):
            if not self._write(shelved.part_key(name, number), part, deadline_s):
                self._remove_parts(name, shelved)
                return False
        with self._lock:
            self._held[name] = shelved
            self._unsettled[name] = time.monotonic() + SETTLE_S
            self._unsettled.move_to_end(name)
        return True

    def read(self, name: str, first: int, count: int) -> Iterator[tuple[memoryview, bool]]:
        """Bytes of an object in pieces, each verified, with whether it is worth a place in DRAM.

        Raises:
            ShelfMiss: see there.
        """
        with self._lock:
            shelved = self._held.get(name)
        if shelved is None:
            raise ShelfMiss
        start = 0
        for number, size in enumerate(shelved.sizes):
            low, high = max(first - start, 0), min(first + count - start, size)
            start += size
            if low >= high and not (size == 0 and number == 0):
                continue
            value = self._tier.read(shelved.part_key(name, number))
            if isinstance(value, Miss):
                self.remove(name)
                raise ShelfMiss
            yield value.data.data.cast("B")[low:high] if size else memoryview(b""), value.promote

    def remove(self, name: str) -> bool:
        """Hold an object no more; False if it is not here. Survives a restart from ``flush`` on."""
        with self._lock:
            shelved = self._held.pop(name, None)
            self._unsettled.pop(name, None)
        if shelved is not None:
            self._remove_parts(name, shelved)
        return shelved is not None

    def flush(self, timeout_s: float) -> None:
        """Have all that was written and removed so far survive the process."""
        self._tier.flush(timeout_s)

    def take_lost(self) -> tuple[str, ...]:
        """Objects that are here no more since the last call: evicted, or never written."""
        _, dropped = self._tier.drain_changes()
        lost: dict[str, None] = {}
        for key in dropped:
            name, shelved = key[_HEAD.size :].decode(), None
            with self._lock:
                shelved = self._held.get(name)
            if shelved is not None and shelved.digest == key[:16]:
                lost[name] = None
        now_s = time.monotonic()
        with self._lock:
            unsettled: list[str] = []
            if now_s >= self._settle_s:
                self._settle_s = now_s + SETTLE_TICK_S
                unsettled = list(self._unsettled)
            while self._unsettled and next(iter(self._unsettled.values())) <= now_s:
                self._unsettled.popitem(last=False)
        for name in unsettled:
            if not self._is_whole(name):
                lost[name] = None
        return tuple(name for name in lost if self.remove(name))

    def stat(self) -> SsdStat:
        """Of the tier."""
        return self._tier.stat()

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """Write what is queued; let go of the directory. Idempotent."""
        self._tier.close()

    def _write(self, key: bytes, part: memoryview, deadline_s: float) -> bool:
        while True:
            outcome = self._tier.write(key, part)
            if outcome in (WriteOutcome.QUEUED, WriteOutcome.HELD):
                return True
            if outcome is WriteOutcome.CONFLICT:
                self._tier.remove(key)  # Digests do not collide: what is there is damaged.
            elif outcome is WriteOutcome.REFUSED or time.monotonic() >= deadline_s:
                return False
            else:
                time.sleep(QUEUE_PAUSE_S)

    def _is_whole(self, name: str) -> bool:
        with self._lock:
            shelved = self._held.get(name)
        return shelved is not None and all(
            self._tier.contains(shelved.part_key(name, number))
            for number in range(len(shelved.sizes))
        )

    def _remove_parts(self, name: str, shelved: _Shelved) -> None:
        for number in range(len(shelved.sizes)):
            self._tier.remove(shelved.part_key(name, number))

    def _find_whole(self) -> None:
        """Put objects together from the parts found at the start; drop what is incomplete."""
        found: dict[tuple[str, bytes, int], dict[int, int]] = {}
        for value in self._tier.held():
            digest, number, count = _HEAD.unpack_from(value.key)
            name = value.key[_HEAD.size :].decode()
            # In order of writing, so that the last content of a key comes last.
            parts = found.pop((name, digest, count), {})
            parts[number] = value.value_bytes
            found[name, digest, count] = parts
        for (name, digest, count), parts in found.items():
            if len(parts) == count:
                self.remove(name)
                sizes = tuple(parts[number] for number in range(count))
                self._held[name] = _Shelved(digest, sizes)
            else:
                for number in parts:
                    self._tier.remove(_HEAD.pack(digest, number, count) + name.encode())


def _fact(name: str, shelved: _Shelved) -> ObjectFact:
    return ObjectFact(name, sum(shelved.sizes), shelved.digest, shelved.pin, "ssd")


def _parts(views: Sequence[memoryview], part_bytes: int) -> Iterator[memoryview]:
    """An object's bytes in parts, without a copy where a part lies in one piece."""
    size = sum(len(view) for view in views)
    if len(views) == 1:
        whole = views[0]
    elif size <= part_bytes:
        whole = memoryview(b"".join(views))
    else:
        joined = np.empty(size, dtype=np.uint8)
        at = 0
        for view in views:
            joined[at : at + len(view)] = np.frombuffer(view, dtype=np.uint8)
            at += len(view)
        whole = joined.data.cast("B")
    for start in range(0, max(size, 1), part_bytes):
        yield whole[start : start + part_bytes]
