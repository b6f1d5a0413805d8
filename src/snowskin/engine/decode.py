"""A decode node's engine: continuous batching over sequences whose KV arrives by way of DRAM.

A sequence's KV is loaded from the node's segment to its device while the others go on decoding;
once it is there, the sequence joins the batch. Each block that a sequence fills is written back
to the segment and committed, so that the next turn of a conversation finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from snowskin.engine.attention import Span
from snowskin.engine.batching import DecodeBatch, DecodeLimits, Submission
from snowskin.engine.kv import BlockSlots, SequenceKv
from snowskin.engine.loader import KvLoader, LoadGate
from snowskin.engine.model import Model
from snowskin.engine.outputs import Failed, Joined, Token, finish_reason
from snowskin.engine.sampling import SamplingState, UnusableLogits, sample
from snowskin.engine.writeback import WriteBack
from snowskin.store.blocks import BlockStore
from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import RequestId
from snowskin.terms.keys import KeySpace
from snowskin.terms.request import GenerationRequest, SampledToken

__all__ = ["DecodeConfig", "DecodeEngine", "DecodeJob", "DecodeOutput", "Failed", "Joined", "Token"]

DecodeOutput = Joined | Token | Failed

_LOAD_POLL_S = 0.005
"""How long a step waits where nothing runs yet and loads are under way."""
_GROWTH_TOKENS = 128
"""Room beyond the prompt that a sequence has on the device at first."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The bounds of a decode node."""

    key_space: KeySpace
    device_tokens: int = 1 << 17
    """Most tokens of KV that the loading and running sequences may come to hold."""
    sequence_limit: int = 64
    """Most sequences that load or run at once."""
    queue_limit: int = 1024
    """Most sequences that wait for that."""


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A prompt with its first token, to be continued here.

    ``blocks`` cover the prompt, in order, and are pinned once for this job; they hold its KV.
    From submission on they are the engine's to release.
    """

    request: GenerationRequest
    blocks: tuple[PlacedBlock, ...]
    first: SampledToken


@dataclass(slots=True)
class _Sequence:
    """A sequence on this node, from submission to its end."""

    job: DecodeJob
    state: SamplingState
    output: list[int]
    writeback: WriteBack
    kv: SequenceKv | None = None
    gate: LoadGate | None = None
    cancelled: bool = False

    @property
    def request(self) -> RequestId:
        return self.job.request.request


class DecodeEngine:
    """Decodes one token of every running sequence a step.

    ``step`` is called by one thread, the engine's; everything else from any thread.
    """

    def __init__(self, model: Model, store: BlockStore, config: DecodeConfig) -> None:
        self._model = model
        self._store = store
        self._config = config
        self._slots = BlockSlots(
            store.segment.data, model.kv_shape, block_tokens=config.key_space.block_tokens
        )
        self._changed = threading.Condition()
        self._loader = KvLoader(
            self._slots,
            layers=model.info.layers,
            device=model.device,
            on_finished=self._notice,
        )
        self._batch = DecodeBatch(
            DecodeLimits(
                sequence_limit=config.sequence_limit,
                kv_token_budget=config.device_tokens,
                queue_limit=config.queue_limit,
            )
        )
        self._sequences: dict[RequestId, _Sequence] = {}
        self._refused: list[Failed] = []
        self._passes = 0
        self._skipped_writebacks = 0

    @property
    def has_work(self) -> bool:
        """True where ``step`` may do something."""
        return bool(self._sequences or self._refused)

    @property
    def running_count(self) -> int:
        """Sequences in the batch."""
        with self._changed:
            return len(self._batch.running)

    @property
    def waiting_count(self) -> int:
        """Sequences that wait for room or whose KV is being loaded."""
        with self._changed:
            return len(self._batch.waiting) + len(self._batch.loading)

    @property
    def device_tokens_used(self) -> int:
        """Tokens of KV of the sequences on the device."""
        with self._changed:
            kvs = [sequence.kv for sequence in self._sequences.values()]
        return sum(kv.tokens for kv in kvs if kv is not None)

    @property
    def skipped_writebacks(self) -> int:
        """Full blocks that were not written back since the start, as the pool had no room."""
        return self._skipped_writebacks

    @property
    def passes(self) -> int:
        """Steps since the start that computed; the others only started, joined or waited."""
        return self._passes

    def submit(self, job: DecodeJob) -> None:
        """Queue a sequence. One that can never fit here fails at the next step."""
        request = job.request
        prompt_tokens, output_tokens = len(request.tokens), request.output_limit_tokens
        block_tokens = self._config.key_space.block_tokens
        assert len(job.blocks) == -(-prompt_tokens // block_tokens), request.request
        assert finish_reason(request, job.first.token, 1) is None, "nothing is left to decode"
        with self._changed:
            assert request.request not in self._sequences, request.request
            outcome = self._batch.submit(
                request.request, prompt_tokens=prompt_tokens, output_limit_tokens=output_tokens
            )
            if outcome is Submission.QUEUED:
                self._sequences[request.request] = _Sequence(
                    job=job,
                    state=SamplingState.of_request(request, [job.first.token]),
                    output=[job.first.token],
                    writeback=WriteBack(
                        request, job.blocks, self._slots, self._store, self._config.key_space
                    ),
                )
            else:
                self._store.release([block.slot for block in job.blocks])
                self._refused.append(Failed(request.request, self._refusal(outcome, request)))
            self._changed.notify_all()

    def cancel(self, request: RequestId) -> None:
        """Free all that a sequence holds: at once, or at the start of the next step."""
        with self._changed:
            sequence = self._sequences.get(request)
            if sequence is None:
                return
            if request in self._batch.waiting:
                self._remove(sequence)
            else:
                sequence.cancelled = True
            self._changed.notify_all()

    def step(self) -> tuple[DecodeOutput, ...]:
        """Let loaded sequences join, and decode one token of each that runs."""
        with self._changed:
            outputs: list[DecodeOutput] = [*self._refused]
            self._refused.clear()
            for sequence in tuple(self._sequences.values()):
                if sequence.cancelled:
                    self._remove(sequence)
            for request in self._batch.admit():
                outputs += self._begin_load(self._sequences[request])
            for request in self._batch.loading:
                outputs += self._join(self._sequences[request])
            for request in self._batch.running:
                outputs += self._make_room(self._sequences[request])
            running = [self._sequences[request] for request in self._batch.running]
            if not running:
                if self._batch.loading and not outputs:
                    self._changed.wait(_LOAD_POLL_S)
                return tuple(outputs)
        self._passes += 1
        outputs += self._decode(running)
        return tuple(outputs)

    def close(self) -> None:
        """Free everything. The engine's thread must have ended."""
        with self._changed:
            for sequence in tuple(self._sequences.values()):
                self._remove(sequence)
        self._loader.close()

    def _refusal(self, outcome: Submission, request: GenerationRequest) -> str:
        if outcome is Submission.QUEUE_FULL:
            return f"{self._config.queue_limit} sequences wait at this node already"
        return (
            f"{len(request.tokens)} prompt + {request.output_limit_tokens} output tokens exceed "
            f"the {self._config.device_tokens} that fit this node's device memory"
        )

    def _begin_load(self, sequence: _Sequence) -> list[DecodeOutput]:
        request = sequence.job.request
        prompt_tokens = len(request.tokens)
        # The KV of the last token of the output is never computed.
        limit_tokens = prompt_tokens + request.output_limit_tokens - 1
        try:
            sequence.kv = SequenceKv(
                self._model.kv_shape,
                device=self._model.device,
                capacity_tokens=min(prompt_tokens + _GROWTH_TOKENS, limit_tokens),
                limit_tokens=limit_tokens,
            )
        except RuntimeError as error:
            self._remove(sequence)
            return [Failed(sequence.request, f"no device memory for its KV: {error}")]
        slots = torch.tensor([block.slot for block in sequence.job.blocks])
        sequence.gate = self._loader.load(sequence.kv, slots, prompt_tokens)
        return []

    def _join(self, sequence: _Sequence) -> list[DecodeOutput]:
        """Let a sequence take part whose KV has been loaded; the prompt's slots are not needed."""
        assert sequence.gate is not None
        assert sequence.kv is not None
        if not sequence.gate.finished:
            return []
        if sequence.gate.failure is not None:
            self._remove(sequence)
            return [Failed(sequence.request, sequence.gate.failure)]
        sequence.gate.wait_for_layer(self._model.info.layers - 1)
        sequence.kv.tokens = len(sequence.job.request.tokens)
        sequence.writeback.release_prompt()
        self._batch.join(sequence.request)
        return [Joined(sequence.request)]

    def _make_room(self, sequence: _Sequence) -> list[DecodeOutput]:
        assert sequence.kv is not None
        try:
            sequence.kv.reserve(sequence.kv.tokens + 1)
        except RuntimeError as error:
            self._remove(sequence)
            return [Failed(sequence.request, f"no device memory for its KV to grow: {error}")]
        return []

    def _decode(self, running: Sequence[_Sequence]) -> list[DecodeOutput]:
        spans, tokens = [], []
        for sequence in running:
            assert sequence.kv is not None
            spans.append(Span(sequence.kv, sequence.kv.tokens, 1))
            tokens.append(sequence.output[-1])
        logits = self._model.forward(tokens, spans, logit_rows=range(len(running)))
        sampled = sample(logits, [sequence.state for sequence in running])
        for sequence, token in zip(running, sampled, strict=True):
            assert sequence.kv is not None
            # Logits that are no numbers come from KV that is none; it must not spread.
            if isinstance(token, UnusableLogits):
                continue
            if not sequence.writeback.follow(sequence.kv, sequence.output):
                self._skipped_writebacks += 1
        with self._changed:
            return [
                self._advance(sequence, token)
                for sequence, token in zip(running, sampled, strict=True)
                if not sequence.cancelled
            ]

    def _advance(self, sequence: _Sequence, token: SampledToken | UnusableLogits) -> DecodeOutput:
        if isinstance(token, UnusableLogits):
            self._remove(sequence)
            return Failed(sequence.request, token.reason)
        sequence.output.append(token.token)
        reason = finish_reason(sequence.job.request, token.token, len(sequence.output))
        if reason is not None:
            self._remove(sequence)
        return Token(sequence.request, token, reason)

    def _remove(self, sequence: _Sequence) -> None:
        if sequence.gate is not None:
            sequence.gate.cancel()
        self._batch.leave(sequence.request)
        del self._sequences[sequence.request]
        sequence.writeback.release_all()

    def _notice(self) -> None:
        with self._changed:
            self._changed.notify_all()
