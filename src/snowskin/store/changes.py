"""What has changed in a pool, as its node tells it to the directory."""

from __future__ import annotations

import msgspec

from snowskin.terms.events import BlocksCommitted, BlocksEvicted
from snowskin.terms.ids import BlockKey, NodeId, SlotIndex, Tier

_DRAM = Tier.DRAM
"""Looked up once: a member of an enumeration takes as long as the rest of a message."""


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


def compact(changes: list[Change]) -> list[Change]:
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
