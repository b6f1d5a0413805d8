"""A node's two tiers as one: DRAM, and below it SSD if there is one."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from snowskin.store.objects.pool import PoolObject
from snowskin.store.objects.shelf import Shelf, ShelfMiss
from snowskin.store.objects.store import ObjectStore
from snowskin.store.objects.words import NodeUsage, ObjectFact, Pin
from snowskin.store.ssd import SsdConfig
from snowskin.transfer.memory import Segment

REMOVAL_FLUSH_S = 5.0
_log = logging.getLogger(__name__)

PROMOTIONS_LIMIT = 64
"""Most promotions that wait; more are left out until the next read."""


class Tiers:
    """Objects in DRAM and on SSD. Safe to use from any thread.

    An object that DRAM has no more room for goes to SSD before it is dropped. One that is read
    often there comes back; its copy on SSD stays, so that it can go again for nothing.

    Args:
        ssd: directory and options of the SSD tier; None: there is none.
        tell: told the key of each object that came to another tier or is gone.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        eviction: str,
        ssd: tuple[Path, SsdConfig] | None,
        tell: Callable[[str], None],
    ) -> None:
        self.shelf = None if ssd is None else Shelf(*ssd)
        self.dram = ObjectStore(
            segment, eviction=eviction, demote=self._demote, on_evicted=self._evicted
        )
        self._tell = tell
        self._wanted: queue.Queue[str | None] = queue.Queue(PROMOTIONS_LIMIT)

    def fact(self, key: str) -> ObjectFact | None:
        """What the master should know of an object; None if it is on no tier."""
        fact = self.dram.fact(key)
        if fact is None and self.shelf is not None:
            fact = self.shelf.fact(key)
        return fact

    def facts(self) -> tuple[ObjectFact, ...]:
        """Of everything that is held."""
        found = {} if self.shelf is None else {fact.key: fact for fact in self.shelf.facts()}
        found.update({fact.key: fact for fact in self.dram.facts()})
        return tuple(found.values())

    def remove(self, key: str) -> bool:
        """Hold an object no more, for good; False if it was not held."""
        removed = self.dram.remove(key)
        if self.shelf is not None and self.shelf.remove(key):
            self.shelf.flush(REMOVAL_FLUSH_S)
            removed = True
        return removed

    def set_pin(self, key: str, pin: Pin) -> None:
        """Pin or unpin. What is never to go is kept in DRAM, if there is room."""
        if self.shelf is not None and self.shelf.set_pin(key, pin) and pin is Pin.HARD:
            with contextlib.suppress(ShelfMiss):
                self._promote(key)
        self.dram.set_pin(key, pin)

    def want_promotion(self, key: str) -> None:
        """An object on SSD is worth a place in DRAM: it gets one soon, if there is room."""
        if not self._wanted.full():
            self._wanted.put_nowait(key)

    def start(self) -> None:
        """Begin to promote, on a thread."""
        if self.shelf is not None:
            threading.Thread(target=self._keep_promoting, name="promote", daemon=True).start()

    def sweep(self) -> None:
        """Learn what the SSD tier has evicted or could not write."""
        if self.shelf is None:
            return
        for key in self.shelf.take_lost():
            if self.dram.fact(key) is None:
                self.dram.count(evicted_total=1)
            self._tell(key)

    def save(self) -> None:
        """Have everything in DRAM on SSD too, as far as it has room; before the process ends."""
        if self.shelf is None:
            return
        facts = self.dram.facts()
        _log.info("saving %d objects to SSD", len(facts))
        for fact in facts:
            with self.dram.reading(fact.key) as item:
                if item is not None:
                    self._demote(item)
        self.shelf.close()

    def usage(self) -> NodeUsage:
        """What is held and was done."""
        usage = self.dram.usage()
        if self.shelf is None:
            return usage
        stat = self.shelf.stat()
        return msgspec.structs.replace(
            usage,
            ssd_bytes=stat.capacity_bytes,
            ssd_used_bytes=stat.live_bytes,
            ssd_objects=len(self.shelf),
            ssd_corrupt_total=stat.corrupt_total,
            ssd_error_total=stat.disk_error_total + stat.disk_full_total,
        )

    def _demote(self, item: PoolObject) -> bool:
        if self.shelf is None:
            return False
        if not self.shelf.put(item.key, item.digest, self.dram.views(item)):
            return False
        return self.shelf.set_pin(item.key, item.pin)

    def _evicted(self, item: PoolObject) -> None:
        if self.shelf is not None and item.removed and self.dram.fact(item.key) is None:
            self.shelf.remove(item.key)  # It was removed while it went down.
        self._tell(item.key)

    def _keep_promoting(self) -> None:
        while (key := self._wanted.get()) is not None:
            try:
                self._promote(key)
            except ShelfMiss:
                self._tell(key)

    def _promote(self, key: str) -> None:
        assert self.shelf is not None
        fact = self.shelf.fact(key)
        if fact is None or self.dram.fact(key) is not None:
            return
        item = self.dram.reserve(key, fact.size_bytes, fact.pin)
        if item is None:
            return
        try:
            targets = self.dram.views(item)
            for piece, _ in self.shelf.read(key, 0, fact.size_bytes):
                targets = _fill(targets, piece)
        except BaseException:
            self.dram.abort(item)
            raise
        if self.dram.commit(item, fact.digest):
            self.dram.release(item)
            self.dram.count(promoted_total=1)
            self._tell(key)


def _fill(targets: list[memoryview], piece: memoryview) -> list[memoryview]:
    """Copy a piece to the start of ``targets``; what is left of them."""
    left = list(targets)
    while piece:
        taken = min(len(left[0]), len(piece))
        left[0][:taken] = piece[:taken]
        piece = piece[taken:]
        left[0] = left[0][taken:]
        if not left[0]:
            del left[0]
    return left
