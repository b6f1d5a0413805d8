"""Block keys: chained hashes, so that equal keys mean an equal whole prefix."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from snowskin.terms.ids import BlockKey

LAYOUT_VERSION = 1
"""Changes whenever the bytes of a stored block change meaning; part of every key."""


class KeySpace(msgspec.Struct, frozen=True):
    """Everything besides the tokens that a block's bytes depend on.

    Two requests share blocks only where all these fields agree. Source: DESIGN §4; the tenant
    salt follows vLLM's ``cache_salt``.
    """

    model: str
    revision: str
    dtype: str
    block_tokens: int
    tenant_salt: str = ""
    layout_version: int = LAYOUT_VERSION
    seed: int = 0

    def root(self) -> BlockKey:
        """The key that stands before block 0."""
        packed = msgspec.msgpack.encode(msgspec.structs.astuple(self))
        return BlockKey(xxhash.xxh3_128_digest(packed, seed=self.seed))


def extend_keys(
    parent: BlockKey, tokens: Sequence[int], *, block_tokens: int, seed: int = 0
) -> tuple[BlockKey, ...]:
    """Keys of the full blocks of ``tokens`` that follow the block named ``parent``.

    A last partial block has no key: only full blocks are shared.
    """
    packed = np.asarray(tokens, dtype="<u4").tobytes()
    block_bytes = 4 * block_tokens
    keys: list[BlockKey] = []
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        content = parent + packed[start : start + block_bytes]
        parent = BlockKey(xxhash.xxh3_128_digest(content, seed=seed))
        keys.append(parent)
    return tuple(keys)


def prompt_keys(space: KeySpace, tokens: Sequence[int]) -> tuple[BlockKey, ...]:
    """Keys of all full blocks of a prompt, in order."""
    return extend_keys(space.root(), tokens, block_tokens=space.block_tokens, seed=space.seed)
