"""What the cluster shows to its front: what it serves, tokens as they come, its state, its reasons.

The cluster makes these and the API renders them; neither imports the other's internals.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from snowskin.terms.commands import Decision
from snowskin.terms.ids import NodeId, RequestId, Role, StartId
from snowskin.terms.keys import KeySpace
from snowskin.terms.request import SampledToken, Sampling

FinishReason = Literal["stop", "length"]
"""Why a generation ended well: a stop token, or its output limit."""


class ServingInfo(msgspec.Struct, frozen=True):
    """What is served; fixed from start to end."""

    model: str
    """The name that clients ask for."""
    model_dir: str
    """Folder with ``config.json``, the weights and ``tokenizer.json``."""
    key_space: KeySpace
    """Of block keys, with an empty tenant salt."""
    max_context_tokens: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    stop_tokens: tuple[int, ...]
    """The model's own end-of-text tokens."""
    sampling: Sampling = Sampling()
    """What the model's makers recommend; it holds for what a request leaves out."""


class TokensArrived(msgspec.Struct, frozen=True):
    """The next tokens of one generation.

    A stop token that ended the generation is the last of ``tokens`` (it is counted in the usage,
    but has no text). The last message, and only that, has a ``finish_reason``.
    """

    tokens: tuple[SampledToken, ...]
    cached_tokens: int
    """Prompt tokens whose KV the prefill node reused; the same in each message."""
    finish_reason: FinishReason | None = None


class NodeState(StrEnum):
    """Where a node is in its life."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


class NodeStatus(msgspec.Struct, frozen=True):
    """One node now, and its running totals since the cluster started (over restarts)."""

    node: NodeId
    role: Role
    state: NodeState
    pid: int | None
    """Of the node's process; None while there is none."""
    restarts: int = 0
    running_sequences: int = 0
    waiting_sequences: int = 0
    context_tokens: int = 0
    """Tokens of KV over the running sequences."""
    block_count: int = 0
    """Blocks that the node's segment holds."""
    used_blocks: int = 0
    """Blocks of the segment that are reserved or committed."""
    committed_blocks: int = 0
    """Total of blocks committed."""
    evicted_blocks: int = 0
    """Total of blocks evicted."""


class TransferKind(StrEnum):
    """Why KV travelled between nodes."""

    FETCH = "fetch"
    """A prefix, from a peer to a prefill node."""
    STREAM = "stream"
    """A prompt's KV, from its prefill node to its decode node."""


class TransferTotals(msgspec.Struct, frozen=True):
    """All transfers of one kind since the cluster started."""

    kind: TransferKind
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    """Sum over the transfers."""
    failures: int = 0
    """Transfers that brought fewer blocks than asked, or none."""


class ClusterStatus(msgspec.Struct, frozen=True):
    """One snapshot of the whole cluster."""

    ready: bool
    """At least one prefill and one decode node take work."""
    uptime_s: float
    requests_in_flight: int
    nodes: tuple[NodeStatus, ...]
    transfers: tuple[TransferTotals, ...] = ()
    rejections: dict[str, int] = msgspec.field(default_factory=dict)
    """Rejected requests by the Conductor's reason (a small fixed set of words)."""
    hot_block_replicas: int = 0
    """Replicas in the directory beyond the first of each block."""
    directory_blocks: int = 0
    """Distinct blocks in the directory."""


class ServedRequest(msgspec.Struct, frozen=True):
    """A request that got an answer, as a trace has it: lengths and sharing, no text."""

    number: int
    """Counts from 1, in the order in which requests ended."""
    arrival_s: float
    """Since the cluster started."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Names of the prompt's full blocks; equal names mean an equal prefix up to there."""


class ServedPage(msgspec.Struct, frozen=True):
    """Some of the requests that a cluster remembers, in the order of their numbers."""

    start: StartId
    """After another start numbers begin anew, and blocks have other names."""
    model: str
    block_tokens: int
    requests: tuple[ServedRequest, ...]
    """Empty where no later one has ended; numbers that are missing were forgotten."""


class RequestState(StrEnum):
    """Where a request is in its journey."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"


class Explanation(msgspec.Struct, frozen=True):
    """Why a request went where it went, and what it really cost. None: not known (yet)."""

    request: RequestId
    state: RequestState
    prompt_tokens: int
    block_tokens: int
    decision: Decision
    """With the predicted times: ``decision.ttft_s``, ``decision.tbt_s``."""
    output_tokens: int = 0
    prefill: NodeId | None = None
    decode: NodeId | None = None
    cached_tokens: int | None = None
    fetched_from: NodeId | None = None
    fetched_blocks: int | None = None
    fetch_s: float | None = None
    queue_s: float | None = None
    """Arrival to the start of prefill."""
    prefill_s: float | None = None
    ttft_s: float | None = None
    """Arrival to the first token, as it really was."""
    kv_bytes: int | None = None
    kv_transfer_s: float | None = None
    """Of the prompt's KV to the decode node."""
    tbt_s: float | None = None
    """Mean of the longest 10 % of the intervals between tokens."""
    failure: str | None = None
