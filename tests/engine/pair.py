"""A prefill and a decode engine in one process, over two real stores; blocks copied by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from snowskin.engine import decode as d
from snowskin.engine import prefill as p
from snowskin.engine.model import Model, inspect_model
from snowskin.store.blocks import BlockStore
from snowskin.store.pool import PoolFull
from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import NodeId, RequestId
from snowskin.terms.keys import KeySpace, prompt_keys
from snowskin.terms.request import GenerationRequest, SampledToken, Sampling
from snowskin.transfer.memory import Segment, SegmentLayout

GREEDY = Sampling(temperature=0.0)


def load(model_dir: Path) -> Model:
    return Model.load(inspect_model(model_dir, dtype="fp32", device="cpu"))


class Oracle:
    """Plain transformers generation."""

    def __init__(self, model_dir: Path) -> None:
        self.module: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.module.eval()

    def generate(self, tokens: tuple[int, ...], count: int, **arguments: Any) -> list[int]:
        out = self.module.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=count,
            **{"do_sample": False, **arguments},
        )
        return out[0, len(tokens) :].tolist()


@dataclass
class Done:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    reused_tokens: int = 0
    finish_reason: str | None = None
    failure: str | None = None


class Pair:
    def __init__(
        self,
        model: Model,
        *,
        block_tokens: int = 16,
        slots: int = 96,
        decode_slots: int | None = None,
        chunk_tokens: int = 64,
        device_tokens: int = 4096,
        sequence_limit: int = 32,
    ) -> None:
        self.model = model
        self.space = KeySpace(
            model=model.info.name,
            revision=model.info.revision,
            dtype=model.info.dtype,
            block_tokens=block_tokens,
        )
        slot_bytes = model.info.kv_bytes_per_token * block_tokens
        self.segments = [
            Segment.create(SegmentLayout(count, slot_bytes, model.info.layers))
            for count in (slots, decode_slots or slots)
        ]
        self.prefill_store, self.decode_store = (
            BlockStore(segment, node=NodeId(name))
            for segment, name in zip(self.segments, ("prefill-0", "decode-0"), strict=True)
        )
        self.prefill = p.PrefillEngine(
            model,
            self.prefill_store,
            p.PrefillConfig(self.space, chunk_tokens, device_tokens, sequence_limit),
        )
        self.decode = d.DecodeEngine(
            model, self.decode_store, d.DecodeConfig(self.space, device_tokens, sequence_limit)
        )
        self.started: dict[RequestId, tuple[PlacedBlock, ...]] = {}
        self.requests: dict[RequestId, GenerationRequest] = {}
        self.done: dict[RequestId, Done] = {}
        self._count = 0

    def request(
        self, tokens: list[int], limit: int = 24, sampling: Sampling = GREEDY, **fields: Any
    ) -> GenerationRequest:
        self._count += 1
        return GenerationRequest(
            request=RequestId(f"req-{self._count}"),
            tokens=tuple(tokens),
            keys=prompt_keys(self.space, tokens),
            output_limit_tokens=limit,
            sampling=sampling,
            root=self.space.root(),
            **{"stop_tokens": self.model.info.stop_tokens, **fields},
        )

    def submit(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.requests[request.request] = request
            self.done[request.request] = Done()
            self.prefill.submit(request)

    def run(self, *requests: GenerationRequest) -> list[Done]:
        self.submit(*requests)
        steps = 0
        while self.prefill.has_work or self.decode.has_work:
            self.step()
            steps += 1
            assert steps < 5000, "the engines do not come to an end"
        return [self.done[request.request] for request in requests]

    def step(self) -> None:
        for output in self.prefill.step():
            self.on_prefill(output)
        for output in self.decode.step():
            self.on_decode(output)

    def on_prefill(self, output: p.PrefillOutput) -> None:
        done = self.done[output.request]
        match output:
            case p.Started():
                done.reused_tokens = output.reused_tokens
                self.started[output.request] = output.blocks
            case p.FirstToken():
                done.tokens.append(output.token.token)
                done.finish_reason = output.finish_reason
                if output.finish_reason is None:
                    self.hand_over(self.requests[output.request], output.token)
                self.prefill.release(output.request)
            case p.Failed():
                done.failure = output.reason

    def on_decode(self, output: d.DecodeOutput) -> None:
        done = self.done[output.request]
        match output:
            case d.Token():
                done.tokens.append(output.token.token)
                done.finish_reason = output.finish_reason
            case d.Failed():
                done.failure = output.reason
            case d.Joined():
                assert len(done.tokens) == 1

    def hand_over(self, request: GenerationRequest, first: SampledToken) -> None:
        """What a decode node does: pin what it has, copy the rest, commit, submit."""
        there = self.started.pop(request.request)
        held = self.decode_store.pin(request.keys)
        keys = [*request.keys, *[None] * (len(there) - len(request.keys))][len(held) :]
        own = self.decode_store.reserve(keys)
        assert not isinstance(own, PoolFull)
        for source, target in zip(there[len(held) :], own, strict=True):
            assert self.segments[0].generation[source.slot] == source.generation
            assert self.segments[0].parts_ready[source.slot] == self.model.info.layers
            self.segments[1].data[target.slot] = self.segments[0].data[source.slot]
        full = len(request.keys) - len(held)
        self.decode_store.commit(
            [block.slot for block in own[:full]], request.keys, depth=len(held)
        )
        self.decode.submit(d.DecodeJob(request, (*held, *own), first))

    def fetch_from_decode(self, request: GenerationRequest) -> int:
        """What a prefill node does with a better prefix elsewhere: copy and commit it."""
        start = self.prefill_store.match(request.keys)
        source = self.decode_store.pin(request.keys)
        own = self.prefill_store.reserve(request.keys[start : len(source)])
        assert not isinstance(own, PoolFull)
        for there, here in zip(source[start:], own, strict=True):
            self.segments[0].data[here.slot] = self.segments[1].data[there.slot]
        slots = [block.slot for block in own]
        self.prefill_store.commit(slots, request.keys[: len(source)], depth=start)
        self.prefill_store.release(slots)
        self.decode_store.release([block.slot for block in source])
        return len(own)

    def assert_nothing_is_held(self) -> None:
        for store in (self.prefill_store, self.decode_store):
            stat = store.stat()
            assert (stat.reserved_slots, stat.free_slots + stat.evictable_slots) == (
                0,
                stat.slot_count,
            ), stat
        assert self.prefill.device_tokens_used == self.decode.device_tokens_used == 0
        assert not self.prefill.has_work
        assert not self.decode.has_work

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.assert_nothing_is_held()
        for segment in self.segments:
            segment.close()
