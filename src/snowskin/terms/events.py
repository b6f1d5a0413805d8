"""What has happened: the past-tense messages that the Conductor is told.

The live cluster and the simulator send the very same events. None carries a clock: the time is
the ``now_s`` argument of ``handle``. None carries a true output length before the request ends.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from snowskin.terms.ids import BlockKey, NodeId, RequestId, Role, SlotIndex, Tier


class PlacedBlock(msgspec.Struct, frozen=True, gc=False):
    """A committed block and where it lies on its node.

    ``generation`` counts the uses of a slot; a reader that finds another one there has a miss.
    """

    key: BlockKey
    slot: SlotIndex
    generation: int


class NodeJoined(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A node is up and ready for work."""

    node: NodeId
    role: Role
    block_count: int
    """Blocks that its DRAM segment holds."""
    sequence_limit: int
    """Most sequences that it runs (prefill: queues) at once."""
    device_tokens: int
    """Tokens of KV that fit its device memory (the whole running batch)."""


class NodeLost(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A node died or left; all that it held is gone."""

    node: NodeId


class RequestArrived(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A client's request, hashed and ready to be placed."""

    request: RequestId
    prompt_tokens: int
    keys: tuple[BlockKey, ...]
    output_limit_tokens: int


class PrefillStarted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The prefill node took the request from its queue; ``reused_tokens`` it really found."""

    request: RequestId
    node: NodeId
    reused_tokens: int


class PrefillFinished(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The first token is out (TTFT ends).

    ``prefill_s`` is the engine's time that it cost since PrefillStarted; of passes that several
    prompts share, its share by tokens. So the sum over a queue is the time that the queue takes.
    """

    request: RequestId
    node: NodeId
    prefill_s: float


class KvLanded(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The decode node holds the whole prompt's KV; the prefill node may let go of it."""

    request: RequestId
    node: NodeId
    kv_bytes: int
    transfer_s: float


class DecodeStarted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The request joined the running batch of its decode node."""

    request: RequestId
    node: NodeId


class Outcome(StrEnum):
    """How a request left the system."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RequestFinished(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A request left the system and holds nothing any more."""

    request: RequestId
    outcome: Outcome
    output_tokens: int


class BlocksCommitted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A node holds these blocks whole and readable: column by column, they come by the dozen."""

    node: NodeId
    tier: Tier
    keys: tuple[BlockKey, ...]
    slots: tuple[SlotIndex, ...]
    generations: tuple[int, ...]

    @property
    def blocks(self) -> tuple[PlacedBlock, ...]:
        """The same, block by block."""
        return tuple(map(PlacedBlock, self.keys, self.slots, self.generations))


class BlocksEvicted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A node no longer holds these blocks on this tier."""

    node: NodeId
    tier: Tier
    keys: tuple[BlockKey, ...]


class FetchFinished(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A prefill node's fetch of a prefix from a peer ended; fewer blocks than asked is a miss."""

    request: RequestId
    node: NodeId
    source: NodeId
    fetched_blocks: int
    kv_bytes: int
    transfer_s: float


class IncomingTraffic(msgspec.Struct, frozen=True, gc=False):
    """What a node sees of its link from a peer, over all paths between them."""

    peer: NodeId
    bytes_in_flight: int
    """Asked for and not received yet."""
    bytes_per_s: float | None = None
    """As measured of late; None if it was not."""
    latency_s: float | None = None


class NodeReported(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A node's regular word of its load."""

    node: NodeId
    running_sequences: int
    waiting_sequences: int
    context_tokens: int
    """Tokens of KV over the running sequences."""
    step_s: float | None = None
    """Median time of a recent decode step or prefill pass; None if there was none."""
    incoming: tuple[IncomingTraffic, ...] = ()
    """One entry for each peer that it is reading from, or has read from of late."""


class TimePassed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The moment that ``next_wakeup_s`` named has come, and nothing else happened."""


Event = (
    NodeJoined
    | NodeLost
    | RequestArrived
    | PrefillStarted
    | PrefillFinished
    | KvLanded
    | DecodeStarted
    | RequestFinished
    | BlocksCommitted
    | BlocksEvicted
    | FetchFinished
    | NodeReported
    | TimePassed
)
