"""A prefill node's engine: reuses the longest stored prefix, computes the rest, publishes it.

One pass computes chunks of one or more prompts. Within a pass everything goes layer by layer:
while layer l is computed, the reused KV of layer l + 1 comes from the node's DRAM; and what layer
l adds is at once in the node's segment, published, for the decode nodes that follow.

Source: layer-wise prefill is FAST '25 §5.2; chunks are its §5.1.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from snowskin.engine.attention import Span
from snowskin.engine.batching import Chunk, PrefillProgress, plan_prefill_pass
from snowskin.engine.kv import BlockSlots, SequenceKv
from snowskin.engine.loader import KvLoader
from snowskin.engine.model import Model
from snowskin.engine.outputs import Failed, FirstToken, Started, finish_reason
from snowskin.engine.prefill_pass import LayerwiseStore, PrefillJob
from snowskin.engine.sampling import SamplingState, UnusableLogits, sample
from snowskin.store.blocks import BlockStore
from snowskin.store.pool import PoolFull
from snowskin.terms.ids import RequestId, SlotIndex
from snowskin.terms.keys import KeySpace
from snowskin.terms.request import GenerationRequest, SampledToken

__all__ = ["Failed", "FirstToken", "PrefillConfig", "PrefillEngine", "PrefillOutput", "Started"]

PrefillOutput = Started | FirstToken | Failed

_ROOM_POLL_S = 0.005
"""How long a step waits where all that it could do is start a prompt, and no slots are free."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The bounds of a prefill node."""

    key_space: KeySpace
    chunk_tokens: int = 512
    """Most tokens of one pass; at least one block."""
    device_tokens: int = 1 << 17
    """Most tokens of KV on the device at once."""
    sequence_limit: int = 64
    """Most prompts that wait, and most that are computed and wait for release."""

    def __post_init__(self) -> None:
        assert 1 <= self.key_space.block_tokens <= self.chunk_tokens, self
        assert self.device_tokens >= 1, self
        assert self.sequence_limit >= 1, self


class PrefillEngine:
    """Computes prompts, first come, first served.

    ``step`` is called by one thread, the engine's; everything else from any thread.

    Args:
        clock: monotonic seconds, for ``prefill_s``.
    """

    def __init__(
        self,
        model: Model,
        store: BlockStore,
        config: PrefillConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._store = store
        self._config = config
        self._clock = clock
        self._block_tokens = config.key_space.block_tokens
        self._slots = BlockSlots(
            store.segment.data, model.kv_shape, block_tokens=self._block_tokens
        )
        self._changed = threading.Condition()
        self._loader = KvLoader(
            self._slots, layers=model.info.layers, device=model.device, on_finished=lambda: None
        )
        self._waiting: OrderedDict[RequestId, GenerationRequest] = OrderedDict()
        self._active: OrderedDict[RequestId, PrefillJob] = OrderedDict()
        self._computed: dict[RequestId, list[SlotIndex]] = {}
        self._refused: list[Failed] = []
        self._passes = 0
        self._device_tokens_used = 0

    @property
    def has_work(self) -> bool:
        """True where ``step`` may do something."""
        return bool(self._active or self._waiting or self._refused)

    @property
    def running_count(self) -> int:
        """Prompts in computation."""
        return len(self._active)

    @property
    def waiting_count(self) -> int:
        """Prompts in the queue."""
        return len(self._waiting)

    @property
    def device_tokens_used(self) -> int:
        """Tokens of KV that the device holds or has room for now."""
        return self._device_tokens_used

    @property
    def passes(self) -> int:
        """Steps since the start that computed; the others only started, joined or waited."""
        return self._passes

    def submit(self, request: GenerationRequest) -> None:
        """Queue a prompt. One that can never be computed here fails at the next step."""
        with self._changed:
            known = (self._waiting, self._active, self._computed)
            assert not any(request.request in place for place in known), request.request
            reason = self._reason_to_refuse(request)
            if reason is None:
                self._waiting[request.request] = request
            else:
                self._refused.append(Failed(request.request, reason))
            self._changed.notify_all()

    def cancel(self, request: RequestId) -> None:
        """Free all that a request holds: at once, or after the pass that it takes part in."""
        with self._changed:
            self._waiting.pop(request, None)
            job = self._active.get(request)
            if job is not None:
                job.cancelled = True
        self.release(request)

    def release(self, request: RequestId) -> None:
        """Unpin the blocks of a computed prompt. Does nothing if there are none (any more)."""
        with self._changed:
            slots = self._computed.pop(request, None)
            if slots is not None:
                self._store.release(slots)
            self._changed.notify_all()

    def step(self) -> tuple[PrefillOutput, ...]:
        """Start the prompts that find room, or else run one pass.

        A step that starts prompts ends before it computes anything, so that word of where their
        KV will be is out while it is computed.
        """
        with self._changed:
            self._drop_cancelled()
            outputs: list[PrefillOutput] = [*self._refused]
            self._refused.clear()
            while self._waiting and self._next_pass_has_room():
                output = self._start(next(iter(self._waiting.values())))
                if output is None:
                    break
                outputs.append(output)
            if outputs:
                return tuple(outputs)
            if not self._active:
                if self._waiting:
                    self._changed.wait(_ROOM_POLL_S)
                return ()
            jobs = tuple(self._active.values())
        self._passes += 1
        return self._run_pass(jobs)

    def close(self) -> None:
        """Free everything. The engine's thread must have ended."""
        with self._changed:
            self._waiting.clear()
            for job in self._active.values():
                job.cancelled = True
            self._drop_cancelled()
            computed = tuple(self._computed)
        for request in computed:
            self.release(request)
        self._loader.close()

    def _reason_to_refuse(self, request: GenerationRequest) -> str | None:
        info, config = self._model.info, self._config
        prompt_tokens, output_tokens = len(request.tokens), request.output_limit_tokens
        if prompt_tokens < 1 or output_tokens < 1:
            return f"{prompt_tokens} prompt and {output_tokens} output tokens: give at least 1 each"
        if prompt_tokens + output_tokens > info.max_context_tokens:
            return (
                f"{prompt_tokens} prompt + {output_tokens} output tokens exceed the model's "
                f"context of {info.max_context_tokens}"
            )
        if prompt_tokens > config.device_tokens:
            return (
                f"the prompt's {prompt_tokens} tokens exceed the {config.device_tokens} that fit "
                "this node's device memory"
            )
        pool_tokens = self._store.segment.layout.slot_count * self._block_tokens
        if prompt_tokens > pool_tokens:
            return (
                f"the prompt's {prompt_tokens} tokens exceed the {pool_tokens} that fit this "
                "node's DRAM pool"
            )
        if not 0 <= min(request.tokens) <= max(request.tokens) < info.vocab_size:
            return f"the prompt has a token outside of the vocabulary of {info.vocab_size}"
        if len(self._waiting) >= config.sequence_limit:
            return f"{config.sequence_limit} prompts wait at this node already"
        return None

    def _next_pass_has_room(self) -> bool:
        """A prompt stays in the queue until a pass can begin it.

        So it still finds what those before it commit (their common prefix is computed once), and
        ``prefill_s`` has no time of the queue in it.
        """
        left_tokens = sum(
            len(job.request.tokens) - job.done_tokens for job in self._active.values()
        )
        return left_tokens < self._config.chunk_tokens

    def _start(self, request: GenerationRequest) -> Started | Failed | None:
        """Take the first prompt from the queue, unless there is no room for it now."""
        prompt_tokens = len(request.tokens)
        if len(self._active) + len(self._computed) >= self._config.sequence_limit:
            return None
        if self._device_tokens_used + prompt_tokens > self._config.device_tokens:
            return None
        pinned = self._store.pin(request.keys)
        rest: list[Any] = list(request.keys[len(pinned) :])
        if prompt_tokens % self._block_tokens:
            rest.append(None)
        reserved = self._store.reserve(rest)
        if isinstance(reserved, PoolFull):
            self._store.release([block.slot for block in pinned])
            return None
        blocks = (*pinned, *reserved)
        del self._waiting[request.request]
        try:
            kv = SequenceKv(
                self._model.kv_shape, device=self._model.device, capacity_tokens=prompt_tokens
            )
        except RuntimeError as error:
            self._store.release([block.slot for block in blocks])
            return Failed(request.request, f"no device memory for its KV: {error}")
        # The last token is computed even if its KV is held: its logits are wanted.
        reused_tokens = min(len(pinned) * self._block_tokens, prompt_tokens - 1)
        job = PrefillJob(request, kv, blocks, len(pinned), reused_tokens, self._clock())
        if reused_tokens:
            job.gate = self._loader.load(kv, job.slot_index, reused_tokens)
        self._active[request.request] = job
        self._device_tokens_used += prompt_tokens
        return Started(request.request, reused_tokens, blocks)

    def _run_pass(self, jobs: Sequence[PrefillJob]) -> tuple[PrefillOutput, ...]:
        chunks = plan_prefill_pass(
            [
                PrefillProgress(job.request.request, len(job.request.tokens), job.done_tokens)
                for job in jobs
            ],
            token_budget=self._config.chunk_tokens,
            block_tokens=self._block_tokens,
        )
        began_s = self._clock()
        work = [(self._active[chunk.request], chunk) for chunk in chunks]
        tokens: list[int] = []
        last_rows: list[int] = []
        for job, chunk in work:
            tokens += job.request.tokens[chunk.start_token : chunk.end_token]
            if chunk.last:
                last_rows.append(len(tokens) - 1)
        logits = self._model.forward(
            tokens,
            [Span(job.kv, chunk.start_token, chunk.tokens) for job, chunk in work],
            logit_rows=last_rows,
            watcher=LayerwiseStore(work, self._slots, self._store),
        )
        last = [job for job, chunk in work if chunk.last]
        sampled = sample(logits, [SamplingState.of_request(job.request) for job in last])
        failures = [(job, job.failure) for job, _ in work if job.failure is not None]
        failures += [
            (job, token.reason)
            for job, token in zip(last, sampled, strict=True)
            if isinstance(token, UnusableLogits)
        ]
        with self._changed:
            outputs: list[PrefillOutput | None] = [self._fail(*failure) for failure in failures]
        pass_s = self._clock() - began_s
        for job, chunk in work:
            job.done_tokens = chunk.end_token
            job.work_s += pass_s * chunk.tokens / len(tokens)
            if not job.cancelled:
                self._commit(job, chunk)
        with self._changed:
            outputs += [
                self._finish(job, token)
                for job, token in zip(last, sampled, strict=True)
                if not job.cancelled and not isinstance(token, UnusableLogits)
            ]
            self._drop_cancelled()
        return tuple(output for output in outputs if output is not None)

    def _commit(self, job: PrefillJob, chunk: Chunk) -> None:
        """Let the blocks that the chunk completed be found by their keys."""
        first = max(chunk.start_token // self._block_tokens, job.reused_blocks)
        end = chunk.end_token // self._block_tokens
        if first < end:
            self._store.commit(job.slots[first:end], job.request.keys[:end], depth=first)

    def _finish(self, job: PrefillJob, token: SampledToken) -> FirstToken:
        request = job.request.request
        del self._active[request]
        self._device_tokens_used -= len(job.request.tokens)
        self._computed[request] = job.slots
        reason = finish_reason(job.request, token.token, 1)
        prefill_s = self._clock() - job.started_s
        return FirstToken(request, token, prefill_s, job.work_s, reason)

    def _fail(self, job: PrefillJob, reason: str) -> Failed | None:
        """End a job that the next ``_drop_cancelled`` shall free; None if it is ended already."""
        if job.cancelled:
            return None
        job.cancelled = True
        return Failed(job.request.request, reason)

    def _drop_cancelled(self) -> None:
        for request, job in tuple(self._active.items()):
            if job.cancelled:
                if job.gate is not None:
                    job.gate.cancel()
                del self._active[request]
                self._device_tokens_used -= len(job.request.tokens)
                self._store.release(job.slots)
