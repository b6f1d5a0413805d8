"""The settings of a simulated cluster: one frozen object, validated once."""

from __future__ import annotations

import msgspec

from snowskin.conductor.config import ConductorConfig
from snowskin.cost.profile import Profile
from snowskin.cost.shapes import SHAPES
from snowskin.store.eviction import make_policy
from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import NodeId

DEVICE_BYTES = 8 * 80e9 * 0.9
"""Device memory of the papers' node (8 × 80 GB), of which serving engines use nine tenths."""
WEIGHT_BYTES = 70.6e9 * 2
"""Weights of LLaMA3-70B in two bytes each."""
DRAM_BYTES = 1e12
"""DRAM lent to the pool: 1 TB a node, which is the papers' 3 M tokens."""


class NodeDies(msgspec.Struct, frozen=True):
    """A node dies at a time with all that it holds, and is back ``restart_s`` later, empty."""

    node: NodeId
    at_s: float
    restart_s: float


class LinkSlows(msgspec.Struct, frozen=True):
    """A node's network runs at ``factor`` of its rate from a time on, for ``duration_s``."""

    node: NodeId
    at_s: float
    duration_s: float
    factor: float


Fault = NodeDies | LinkSlows


class WorldConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A disaggregated cluster and its load limits. Sizes are per node.

    Raises:
        InvalidInput: on construction, with the option and the value.
    """

    profile: Profile
    prefill_nodes: int = 8
    decode_nodes: int = 8
    policy: str = "kvcache-centric"
    admission: str = "none"
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    balancing_threshold: float | None = None
    """None: the Conductor's own default."""
    max_in_flight: int = 1_000_000
    """The simulator's default lets admission alone decide."""
    blocks: int | None = None
    """Blocks of DRAM; None: as many as ``dram_bytes`` holds."""
    dram_bytes: float = DRAM_BYTES
    eviction: str = "lru"
    sequence_limit: int = 256
    """Most sequences in a decode node's batch (vLLM's default)."""
    queue_limit: int = 1_000_000
    """Most requests at a prefill node, waiting or running; the default lets admission decide."""
    device_tokens: int | None = None
    """Tokens of KV in a decode node's device memory; None: what the papers' node has left."""
    output_limit_tokens: int | None = None
    """What every request may generate at most; None: the longest answer of the trace. One value
    for all, so that nobody can tell one request's length from it."""
    overlap: bool = True
    """Whether KV streams to the decode node layer by layer while prefill computes."""
    first_token_from_decode: bool = False
    """Which node sends the first token: the prefill node as soon as it has it, or the decode node
    once the KV is on its device. The second puts transfer and load into TTFT, not into TBT."""
    load_stalls_decode: bool = False
    """Whether the running batch waits while a joining sequence's KV is loaded. The papers say that
    it does not; one can try what would follow if it did."""
    report_s: float = 10.0
    """Time between a decode node's words of its load."""
    seed: int = 0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prefill_nodes", "decode_nodes", "sequence_limit", "queue_limit"):
            check_count(name, getattr(self, name))
        for name in ("blocks", "device_tokens", "output_limit_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        if not self.report_s > 0:
            raise InvalidInput(
                f"report_s must be greater than 0, not {self.report_s}", parameter="report_s"
            )
        make_policy(self.eviction)
        self.conductor(1)
        nodes = (*self.prefill_names(), *self.decode_names())
        for fault in self.faults:
            if fault.node not in nodes:
                raise InvalidInput(
                    f"there is no node {fault.node!r} to fail; there are prefill-0 to prefill-"
                    f"{self.prefill_nodes - 1} and decode-0 to decode-{self.decode_nodes - 1}",
                    parameter="fault",
                )
            for name, value in msgspec.structs.asdict(fault).items():
                if name != "node" and not value >= 0:
                    raise InvalidInput(
                        f"{name} of a fault of {fault.node} must be at least 0, not {value:g}",
                        parameter="fault",
                    )

    def conductor(self, block_tokens: int) -> ConductorConfig:
        """The Conductor's part of the settings."""
        config = ConductorConfig(
            policy=self.policy,
            admission=self.admission,
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            block_tokens=block_tokens,
            max_in_flight=self.max_in_flight,
        )
        if self.balancing_threshold is None:
            return config
        return msgspec.structs.replace(config, kvcache_balancing_threshold=self.balancing_threshold)

    def prefill_names(self) -> tuple[NodeId, ...]:
        """Names of the prefill nodes."""
        return tuple(NodeId(f"prefill-{index}") for index in range(self.prefill_nodes))

    def decode_names(self) -> tuple[NodeId, ...]:
        """Names of the decode nodes."""
        return tuple(NodeId(f"decode-{index}") for index in range(self.decode_nodes))

    def block_count(self, block_tokens: int) -> int:
        """Blocks that one node's DRAM holds."""
        if self.blocks is not None:
            return self.blocks
        return max(1, int(self.dram_bytes // self.profile.kv_bytes(block_tokens)))

    def device_token_count(self) -> int:
        """Tokens of KV that one decode node's device memory holds."""
        if self.device_tokens is not None:
            return self.device_tokens
        return node_device_tokens(self.profile)

    def layers(self) -> int:
        """Layers of the model, for layer-wise streaming; 80 where its shape has no name."""
        shape = SHAPES.get(self.profile.model)
        return shape.layers if shape is not None else 80


def check_count(name: str, value: object) -> None:
    """See to it that a setting counts something.

    Raises:
        InvalidInput: it is no whole number, or below 1.
    """
    if not isinstance(value, int):
        raise InvalidInput(f"{name} must be a whole number (int), not {value!r}", parameter=name)
    if value < 1:
        raise InvalidInput(f"{name} must be at least 1, not {value}", parameter=name)


def node_device_tokens(profile: Profile) -> int:
    """Tokens of KV that fit the device memory of the papers' node beside the weights."""
    return int((DEVICE_BYTES - WEIGHT_BYTES) // profile.kv_bytes_per_token)
