"""What a user may set of a cluster, validated once, and what each node is told at its start."""

from __future__ import annotations

import ipaddress
import os

import msgspec

from snowskin.conductor.admission import ADMISSIONS
from snowskin.conductor.config import ConductorConfig
from snowskin.conductor.prefill_choice import POLICIES
from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import NodeId, Role
from snowskin.terms.keys import KeySpace
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.slicing import SLICE_BYTES

LOCAL_HOSTS = ("localhost",)
YIELDING_THREADS = {"OMP_WAIT_POLICY": "passive"}
"""Environment under which OpenMP threads sleep while they wait for each other.

By default they spin; nodes that share cores then keep each other from the very work that is
waited for (measured: a prefill pass of 512 tokens took 4 s instead of 1.2 s)."""
NODE_TRANSPORTS = ("auto", "shm", "tcp", "nixl")
MAX_NODES = 256
"""Nodes of one role in one cluster; the front keeps one process and one connection for each."""


def is_loopback(host: str) -> bool:
    """True where only this machine can reach ``host``."""
    if host in LOCAL_HOSTS:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that ``snowskin serve`` can be told. Times in seconds, sizes in bytes."""

    model: str = "smollm2"
    dtype: str = "auto"
    device: str = "auto"
    prefill_nodes: int = 1
    decode_nodes: int = 1
    policy: str = "kvcache-centric"
    admission: str = "none"
    """Our choice: without being asked to, a server queues and refuses nothing but what it cannot
    queue, as users of vLLM expect."""
    ttft_slo_s: float = 30.0
    """FAST '25 §5.1."""
    tbt_slo_s: float = 0.3
    """The loosest of the three in FAST '25 §5.2."""
    host: str = "127.0.0.1"
    port: int = 8000
    node_host: str = "127.0.0.1"
    """Where the control wire and the Messengers listen."""
    api_key: str | None = None
    cluster_key: str | None = None
    transport: str = "auto"
    slice_bytes: int = SLICE_BYTES
    """The least piece of a TCP transfer that is assigned to a path, and tried again on another."""
    topology: str | None = None
    """A JSON file that says which NICs serve which memory; None: all on ``node_host``."""
    block_tokens: int = 32
    """Our choice: small enough that a chat turn fills some, large enough for one copy to pay."""
    dram_bytes: int = 1 << 30
    """Of each node's segment."""
    device_tokens: int = 1 << 17
    """KV that a node's device memory holds, over its whole batch."""
    chunk_tokens: int = 512
    """Prompt tokens of one prefill pass."""
    sequence_limit: int = 64
    """Sequences that a decode node runs, and that a prefill node queues."""
    max_in_flight: int = 512
    """Requests in the whole system; further ones are answered 429."""
    threads: int = 0
    """CPU threads of each node's engine; 0: all cores."""
    journal: str | None = None
    """A file that takes every event and command of the Conductor; it grows without bound."""
    seed: int = 0
    """Of the Conductor's own random choices."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the value and the remedy."""
        _in_range("--prefill", self.prefill_nodes, 1, MAX_NODES)
        _in_range("--decode", self.decode_nodes, 1, MAX_NODES)
        _in_range("--port", self.port, 0, 65535)
        _in_range("--block-tokens", self.block_tokens, 1, 4096)
        _in_range("--chunk-tokens", self.chunk_tokens, self.block_tokens, 1 << 20)
        _in_range("--sequences", self.sequence_limit, 1, 4096)
        _in_range("--max-in-flight", self.max_in_flight, 1, 1_000_000)
        _in_range("--device-tokens", self.device_tokens, self.block_tokens, 1 << 30)
        _in_range("--threads", self.threads, 0, 1024)
        TransferSettings(slice_bytes=self.slice_bytes)
        _positive("--ttft-slo", self.ttft_slo_s)
        _positive("--tbt-slo", self.tbt_slo_s)
        _one_of("--policy", self.policy, tuple(POLICIES))
        _one_of("--admission", self.admission, tuple(ADMISSIONS))
        _one_of("--transport", self.transport, NODE_TRANSPORTS)
        for option, host in (("--host", self.host), ("--node-host", self.node_host)):
            self.demand_keys(option, host)

    def demand_keys(self, option: str, host: str) -> None:
        """Refuse an address that other machines can reach, unless both keys are given."""
        if is_loopback(host):
            return
        if not self.api_key or not self.cluster_key:
            raise InvalidInput(
                f"{option} {host} can be reached from other machines: give --api-key and "
                "--cluster-key too (or SNOWSKIN_API_KEY and SNOWSKIN_CLUSTER_KEY in the "
                "environment), or stay on 127.0.0.1",
                parameter=option,
            )

    @property
    def conductor(self) -> ConductorConfig:
        """What of this concerns the Conductor."""
        return ConductorConfig(
            policy=self.policy,
            admission=self.admission,
            block_tokens=self.block_tokens,
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            max_in_flight=self.max_in_flight,
        )

    @property
    def engine_threads(self) -> int:
        """CPU threads of each node's engine."""
        return self.threads or os.cpu_count() or 1


def _in_range(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidInput(f"{option} {value}: give {least} to {most}", parameter=option)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidInput(f"{option} {value}: give {', '.join(known)}", parameter=option)


def _positive(option: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise InvalidInput(f"{option} {value}: give seconds, more than 0", parameter=option)


class NodeConfig(msgspec.Struct, frozen=True):
    """All that one node process needs; it reaches the process through a pipe, never by argv."""

    node: NodeId
    identity: str
    """Names this incarnation of the node on the control wire."""
    role: Role
    front_address: str
    cluster_key: bytes
    host: str
    model_dir: str
    dtype: str
    device: str
    key_space: KeySpace
    """With an empty tenant salt; nodes extend keys, which needs no salt."""
    transport: str
    slice_bytes: int
    topology: str | None
    dram_bytes: int
    device_tokens: int
    chunk_tokens: int
    sequence_limit: int
    threads: int
