"""The rivals: instances that prefill and decode in turn on the same device, as vLLM does.

Three variants (FAST '25 §5 compares with vLLM 0.5.1 in each of them):

- ``vllm``: prefill first. Whoever waits is prefilled before the next decode step, which makes all
  running sequences wait; every prompt is computed in full.
- ``vllm-prefix-caching``: the same, but the KV of earlier prompts stays in device memory while
  there is room, and its longest prefix is reused on the same instance.
- ``vllm-chunked-prefill``: each step decodes all running sequences and computes a chunk of the
  first waiting prompt besides. No prefix is reused.

A request goes to the instance with the fewest prompt tokens outstanding; equals to the first.
A chunk costs its part of the prefill's token and pair terms; its step's fixed cost is that of a
decode step, whose reading of the weights it shares. The KV of earlier chunks, and of a reused
prefix, lies in device memory already: nobody pays for loading it from DRAM.

What the engine's CPU adds to each step is in the profile's decode step: the a800_tp8 profile was
read off a whole engine, and has 8.7 ms and 0.14 ms a sequence more than kernels alone take on the
like device (a100_tp8). That is what vLLM's developers measured before v0.6: 5 to 13 ms between
steps (vllm-project/vllm#6854), 3.4 ms of output processing at 32 sequences (#6913). To add it again
would count it twice. Nobody packs several prompts into one pass, neither here nor on simulated
prefill nodes: prompts are long, so a pass of its own costs each a few per cent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from snowskin.cost.profile import Profile
from snowskin.measure.records import Costs, Ending, RequestRecord, Slo
from snowskin.sim.calendar import Calendar, Rank
from snowskin.sim.config import check_count, node_device_tokens
from snowskin.sim.decode import DecodeBatch, Sequence
from snowskin.sim.job import Job
from snowskin.sim.memory import NodeMemory
from snowskin.sim.outcome import DEFINITIONS, flat_summary, request_records
from snowskin.sim.world import block_keys, output_lengths
from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import NodeId, RequestId, SlotIndex
from snowskin.trace.records import Trace

SYSTEMS = ("vllm", "vllm-prefix-caching", "vllm-chunked-prefill")


class CoupledConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster of coupled instances.

    Raises:
        InvalidInput: on construction, with the option and the value.
    """

    profile: Profile
    system: str = "vllm"
    instances: int = 16
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    sequence_limit: int = 256
    """vLLM's default ``max_num_seqs``."""
    chunk_tokens: int = 512
    """vLLM 0.5.1's default token budget with chunked prefill; decode tokens count in it."""
    device_tokens: int | None = None
    output_limit_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.system not in SYSTEMS:
            raise InvalidInput(
                f"system must be one of {', '.join(SYSTEMS)}, not {self.system!r}",
                parameter="system",
            )
        for name in ("instances", "sequence_limit", "chunk_tokens"):
            check_count(name, getattr(self, name))

    def device_token_count(self) -> int:
        """Tokens of KV that one instance's device memory holds."""
        return self.device_tokens or node_device_tokens(self.profile)


class Instance:
    """One coupled instance."""

    __slots__ = (
        "batch", "cache", "due_s", "name", "outstanding_tokens", "prefill_busy_s", "slots",
        "turn", "waiting", "working",
    )  # fmt: skip

    def __init__(self, name: NodeId, batch: DecodeBatch[Job], cache: NodeMemory | None) -> None:
        self.name = name
        self.batch = batch
        self.cache = cache
        self.waiting: deque[Job] = deque()
        self.working: tuple[Job, int] | None = None
        """The prompt in prefill, and how many of its tokens have KV."""
        self.outstanding_tokens = 0
        self.prefill_busy_s = 0.0
        self.slots: dict[RequestId, list[SlotIndex]] = {}
        self.due_s: float | None = None
        self.turn = 0


class CoupledWorld:
    """One run of coupled instances over a trace."""

    def __init__(
        self,
        trace: Trace,
        config: CoupledConfig,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.trace = trace
        self.config = config
        self.calendar = Calendar()
        self.jobs: list[Job] = []
        self._on_progress = on_progress
        self._token_limit = config.device_token_count()
        self._output_tokens, self._output_limit_tokens = output_lengths(
            trace, config.output_limit_tokens
        )
        self.instances = [self._instance(index) for index in range(config.instances)]
        self._chunked = config.system == "vllm-chunked-prefill"
        self._arrival_s: list[float] = trace.arrival_s.tolist()
        self._prompt_tokens: list[int] = trace.prompt_tokens.tolist()
        self._starts: list[int] = trace.block_starts.tolist()

    def _instance(self, index: int) -> Instance:
        config = self.config
        name = NodeId(f"instance-{index}")
        batch: DecodeBatch[Job] = DecodeBatch(
            config.profile.decode,
            sequence_limit=config.sequence_limit,
            token_limit=self._token_limit,
        )
        cache = None
        if config.system == "vllm-prefix-caching":
            cache = NodeMemory(
                name,
                max(1, self._token_limit // self.trace.block_tokens),
                eviction="lru",
                tell=lambda _: None,
                on_room=lambda: None,
            )
        return Instance(name, batch, cache)

    def run(self) -> int:
        """Play the whole trace; gives the count of events."""
        self.calendar.at(self._arrival_s[0], Rank.ARRIVAL, self._arrive, 0)
        return self.calendar.run()

    def _arrive(self, index: int) -> None:
        start = self._starts[index]
        prompt_tokens = self._prompt_tokens[index]
        full = min(prompt_tokens // self.trace.block_tokens, self._starts[index + 1] - start)
        job = Job(
            RequestId(f"r{index}"),
            self.calendar.now_s,
            prompt_tokens,
            self._output_tokens[index],
            block_keys(self.trace.block_ids[start : start + full]),
        )
        self.jobs.append(job)
        if self._on_progress is not None and index % 500 == 499:
            self._on_progress(index + 1)
        if index + 1 < len(self._arrival_s):
            self.calendar.at(self._arrival_s[index + 1], Rank.ARRIVAL, self._arrive, index + 1)
        if prompt_tokens >= self._token_limit:
            job.leave(Ending.FAILED, self.calendar.now_s)
            return
        instance = min(self.instances, key=lambda each: each.outstanding_tokens)
        instance.outstanding_tokens += prompt_tokens
        instance.waiting.append(job)
        self._expect(instance)

    def _expect(self, instance: Instance) -> None:
        """Have the instance's next decision in the calendar, unless a prefill runs now."""
        if instance.working is not None:
            return
        now_s = self.calendar.now_s
        if instance.waiting and self._has_room(instance, instance.waiting[0]):
            due_s: float | None = instance.batch.boundary_s(now_s)
        else:
            due_s = instance.batch.next_s(now_s)
        if due_s != instance.due_s:
            instance.due_s = due_s
            instance.turn += 1
            if due_s is not None:
                self.calendar.at(due_s, Rank.COMPUTE, self._decide, (instance, instance.turn))

    def _decide(self, entry: tuple[Instance, int]) -> None:
        """At a step boundary: the finished leave, then who waits is prefilled before all else."""
        instance, turn = entry
        if turn != instance.turn:
            return
        instance.due_s = None
        finished, _ = instance.batch.advance(self.calendar.now_s)
        for sequence in finished:
            sequence.job.decoded(instance.batch, sequence)
            self._complete(instance, sequence.job)
        if instance.waiting and self._has_room(instance, instance.waiting[0]):
            job = instance.waiting.popleft()
            self._take(instance, job)
            if self._chunked:
                self._next_chunk(instance)
            else:
                self._prefill(instance, job)
            return
        self._expect(instance)

    def _has_room(self, instance: Instance, job: Job) -> bool:
        reserved = instance.batch.reserved_tokens + self._reserved(job)
        return (
            instance.batch.running_count < self.config.sequence_limit
            and reserved <= self._token_limit
        )

    def _reserved(self, job: Job) -> int:
        return min(job.prompt_tokens + self._output_limit_tokens, self._token_limit)

    def _take(self, instance: Instance, job: Job) -> None:
        """Give a prompt its place, and its cached prefix where there is a cache."""
        reused = 0
        if instance.cache is not None:
            slots = instance.cache.pin(job.keys)
            prefix = len(slots)
            reused = min(prefix * self.trace.block_tokens, job.prompt_tokens - 1)
            # The running batch's tokens and the cache share the device: what is not pinned is
            # cache. Should there be no room, the prompt is simply not kept.
            fresh = instance.cache.reserve(len(job.keys) - prefix)
            if fresh is not None:
                instance.cache.commit(fresh, job.keys, depth=prefix)
                slots += fresh
            instance.slots[job.request] = slots
        job.reused_tokens = reused
        instance.working = (job, reused)

    def _prefill(self, instance: Instance, job: Job) -> None:
        cost = self.config.profile.prefill
        prefill_s = cost.seconds(job.prompt_tokens, job.reused_tokens)
        prefill_s -= cost.reused_token_s * job.reused_tokens
        instance.prefill_busy_s += prefill_s
        instance.batch.stall(prefill_s)
        self.calendar.at(self.calendar.now_s + prefill_s, Rank.COMPUTE, self._prefilled, instance)

    def _next_chunk(self, instance: Instance) -> None:
        """One mixed step: a token of each running sequence and a chunk of the prompt."""
        assert instance.working is not None
        job, done = instance.working
        running = instance.batch.running_count
        chunk = max(1, min(self.config.chunk_tokens - running, job.prompt_tokens - done))
        cost = self.config.profile.prefill
        after = done + chunk
        chunk_s = cost.token_s * chunk + cost.token_pair_s * (after**2 - done**2)
        if running:
            step_s = instance.batch.step_s() + chunk_s
            instance.batch.step_once(step_s)
        else:
            step_s = self.config.profile.decode.base_s + chunk_s
            instance.batch.stall(step_s)
        # The device works on the prompt for the whole step, whoever else is in it.
        instance.prefill_busy_s += step_s
        instance.working = (job, after)
        self.calendar.at(self.calendar.now_s + step_s, Rank.COMPUTE, self._chunked_step, instance)

    def _chunked_step(self, instance: Instance) -> None:
        assert instance.working is not None
        job, done = instance.working
        finished, _ = instance.batch.advance(self.calendar.now_s)
        for sequence in finished:
            sequence.job.decoded(instance.batch, sequence)
            self._complete(instance, sequence.job)
        if done < job.prompt_tokens:
            self._next_chunk(instance)
        else:
            self._prefilled(instance)

    def _prefilled(self, instance: Instance) -> None:
        """The first token is out; the sequence joins the batch at this very boundary."""
        assert instance.working is not None
        job = instance.working[0]
        instance.working = None
        job.first_token_s = self.calendar.now_s
        instance.outstanding_tokens -= job.prompt_tokens
        if job.output_tokens <= 1:
            self._complete(instance, job)
        else:
            sequence = Sequence(
                job,
                prompt_tokens=job.prompt_tokens,
                step_count=job.output_tokens - 1,
                reserved_tokens=self._reserved(job),
            )
            instance.batch.add(sequence)
            instance.batch.advance(self.calendar.now_s)
        self._expect(instance)

    def _complete(self, instance: Instance, job: Job) -> None:
        job.leave(Ending.COMPLETED, self.calendar.now_s)
        if instance.cache is not None:
            instance.cache.release(instance.slots.pop(job.request))


def simulate_coupled(
    trace: Trace,
    config: CoupledConfig,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """The flat summary and the records of a trace on coupled instances."""
    world = CoupledWorld(trace, config, on_progress=on_progress)
    world.run()
    records = request_records(world.jobs)
    costs = Costs(prefill_busy_s=sum(each.prefill_busy_s for each in world.instances))
    slo = Slo(ttft_s=config.ttft_slo_s, tbt_s=config.tbt_slo_s)
    batches = [each.batch for each in world.instances]
    settings = {
        "system": config.system,
        "hardware": config.profile.name,
        "instances": config.instances,
        "ttft_slo_s": config.ttft_slo_s,
        "tbt_slo_s": config.tbt_slo_s,
        "seed": config.seed,
        "definitions": dict(DEFINITIONS),
    }
    return flat_summary(trace, records, slo, costs, batches) | settings, records
