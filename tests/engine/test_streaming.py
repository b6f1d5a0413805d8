"""KV that a decode node pulls while the prefill node computes it, over the real transports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from snowskin.engine import decode as d
from snowskin.engine import prefill as p
from snowskin.store.pool import PoolFull
from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import NodeId
from snowskin.terms.request import GenerationRequest
from snowskin.transfer.engine import BlockPull, PullResult, TransferEngine
from snowskin.transfer.messenger import MessengerProcess
from tests.engine import tiny
from tests.engine.pair import Oracle, Pair, load

torch.set_num_threads(1)

CLUSTER_KEY = b"a key that both nodes share"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("models"))


class StreamedPair(Pair):
    """A pair whose decode side follows the prefill side's layers as they are published."""

    transfer: TransferEngine
    messenger: MessengerProcess
    pulls: ThreadPoolExecutor

    def connect(self, transport: str) -> None:
        self.messenger = MessengerProcess.start(
            self.segments[0], node=NodeId("prefill-0"), cluster_key=CLUSTER_KEY
        )
        self.transfer = TransferEngine(
            self.segments[1], transport=transport, cluster_key=CLUSTER_KEY
        )
        self.pulls = ThreadPoolExecutor(4)

    def disconnect(self) -> None:
        self.pulls.shutdown()
        self.transfer.close()
        self.messenger.stop()

    def pull(
        self,
        request: GenerationRequest,
        there: tuple[PlacedBlock, ...],
        cancelled: threading.Event | None = None,
    ) -> tuple[tuple[PlacedBlock, ...], Future[PullResult]]:
        """Reserve and begin to pull; all blocks, whatever is held here already."""
        own = self.decode_store.reserve([*request.keys, *[None] * (len(there) - len(request.keys))])
        assert not isinstance(own, PoolFull)
        wanted = tuple(
            BlockPull(source.slot, source.generation, target.slot)
            for source, target in zip(there, own, strict=True)
        )
        return own, self.pulls.submit(
            self.transfer.pull,
            self.messenger.peer,
            wanted,
            timeout_s=30.0,
            cancelled=cancelled,
        )


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[StreamedPair]:
    pair = StreamedPair(load(model_dir), decode_slots=192)
    pair.connect(request.param)
    yield pair
    pair.disconnect()
    pair.close()


def test_tokens_are_right_though_the_kv_was_pulled_while_it_was_computed(
    pair: StreamedPair, model_dir: Path
) -> None:
    oracle = Oracle(model_dir)
    # The second prompt reuses blocks of the first, whose pull starts from what is sealed already.
    first = tiny.prompt_tokens(250, seed=6)
    for prompt in (first, [*first[:160], *tiny.prompt_tokens(75, seed=7)]):
        request = pair.request(prompt, stop_tokens=())
        pair.prefill.submit(request)
        (started,) = pair.prefill.step()
        assert isinstance(started, p.Started)
        own, pulling = pair.pull(request, started.blocks)
        outputs: list[p.PrefillOutput] = []
        while not outputs:
            outputs += pair.prefill.step()
        (token,) = outputs
        assert isinstance(token, p.FirstToken)
        result = pulling.result(timeout=30)
        assert result.landed == (True,) * len(own)
        assert result.checksum_failures == 0
        pair.prefill.release(request.request)
        full = len(request.keys)
        pair.decode_store.commit([block.slot for block in own[:full]], request.keys)
        pair.decode.submit(d.DecodeJob(request, own, token.token))
        tokens = [token.token.token]
        while pair.decode.has_work:
            for output in pair.decode.step():
                if isinstance(output, d.Token):
                    tokens.append(output.token.token)
        assert tokens == oracle.generate(request.tokens, 24, eos_token_id=[-1])


def test_a_pull_of_a_cancelled_prefill_is_a_miss_and_ends(pair: StreamedPair) -> None:
    request = pair.request(tiny.prompt_tokens(250, seed=6))
    pair.prefill.submit(request)
    (started,) = pair.prefill.step()
    assert isinstance(started, p.Started)
    own, pulling = pair.pull(request, started.blocks)
    pair.prefill.step()
    pair.prefill.cancel(request.request)
    while pair.prefill.has_work:
        pair.prefill.step()
    result = pulling.result(timeout=30)
    assert not all(result.landed)
    pair.decode_store.release([block.slot for block in own])
