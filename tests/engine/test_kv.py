from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snowskin.engine.kv import BlockSlots, KvShape, SequenceKv

torch.set_num_threads(1)

CPU = torch.device("cpu")


def filled(shape: KvShape, tokens: int) -> SequenceKv:
    kv = SequenceKv(shape, device=CPU, capacity_tokens=tokens)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(tokens)))
    kv.tokens = tokens
    return kv


def empty_slots(shape: KvShape, count: int, block_tokens: int) -> BlockSlots:
    part_bytes = shape.token_bytes // shape.layers * block_tokens
    data = np.zeros((count, shape.layers, part_bytes), dtype=np.uint8)
    return BlockSlots(data, shape, block_tokens=block_tokens)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_saved_chunk_by_chunk_into_any_slots_is_loaded_again(data: st.DataObject) -> None:
    block_tokens = data.draw(st.integers(1, 5))
    tokens = data.draw(st.integers(1, 4 * block_tokens))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    shape = KvShape(layers=2, kv_heads=2, head_dim=3, dtype=dtype)
    blocks = -(-tokens // block_tokens)
    slots = torch.tensor(data.draw(st.permutations(range(6)))[:blocks])
    memory = empty_slots(shape, 6, block_tokens)
    kv = filled(shape, tokens)

    boundaries = data.draw(st.sets(st.integers(1, blocks)))
    ends = sorted({min(end * block_tokens, tokens) for end in boundaries} | {tokens})
    for layer in range(2):
        start = 0
        for end in ends:
            memory.save(layer, slots, kv, start, end)
            start = end

    wanted = data.draw(st.integers(1, tokens))
    again = SequenceKv(shape, device=CPU, capacity_tokens=tokens)
    for layer in range(2):
        memory.load(layer, slots, again, wanted)
    assert torch.equal(again.data[:, :, :wanted], kv.data[:, :, :wanted])


def test_a_whole_block_is_saved_as_its_layers_would_be() -> None:
    shape = KvShape(layers=3, kv_heads=2, head_dim=4, dtype=torch.bfloat16)
    kv, memory = filled(shape, 12), empty_slots(shape, 4, 4)
    memory.save_block(2, kv, 1)
    again = SequenceKv(shape, device=CPU, capacity_tokens=4)
    for layer in range(3):
        memory.load(layer, torch.tensor([2]), again, 4)
    assert torch.equal(again.data, kv.data[:, :, 4:8])


def test_a_segment_of_another_shape_is_not_taken_for_blocks() -> None:
    shape = KvShape(layers=3, kv_heads=2, head_dim=4, dtype=torch.float32)
    with pytest.raises(AssertionError, match="do not fit"):
        BlockSlots(np.zeros((4, 3, 64), dtype=np.uint8), shape, block_tokens=4)


def test_kv_grows_by_doubling_up_to_its_limit_and_keeps_what_it_held() -> None:
    shape = KvShape(layers=2, kv_heads=1, head_dim=2, dtype=torch.float32)
    kv = SequenceKv(shape, device=CPU, capacity_tokens=6, limit_tokens=20)
    kv.data.copy_(filled(shape, 6).data)
    kv.tokens = 6
    before = kv.data.clone()
    capacities = []
    for tokens in (6, 7, 13, 20):
        kv.reserve(tokens)
        capacities.append(kv.capacity_tokens)
    assert capacities == [6, 12, 20, 20]
    assert torch.equal(kv.data[:, :, :6], before)
    with pytest.raises(AssertionError):
        kv.reserve(21)
