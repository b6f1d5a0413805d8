from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from snowskin.engine.kv import BlockSlots, KvShape, SequenceKv
from snowskin.engine.loader import KvLoader

torch.set_num_threads(1)

CPU = torch.device("cpu")
SHAPE = KvShape(layers=3, kv_heads=1, head_dim=2, dtype=torch.float32)


@pytest.fixture
def memory() -> BlockSlots:
    data = np.zeros((4, 3, SHAPE.token_bytes // 3 * 4), dtype=np.uint8)
    data.view(np.float32)[:] = np.arange(4 * 3 * 16, dtype=np.float32).reshape(4, 3, 16)
    return BlockSlots(data, SHAPE, block_tokens=4)


@pytest.fixture
def finished() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def loader(memory: BlockSlots, finished: threading.Semaphore) -> Iterator[KvLoader]:
    loader = KvLoader(memory, layers=3, device=CPU, on_finished=finished.release)
    yield loader
    loader.close()


def new_kv() -> SequenceKv:
    return SequenceKv(SHAPE, device=CPU, capacity_tokens=8)


def test_each_layer_can_be_read_when_its_gate_is_open(loader: KvLoader) -> None:
    kv = new_kv()
    gate = loader.load(kv, torch.tensor([2, 0]), 6)
    for layer in range(3):
        gate.wait_for_layer(layer)
        assert kv.data[layer, 0, 0, 0, 0] == (2 * 3 + layer) * 16
        assert kv.data[layer, 0, 4, 0, 0] == layer * 16
    assert gate.finished
    assert gate.failure is None


def test_a_load_that_fails_opens_its_gate_with_the_reason_and_the_next_one_works(
    loader: KvLoader, finished: threading.Semaphore
) -> None:
    broken = loader.load(new_kv(), torch.tensor([99]), 4)
    sound = loader.load(new_kv(), torch.tensor([1]), 4)
    broken.wait_for_layer(2)
    sound.wait_for_layer(2)
    assert "could not be loaded" in str(broken.failure)
    assert sound.failure is None
    assert finished.acquire(timeout=5)
    assert finished.acquire(timeout=5)


def test_a_cancelled_load_ends_and_lets_nobody_wait(loader: KvLoader) -> None:
    gates = [loader.load(new_kv(), torch.tensor([1, 2]), 8) for _ in range(50)]
    for gate in gates:
        gate.cancel()
    for gate in gates:
        gate.wait_for_layer(2)
        assert gate.finished
        assert gate.failure in (None, "cancelled")
