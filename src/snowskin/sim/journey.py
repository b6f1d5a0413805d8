"""A request's way through the nodes: fetch, prefill, KV stream, load, decode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from snowskin.cost.profile import Profile
from snowskin.measure.records import Ending
from snowskin.sim.calendar import Calendar, Rank
from snowskin.sim.decode import Sequence
from snowskin.sim.job import Job, Placement
from snowskin.sim.links import Network
from snowskin.sim.nodes import DecodeNode, PrefillNode, SimNode
from snowskin.terms.commands import Fetch
from snowskin.terms.events import (
    DecodeStarted,
    Event,
    FetchFinished,
    KvLanded,
    Outcome,
    PrefillFinished,
    PrefillStarted,
    RequestFinished,
)
from snowskin.terms.ids import BlockKey, NodeId, RequestId, SlotIndex


class Rules(msgspec.Struct, frozen=True):
    """What holds for every request on its way."""

    profile: Profile
    block_tokens: int
    layers: int
    """Of the model: the last one's KV can only leave when prefill is over."""
    overlap: bool
    """Whether KV streams while prefill computes, not after it."""
    load_stalls_decode: bool
    """Whether the batch waits while a joining sequence's KV is loaded."""
    output_limit_tokens: int


class Journey:
    """Moves placements on, and tells the Conductor of each stage.

    Args:
        nodes: those that are up, by name.
        tell: gives an event to the Conductor and performs what it answers.
    """

    def __init__(
        self,
        calendar: Calendar,
        network: Network,
        nodes: Mapping[NodeId, SimNode],
        tell: Callable[[Event], None],
        rules: Rules,
    ) -> None:
        self._calendar = calendar
        self._network = network
        self._nodes = nodes
        self._tell = tell
        self._rules = rules
        self._profile = rules.profile
        self._block_tokens = rules.block_tokens
        self._token_bytes = rules.profile.kv_bytes_per_token
        self._streamed_ratio = 1.0 - 1.0 / rules.layers
        self.flights: dict[RequestId, Job] = {}
        """Requests that have come and not left, in order of arrival."""
        self.endings = dict.fromkeys(Ending, 0)
        self.started_tokens = 0
        """Prompt tokens of all prefills that were started, and how many of them were reused."""
        self.reused_tokens = 0
        self.fetch_count = 0
        self.fetched_bytes = 0

    def place(
        self, job: Job, prefill: PrefillNode, decode: DecodeNode, fetch: Fetch | None
    ) -> None:
        """Queue a job; an earlier placement of it is given up."""
        if job.placement is not None:
            self.drop(job.placement)
        placement = Placement(job, prefill, decode, fetch)
        job.placement = placement
        blocks = -(-job.prompt_tokens // self._block_tokens)
        if blocks > min(prefill.memory.block_count, decode.memory.block_count):
            self.end(job, Ending.FAILED)
            return
        prefill.queue.append(placement)
        if fetch is not None:
            self._begin_fetch(placement, fetch)
        self.start_next(prefill)

    def end(self, job: Job, ending: Ending) -> None:
        """The request leaves and lets go of everything; completion and failure are told."""
        placement = job.placement
        job.leave(ending, self._calendar.now_s)
        del self.flights[job.request]
        self.endings[ending] += 1
        if placement is not None:
            self.drop(placement)
        if ending is Ending.COMPLETED:
            event = RequestFinished(job.request, Outcome.COMPLETED, job.output_tokens)
            self._tell(event)
        elif ending is Ending.FAILED:
            self._tell(RequestFinished(job.request, Outcome.FAILED, 0))

    def drop(self, placement: Placement) -> None:
        """Let go of all that a placement holds; harmless if it holds nothing any more."""
        if not placement.is_live():
            return
        placement.give_up()
        prefill, decode = placement.prefill, placement.decode
        for flow in (placement.fetch_flow, placement.kv_flow):
            if flow is not None:
                self._network.cancel(flow)
        placement.fetch_flow = placement.kv_flow = None
        if prefill.up:
            if placement in prefill.queue:
                prefill.queue.remove(placement)
            if prefill.running is placement:
                prefill.running = None
            prefill.memory.release(_taken(placement.fetch_slots))
            prefill.memory.release(_taken(placement.prefill_slots))
            self.start_next(prefill)
        if decode.up:
            if placement in decode.wanting:
                decode.wanting.remove(placement)
            decode.memory.release(_taken(placement.decode_slots))

    # The fetch of a prefix from a peer.

    def _begin_fetch(self, placement: Placement, fetch: Fetch) -> None:
        memory = placement.prefill.memory
        slots = memory.reserve(len(fetch.blocks))
        placement.fetch_started_s = self._calendar.now_s
        source = self._nodes.get(fetch.source)
        if slots is None or source is None or not source.up:
            memory.release(slots or [])
            self._tell_fetched(placement, fetch, blocks=0)
            return
        placement.fetch_slots = slots
        placement.fetch_flow = self._network.start(
            fetch.source,
            placement.prefill.name,
            float(len(slots) * self._block_tokens * self._token_bytes),
            on_done=self._fetched,
            about=placement,
        )

    def _fetched(self, placement: Placement) -> None:
        fetch = placement.fetch
        assert fetch is not None
        memory = placement.prefill.memory
        keys = placement.job.keys
        depth = keys.index(fetch.blocks[0].key)
        chain = keys[: depth + len(fetch.blocks)]
        placement.fetch_flow = None
        slots = _taken(placement.fetch_slots)
        memory.commit(slots, chain, depth=depth)
        memory.release(slots)
        self._tell_fetched(placement, fetch, blocks=len(fetch.blocks))
        self.start_next(placement.prefill)

    def fetch_lost(self, placement: Placement) -> None:
        """The source of a fetch died: prefill goes on with what it has."""
        assert placement.fetch is not None
        assert placement.fetch_flow is not None
        self._network.cancel(placement.fetch_flow)
        placement.fetch_flow = None
        placement.prefill.memory.release(_taken(placement.fetch_slots))
        self._tell_fetched(placement, placement.fetch, blocks=0)
        self.start_next(placement.prefill)

    def _tell_fetched(self, placement: Placement, fetch: Fetch, *, blocks: int) -> None:
        kv_bytes = blocks * self._block_tokens * self._token_bytes
        self.fetch_count += 1
        self.fetched_bytes += kv_bytes
        self._tell(
            FetchFinished(
                placement.job.request,
                placement.prefill.name,
                fetch.source,
                blocks,
                kv_bytes,
                self._calendar.now_s - placement.fetch_started_s,
            )
        )

    # Prefill.

    def start_next(self, node: PrefillNode) -> None:
        """Start the head of the queue if the node is free and the head has all it needs."""
        if not node.up or node.running is not None or not node.queue:
            return
        placement = node.queue[0]
        if placement.fetch_flow is not None:
            return
        job = placement.job
        taken = self._take_slots(node, job.keys, job.prompt_tokens)
        if taken is None:
            return
        placement.prefill_slots, placement.prefix = taken
        node.queue.popleft()
        node.running = placement
        now_s = self._calendar.now_s
        reused = min(placement.prefix * self._block_tokens, job.prompt_tokens - 1)
        job.reused_tokens = reused
        self.started_tokens += job.prompt_tokens
        self.reused_tokens += reused
        placement.prefill_s = self._profile.prefill.seconds(job.prompt_tokens, reused)
        placement.computed_s = now_s + placement.prefill_s
        self._calendar.at(placement.computed_s, Rank.COMPUTE, self._computed, placement)
        self._tell(PrefillStarted(job.request, node.name, reused))
        if placement.is_live() and self._rules.overlap:
            placement.decode.wanting.append(placement)
            self.stream_next(placement.decode)

    def _take_slots(
        self, node: SimNode, keys: tuple[BlockKey, ...], prompt_tokens: int
    ) -> tuple[list[SlotIndex], int] | None:
        """Slots for a whole prompt, and how many blocks of them are held; None: no room now."""
        memory = node.memory
        slots = memory.pin(keys)
        prefix = len(slots)
        fresh = memory.reserve(-(-prompt_tokens // self._block_tokens) - prefix)
        if fresh is None:
            memory.unpin(slots)
            return None
        slots += fresh
        return slots, prefix

    def _computed(self, placement: Placement) -> None:
        node = placement.prefill
        if not placement.is_live() or not node.up:
            return
        job = placement.job
        now_s = self._calendar.now_s
        node.running = None
        node.busy_s += placement.prefill_s
        placement.prefill_done = True
        full = len(job.keys)
        fresh = placement.prefill_slots[placement.prefix : full]
        node.memory.commit(fresh, job.keys, depth=placement.prefix)
        job.first_token_s = now_s
        self._tell(PrefillFinished(job.request, node.name, placement.prefill_s))
        if not placement.is_live():
            return
        if job.output_tokens <= 1:
            self.end(job, Ending.COMPLETED)
            return
        if not self._rules.overlap:
            placement.decode.wanting.append(placement)
            self.stream_next(placement.decode)
        elif placement.kv_flow is not None:
            self._network.uncap(placement.kv_flow)
        elif placement.decode_slots:
            self._landed(placement)
        self.start_next(node)

    # The stream of KV to the decode node.

    def stream_next(self, node: DecodeNode) -> None:
        """Give slots, in order, to those who want to send KV here, and let them send."""
        while node.up and node.wanting:
            placement = node.wanting[0]
            job = placement.job
            taken = self._take_slots(node, job.keys, job.prompt_tokens)
            if taken is None:
                return
            node.wanting.popleft()
            placement.decode_slots, placement.decode_prefix = taken
            held = min(placement.decode_prefix * self._block_tokens, job.prompt_tokens)
            placement.kv_bytes = (job.prompt_tokens - held) * self._token_bytes
            self._send(placement)

    def _send(self, placement: Placement) -> None:
        now_s = self._calendar.now_s
        placement.kv_started_s = now_s
        if not placement.kv_bytes:
            if placement.prefill_done:
                self._landed(placement)
            return
        cap = math.inf
        if not placement.prefill_done:
            left_s = placement.computed_s - now_s
            cap = placement.kv_bytes * self._streamed_ratio / left_s if left_s > 0 else math.inf
        placement.kv_flow = self._network.start(
            placement.prefill.name,
            placement.decode.name,
            float(placement.kv_bytes),
            cap_bytes_per_s=cap,
            on_done=self._landed,
            about=placement,
        )

    def _landed(self, placement: Placement) -> None:
        assert placement.prefill_done, "the last layer's KV came before it was computed"
        job, node = placement.job, placement.decode
        placement.kv_flow = None
        fresh = placement.decode_slots[placement.decode_prefix : len(job.keys)]
        node.memory.commit(fresh, job.keys, depth=placement.decode_prefix)
        now_s = self._calendar.now_s
        transfer_s = now_s - placement.kv_started_s
        self._tell(KvLanded(job.request, node.name, placement.kv_bytes, transfer_s))
        if placement.prefill.up:
            placement.prefill.memory.release(_taken(placement.prefill_slots))
        load_s = 0.0 if self._rules.load_stalls_decode else self._load_s(job)
        self._calendar.at(now_s + load_s, Rank.TRANSFER, self._loaded, placement)

    def _load_s(self, job: Job) -> float:
        return self._profile.load.seconds(job.prompt_tokens * self._token_bytes)

    # Decode.

    def _loaded(self, placement: Placement) -> None:
        node, job = placement.decode, placement.job
        if not placement.is_live() or not node.up:
            return
        sequence = Sequence(
            placement,
            prompt_tokens=job.prompt_tokens,
            step_count=job.output_tokens - 1,
            reserved_tokens=job.prompt_tokens + self._rules.output_limit_tokens,
        )
        node.batch.add(sequence)
        self._expect(node)

    def _expect(self, node: DecodeNode) -> None:
        """Have the batch's next change in the calendar."""
        due_s = node.batch.next_s(self._calendar.now_s)
        if due_s != node.due_s:
            node.due_s = due_s
            node.turn += 1
            if due_s is not None:
                self._calendar.at(due_s, Rank.COMPUTE, self._change, (node, node.turn))

    def _change(self, entry: tuple[DecodeNode, int]) -> None:
        node, turn = entry
        if turn != node.turn or not node.up:
            return
        node.due_s = None
        finished, joined = node.batch.advance(self._calendar.now_s)
        for sequence in finished:
            job = sequence.job.job
            job.decoded(node.batch, sequence)
            self.end(job, Ending.COMPLETED)
        for sequence in joined:
            placement = sequence.job
            node.memory.release(_taken(placement.decode_slots))
            self._tell(DecodeStarted(placement.job.request, node.name))
        if joined and self._rules.load_stalls_decode:
            self._stall(node, joined)
        self._expect(node)

    def _stall(self, node: DecodeNode, joined: list[Sequence[Placement]]) -> None:
        """Nobody's next step begins before the KV of those who have just joined is loaded."""
        load_s = sum(self._load_s(sequence.job.job) for sequence in joined)
        node.batch.stall(load_s)
        for sequence in joined:
            sequence.joined_s += load_s
            sequence.stalled_s += load_s


def _taken(slots: list[SlotIndex]) -> list[SlotIndex]:
    """The slots, which the list forgets: nothing is let go of twice."""
    taken = slots[:]
    slots.clear()
    return taken
