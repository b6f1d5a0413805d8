"""What shall be done: the imperative messages that the Conductor answers with."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from snowskin.terms.events import PlacedBlock
from snowskin.terms.ids import BlockKey, NodeId, RequestId


class PrefillCandidate(msgspec.Struct, frozen=True, gc=False):
    """One prefill node as Algorithm 1 saw it. Times in seconds."""

    node: NodeId
    local_blocks: int
    """Prefix that the node itself holds."""
    reused_blocks: int
    """Prefix that it would start from, after a fetch if that pays."""
    transfer_s: float
    queue_s: float
    prefill_s: float
    fetch_from: NodeId | None = None

    @property
    def ttft_s(self) -> float:
        """The predicted time to first token."""
        return self.transfer_s + self.queue_s + self.prefill_s


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """One decode node as the choice saw it, with this request counted in."""

    node: NodeId
    sequences: int
    context_tokens: int
    tbt_s: float


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Why a request went where it went, or was turned away.

    Candidates stand in node order; of a large fleet only the best are listed, and the chosen ones.
    """

    policy: str
    reason: str
    best_prefix_blocks: int
    prefill: tuple[PrefillCandidate, ...]
    decode: tuple[DecodeCandidate, ...]
    ttft_s: float
    tbt_s: float


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """A prefix to be read from a peer before prefill: ``blocks`` follow the local prefix."""

    source: NodeId
    blocks: tuple[PlacedBlock, ...]


class StartPrefill(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Place the request: queue it on ``prefill``, and let ``decode`` take its KV from there.

    A second one for the same request takes the place of the first, whose node was lost before any
    token was out: whatever the request still holds elsewhere is to be freed.
    """

    request: RequestId
    prefill: NodeId
    decode: NodeId
    fetch: Fetch | None
    decision: Decision


class RejectCause(StrEnum):
    """What a request was turned away for; few words, fit for counting."""

    TTFT = "ttft"
    TBT = "tbt"
    DECODE_FULL = "decode-full"
    PREFILL_FULL = "prefill-full"
    IN_FLIGHT = "in-flight"
    NO_NODE = "no-node"


class RejectRequest(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Turn the request away (HTTP 429).

    Under the baseline admission it may come right after PrefillFinished; then the request's nodes
    are to free what it holds.
    """

    request: RequestId
    cause: RejectCause
    reason: str
    retry_after_s: float
    decision: Decision


class FailRequest(msgspec.Struct, frozen=True, tag=True, gc=False):
    """End an admitted request with an error, and free what it holds on ``nodes``."""

    request: RequestId
    reason: str
    nodes: tuple[NodeId, ...]


class HoldRequest(msgspec.Struct, frozen=True, tag=True, gc=False):
    """No node can take the request now: it waits, and what it holds on any node is to be freed.

    A ``StartPrefill``, ``RejectRequest`` or ``FailRequest`` follows, within a bounded time.
    """

    request: RequestId
    decision: Decision
    """Without candidates; its reason says what is waited for."""


class GrantLease(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Keep a prefix on ``node`` until ``duration_s`` from now: a peer is about to read its end."""

    node: NodeId
    request: RequestId
    keys: tuple[BlockKey, ...]
    duration_s: float


class EndLease(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The lease of this request's fetch on ``node`` is over early."""

    node: NodeId
    request: RequestId


Command = StartPrefill | RejectRequest | FailRequest | HoldRequest | GrantLease | EndLease
