"""A simulated node's DRAM: the real block pool, whose changes are told to the Conductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from snowskin.store.pool import BlockPool
from snowskin.terms.events import BlocksCommitted, BlocksEvicted
from snowskin.terms.ids import BlockKey, NodeId, RequestId, SlotIndex

Tell = Callable[[BlocksCommitted | BlocksEvicted], None]


class NodeMemory:
    """Blocks that a node holds. Chains are given first block first.

    Args:
        tell: receives every change of what is held, in true order.
        on_room: called when slots have become free or evictable.
    """

    __slots__ = ("_on_room", "_pool", "_tell", "block_count", "node")

    def __init__(
        self,
        node: NodeId,
        block_count: int,
        *,
        eviction: str,
        tell: Tell,
        on_room: Callable[[], None],
    ) -> None:
        self.node = node
        self.block_count = block_count
        self._pool = BlockPool(block_count, eviction)
        self._tell = tell
        self._on_room = on_room

    @property
    def pool(self) -> BlockPool:
        """The bookkeeping itself, for the checks of laws."""
        return self._pool

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are held."""
        return self._pool.match(keys)

    def pin(self, keys: Sequence[BlockKey]) -> list[SlotIndex]:
        """Pin the longest held prefix; its slots, to be released once each."""
        return list(self._pool.pin(keys))

    def reserve(self, count: int) -> list[SlotIndex] | None:
        """So many slots to write blocks into; None: no room now."""
        slots = self._pool.reserve(count)
        if not isinstance(slots, tuple):
            return None
        self._tell_changes()
        return list(slots)

    def commit(self, slots: Sequence[SlotIndex], chain: Sequence[BlockKey], *, depth: int) -> None:
        """The bytes of these reserved slots are whole: they hold the chain from ``depth`` on."""
        self._pool.commit(slots, chain, depth=depth)
        self._tell_changes()

    def release(self, slots: Sequence[SlotIndex]) -> None:
        """Undo one pin of each."""
        if slots:
            self._pool.release(slots)
            self._on_room()

    def unpin(self, slots: Sequence[SlotIndex]) -> None:
        """Take back pins of this very moment: no room has come of it."""
        self._pool.release(slots)

    def grant_lease(self, owner: RequestId, keys: Sequence[BlockKey], until_s: float) -> int:
        """Keep the longest held prefix of ``keys`` for a peer; its length."""
        return self._pool.grant_lease(owner, keys, until_s)

    def end_lease(self, owner: RequestId) -> None:
        """The peer has read them."""
        if self._pool.end_lease(owner):
            self._on_room()

    def expire(self, now_s: float) -> None:
        """End the leases that have run out."""
        due_s = self._pool.next_expiry_s()
        if due_s is not None and due_s <= now_s and self._pool.expire(now_s):
            self._on_room()

    def _tell_changes(self) -> None:
        for change in self._pool.drain_changes():
            self._tell(change.event(self.node))
