"""Takes the blocks that a decoding sequence fills back to its node's segment."""

from __future__ import annotations

from collections.abc import Sequence

from snowskin.engine.kv import BlockSlots, SequenceKv
from snowskin.store.blocks import BlockStore
from snowskin.store.pool import PoolFull
from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import BlockKey, SlotIndex
from snowskin.terms.keys import KeySpace, extend_keys
from snowskin.terms.request import GenerationRequest


class WriteBack:
    """One sequence's slots: those of its prompt, and those of the blocks that it fills.

    The slot that holds the prompt's last, partial block is kept for the first block to be filled.

    Args:
        blocks: cover the prompt, pinned once each.
        key_space: of the keys, whatever its tenant salt: that is in the parent key.
    """

    def __init__(
        self,
        request: GenerationRequest,
        blocks: Sequence[PlacedBlock],
        slots: BlockSlots,
        store: BlockStore,
        key_space: KeySpace,
    ) -> None:
        assert slots.block_tokens == key_space.block_tokens
        self._slots = slots
        self._store = store
        self._prompt = request.tokens
        self._block_tokens = key_space.block_tokens
        self._seed = key_space.seed
        full = len(request.tokens) // slots.block_tokens
        assert len(request.keys) == full, (len(request.keys), full)
        self._prompt_slots = [block.slot for block in blocks[:full]]
        self._tail_slot = blocks[full].slot if len(blocks) > full else None
        self._chain = [*request.keys]
        """Keys of the full blocks that are committed, from the prompt's first on."""
        self._parent = request.keys[-1] if request.keys else request.root
        """None once the chain of keys is broken: what would follow could not be found."""
        self._full_blocks = full

    def release_prompt(self) -> None:
        """The prompt's KV is on the device: unpin its full blocks."""
        self._store.release(self._prompt_slots)
        self._prompt_slots = []

    def release_all(self) -> None:
        """The sequence has ended: unpin what it still holds.

        All of its chain counts as used now, the deepest block first: the prompt was let go of
        before the blocks that go on from it, and without it they are of no use.
        """
        self.release_prompt()
        self._store.release([block.slot for block in self._store.pin(self._chain)])
        if self._tail_slot is not None:
            self._store.release([self._tail_slot])
            self._tail_slot = None

    def follow(self, kv: SequenceKv, output: Sequence[int]) -> bool:
        """Write the block that the last step filled, if it filled one.

        Args:
            output: all tokens generated so far whose KV is held.

        Returns:
            False: a block was filled but the pool had no room for it.
        """
        if kv.tokens // self._block_tokens == self._full_blocks:
            return True
        index = self._full_blocks
        self._full_blocks += 1
        if self._parent is None:
            return True
        start = index * self._block_tokens
        tokens = self._tokens(output, start, start + self._block_tokens)
        (key,) = extend_keys(self._parent, tokens, block_tokens=self._block_tokens, seed=self._seed)
        slot = self._take_slot(key)
        if slot is None:
            self._parent = None
            return False
        self._slots.save_block(slot, kv, index)
        self._chain.append(key)
        self._store.commit([slot], self._chain, depth=index)
        self._store.release([slot])
        self._parent = key
        return True

    def _take_slot(self, key: BlockKey) -> SlotIndex | None:
        if self._tail_slot is not None:
            slot, self._tail_slot = self._tail_slot, None
            return slot
        reserved = self._store.reserve([key])
        return None if isinstance(reserved, PoolFull) else reserved[0].slot

    def _tokens(self, output: Sequence[int], start: int, end: int) -> list[int]:
        past = len(self._prompt)
        return [*self._prompt[start:end], *output[max(0, start - past) : end - past]]
