"""The control messages between the front and its nodes. All typed; msgpack on the wire."""

from __future__ import annotations

import msgspec

from snowskin.terms.events import (
    BlocksCommitted,
    BlocksEvicted,
    FetchFinished,
    NodeReported,
    PlacedBlock,
)
from snowskin.terms.ids import BlockKey, NodeId, RequestId, Role
from snowskin.terms.request import GenerationRequest, SampledToken
from snowskin.terms.serving import FinishReason
from snowskin.transfer.messenger import Peer

# --- front → node --------------------------------------------------------------------------


class FetchOrder(msgspec.Struct, frozen=True):
    """Read these blocks from a peer before prefill; they follow the node's own prefix."""

    peer: Peer
    blocks: tuple[PlacedBlock, ...]


class QueuePrefill(msgspec.Struct, frozen=True, tag=True):
    """Prefill this prompt and sample its first token."""

    job: GenerationRequest
    fetch: FetchOrder | None


class PullKv(msgspec.Struct, frozen=True, tag=True):
    """Take the prompt's KV from its prefill node, block by block, while that still computes."""

    job: GenerationRequest
    peer: Peer
    blocks: tuple[PlacedBlock, ...]


class StartDecode(msgspec.Struct, frozen=True, tag=True):
    """The first token is out and the KV is here: join the running batch."""

    request: RequestId
    first: SampledToken


class ReleasePrefill(msgspec.Struct, frozen=True, tag=True):
    """The decode node has the KV: let go of the request's blocks."""

    request: RequestId


class CancelJob(msgspec.Struct, frozen=True, tag=True):
    """Drop the request, wherever it stands, and free all that it holds."""

    request: RequestId


class LeaseBlocks(msgspec.Struct, frozen=True, tag=True):
    """Keep this prefix for so long: a peer is about to read its end."""

    owner: RequestId
    keys: tuple[BlockKey, ...]
    duration_s: float


class DropLease(msgspec.Struct, frozen=True, tag=True):
    """The peer has read; the lease is over."""

    owner: RequestId


ToNode = QueuePrefill | PullKv | StartDecode | ReleasePrefill | CancelJob | LeaseBlocks | DropLease

# --- node → front --------------------------------------------------------------------------


class NodeReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, the Messenger answers: the node takes work."""

    node: NodeId
    role: Role
    peer: Peer
    block_count: int
    sequence_limit: int
    device_tokens: int


class PrefillAnnounced(msgspec.Struct, frozen=True, tag=True):
    """Prefill has begun; the prompt's KV appears in these blocks, layer by layer."""

    request: RequestId
    reused_tokens: int
    blocks: tuple[PlacedBlock, ...]


class FirstTokenOut(msgspec.Struct, frozen=True, tag=True):
    """The prompt is computed. ``finish_reason`` is set where the first token is also the last."""

    request: RequestId
    first: SampledToken
    prefill_s: float
    work_s: float
    finish_reason: FinishReason | None


class KvArrived(msgspec.Struct, frozen=True, tag=True):
    """The decode node holds the whole prompt's KV."""

    request: RequestId
    kv_bytes: int
    transfer_s: float


class BatchJoined(msgspec.Struct, frozen=True, tag=True):
    """The request is in the running batch."""

    request: RequestId


class TokenOut(msgspec.Struct, frozen=True):
    """One more token of one request."""

    request: RequestId
    token: SampledToken
    finish_reason: FinishReason | None


class TokensOut(msgspec.Struct, frozen=True, tag=True):
    """What one decode step made."""

    tokens: tuple[TokenOut, ...]


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """The node could not finish its part; it holds nothing of the request any more."""

    request: RequestId
    reason: str
    peer_failed: bool = False
    """It is the other node's doing: its KV could not be had."""


class StoreChanged(msgspec.Struct, frozen=True, tag=True):
    """Blocks came into the node's segment or left it, in true order."""

    changes: tuple[BlocksCommitted | BlocksEvicted, ...]


class FetchDone(msgspec.Struct, frozen=True, tag=True):
    """A fetch of a prefix has ended."""

    fetch: FetchFinished
    asked_blocks: int


class NodeCounters(msgspec.Struct, frozen=True):
    """What a node has counted since it started."""

    blocks_total: int = 0
    """That the segment has room for."""
    blocks_used: int = 0
    """Reserved or committed now."""
    committed_blocks: int = 0
    evicted_blocks: int = 0
    checksum_failures: int = 0
    failed_pulls: int = 0
    skipped_writebacks: int = 0
    """Blocks of generated KV that found no room in the pool."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The node lives; its load and its counters."""

    report: NodeReported
    counters: NodeCounters


FromNode = (
    NodeReady
    | PrefillAnnounced
    | FirstTokenOut
    | KvArrived
    | BatchJoined
    | TokensOut
    | JobFailed
    | StoreChanged
    | FetchDone
    | Heartbeat
)

AboutRequest = (
    PrefillAnnounced | FirstTokenOut | KvArrived | BatchJoined | TokensOut | JobFailed | FetchDone
)
"""The words that concern requests."""
