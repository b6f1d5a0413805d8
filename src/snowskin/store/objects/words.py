"""The words of the stand-alone store's control plane, as they go over the wire (msgpack).

Clients ask the master, one answer for each question. Nodes have one connection to the master: they
report, the master commands. Bytes of objects never come this way, see ``wire``.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec

from snowskin.terms.ids import NodeId
from snowskin.transfer.topology import Address

KEY_LIMIT_BYTES = 1000
"""Longest key in UTF-8; the SSD tier puts 24 bytes before it."""
BATCH_LIMIT = 8192
"""Most keys or objects in one message."""
DIGEST_BYTES = 16
REPLICAS_LIMIT = 1024

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=KEY_LIMIT_BYTES)]
Size = Annotated[int, msgspec.Meta(ge=0)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
"""xxh3-128 of an object's content."""
Replicas = Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_LIMIT)]


class Pin(IntEnum):
    """How firmly an object stays."""

    NONE = 0
    SOFT = 1
    """Evicted only when nothing unpinned is left to evict."""
    HARD = 2
    """Never evicted."""


class NodeAddress(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """How a node is reached. ``session`` is new with each process of the node."""

    name: str
    session: str
    host: str
    port: int
    unix: str
    """Name of its abstract unix socket."""
    host_id: str
    """Equal where the unix socket can be reached, see ``transfer.peer.local_host_id``."""
    addresses: tuple[Address, ...] = ()
    """All addresses where it listens, if they are more than ``host`` and ``port``."""

    @property
    def node(self) -> NodeId:
        """Its name, for paths."""
        return NodeId(self.name)

    @property
    def every_address(self) -> tuple[Address, ...]:
        """Where it listens."""
        return self.addresses or (Address(self.host, self.port),)


class ObjectFact(msgspec.Struct, frozen=True, array_like=True):
    """An object that a node holds, whole and readable."""

    key: Key
    size_bytes: Size
    digest: Digest
    pin: Pin = Pin.NONE
    tier: str = "dram"


class NodeUsage(msgspec.Struct, frozen=True):
    """What a node holds and has done, as it reports every second."""

    dram_bytes: int = 0
    dram_used_bytes: int = 0
    dram_free_bytes: int = 0
    largest_free_bytes: int = 0
    fragmentation_ratio: float = 0.0
    """1 - largest free extent / all free bytes."""
    ssd_bytes: int = 0
    ssd_used_bytes: int = 0
    objects: int = 0
    """In DRAM."""
    ssd_objects: int = 0
    """On SSD; those that were promoted are in DRAM as well."""
    ssd_corrupt_total: int = 0
    """Values on SSD that were not what had been written: found by reading, and dropped."""
    ssd_error_total: int = 0
    """Times that the disk was full or failed."""
    leases: int = 0
    evicted_total: int = 0
    """Objects dropped for want of room, on whichever tier."""
    demoted_total: int = 0
    """Objects moved from DRAM to SSD."""
    promoted_total: int = 0
    """Objects copied from SSD to DRAM."""
    read_bytes: int = 0
    written_bytes: int = 0
    checksum_failures: int = 0
    refused_writes: int = 0


# Questions of clients.


class Exists(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Is there a readable replica? → Answer."""

    key: str


class ExistsMany(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The same for many keys. → Flags."""

    keys: list[str]


class Lookup(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Where are these? → Found, one entry for each key."""

    keys: tuple[str, ...]


class PutStart(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """May I write this? → PutGranted, PutExists, PutBusy or Refusal."""

    key: Key
    size_bytes: Size
    digest: Digest
    replicas: Replicas = 1
    node: str | None = None
    """Write there, if given."""
    avoid: tuple[str, ...] = ()
    """Nodes that have refused or failed a moment ago."""


class PutEnd(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The writer is done (or has given up): end the reservation. → Done."""

    key: str


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Drop every replica. → Done, when no node serves it any more."""

    key: str


class SetPin(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Pin or unpin. → Done."""

    key: str
    pin: Pin


class ChangeReplica(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """More or fewer replicas, or one on this node. → TransferStatus."""

    key: str
    replicas: Replicas | None
    node: str | None


class AskTransfer(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """How far is it? → TransferStatus."""

    transfer: str


class ListKeys(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Keys with this prefix, in order, those after ``after``. → Keys."""

    prefix: str
    after: str | None
    limit: int


class AskNodes(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Who is up? → Nodes."""


class AskStat(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """→ StoreStat."""


class AskPrefix(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """How many leading keys does each node hold? → Prefixes."""

    keys: list[str]


# What nodes tell the master.


class Join(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A node is here and will now report what it holds. → Done or Refusal."""

    address: NodeAddress
    dram_bytes: int
    ssd_bytes: int


class Report(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """What was committed and dropped since, in this order. → Accepted, with the same number."""

    number: int
    committed: tuple[ObjectFact, ...] = ()
    dropped: tuple[str, ...] = ()
    """Keys that the node holds no more, on no tier; told before ``committed``."""


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """All that the node holds has been reported."""


class Usage(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Every second."""

    usage: NodeUsage


class CommandEnded(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """A command was carried out, or not."""

    number: int
    failure: str | None = None


Question = (
    Exists
    | ExistsMany
    | Lookup
    | PutStart
    | PutEnd
    | Remove
    | SetPin
    | ChangeReplica
    | AskTransfer
    | ListKeys
    | AskNodes
    | AskStat
    | Join
    | Report
    | Joined
    | Usage
    | CommandEnded
    | AskPrefix
)

# The master's answers.


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Yes or no."""

    value: bool


class Flags(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """One byte for each key, 1 or 0."""

    values: bytes


class Located(msgspec.Struct, frozen=True, array_like=True):
    """An object and the names of the nodes that hold it."""

    size_bytes: int
    digest: bytes
    nodes: tuple[str, ...]
    tiers: tuple[str, ...] = ()
    """For each node, "dram" or "ssd"."""
    pin: Pin = Pin.NONE


class Found(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """None for a key that is missing."""

    objects: tuple[Located | None, ...]


class PutGranted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Write to these nodes, then end the put."""

    nodes: tuple[str, ...]


class PutExists(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The same content is there already."""

    nodes: tuple[str, ...]


class PutBusy(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Someone else writes or removes this key just now: ask again in a moment."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """It is done."""


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """It is not done. ``error`` names one of ``errors.ERRORS``."""

    error: str
    message: str


class Warming(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The master has just started and still hears what its nodes hold: ask again in a moment."""


class TransferState(StrEnum):
    """How far a change of replicas has come."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class TransferStatus(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A change of replicas. Counts are best effort: ``replicas`` is what there is now."""

    transfer: str
    key: str
    state: TransferState
    replicas: int
    wanted: int
    failure: str | None = None
    """Why fewer (or more) replicas came about than wanted."""


class Keys(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """A page of keys; ``more`` follow."""

    keys: tuple[str, ...]
    more: bool


class Nodes(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """All nodes that are up."""

    nodes: tuple[NodeAddress, ...]


class NodeStat(msgspec.Struct, frozen=True):
    """One node, as the master knows it."""

    name: str
    host: str
    port: int
    objects: int
    used_bytes: int
    """Sum of the sizes of its objects, over its tiers."""
    usage: NodeUsage


class StoreStat(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The whole store."""

    objects: int
    replicas: int
    object_bytes: int
    """Each object once."""
    reservations: int
    transfers_running: int
    reclaimed_total: int
    """Reservations whose writer died or took too long."""
    conflicts_total: int
    uptime_s: float
    nodes: tuple[NodeStat, ...]


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A report is in the catalog. The node must drop what was rejected: the key has other
    content elsewhere."""

    number: int
    rejected: tuple[str, ...] = ()


# The master's commands to nodes; each is answered by CommandEnded.


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Serve this object no more."""

    number: int
    key: str


class Copy(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Hold a replica too: read it from one of these nodes."""

    number: int
    key: str
    size_bytes: int
    digest: bytes
    pin: Pin
    sources: tuple[NodeAddress, ...]


class PinHere(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Pin or unpin your replica."""

    number: int
    key: str
    pin: Pin


class Prefixes(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Nodes that hold at least the first key, and how many leading keys they hold."""

    counts: dict[str, int]


Reply = (
    Answer
    | Flags
    | Found
    | PutGranted
    | PutExists
    | PutBusy
    | Done
    | Refusal
    | Warming
    | TransferStatus
    | Keys
    | Nodes
    | StoreStat
    | Accepted
    | Drop
    | Copy
    | PinHere
    | Prefixes
)
