from __future__ import annotations

from pathlib import Path

import pytest
import torch

from snowskin.engine.batching import Chunk
from snowskin.engine.kv import BlockSlots, SequenceKv
from snowskin.engine.prefill_pass import LayerwiseStore, PrefillJob
from snowskin.store.pool import PoolFull
from tests.engine import tiny
from tests.engine.pair import Pair, load

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("models"))


def test_after_each_layer_its_bytes_are_in_the_segment_and_readable(model_dir: Path) -> None:
    pair = Pair(load(model_dir), block_tokens=4)
    shape, store = pair.model.kv_shape, pair.prefill_store
    request = pair.request(tiny.prompt_tokens(14))
    blocks = store.reserve([*request.keys, None])
    assert not isinstance(blocks, PoolFull)
    kv = SequenceKv(shape, device=torch.device("cpu"), capacity_tokens=14)
    kv.data.copy_(torch.randn(kv.data.shape))
    job = PrefillJob(request, kv, blocks, reused_blocks=1, done_tokens=4, started_s=0.0)
    chunk = Chunk(request.request, start_token=4, end_token=14, last=True)
    slots = BlockSlots(store.segment.data, shape, block_tokens=4)
    watcher = LayerwiseStore([(job, chunk)], slots, store)

    for layer in range(shape.layers):
        watcher.after_layer(layer)
        ready = [int(store.segment.parts_ready[slot]) for slot in job.slots]
        assert ready == [0, layer + 1, layer + 1, layer + 1], "the reused block is left alone"
        again = SequenceKv(shape, device=torch.device("cpu"), capacity_tokens=14)
        slots.load(layer, job.slot_index, again, 14)
        assert torch.equal(again.data[layer, :, 4:], kv.data[layer, :, 4:])
    store.release(job.slots)
    pair.close()


def test_the_one_token_of_a_prompt_that_is_held_whole_is_not_written(model_dir: Path) -> None:
    pair = Pair(load(model_dir), block_tokens=4)
    store = pair.prefill_store
    request = pair.request(tiny.prompt_tokens(8))
    pair.run(request)
    before = pair.segments[0].data.copy()
    (warm,) = pair.run(pair.request(list(request.tokens)))
    assert warm.reused_tokens == 7
    assert (pair.segments[0].data == before).all()
    assert store.stat().committed_slots == 2
    pair.close()
