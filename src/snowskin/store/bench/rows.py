"""What ``snowskin bench store`` is asked, and what it answers."""

from __future__ import annotations

import msgspec

from snowskin.store.bench.lanes import Lane, Measured, measure
from snowskin.terms.errors import InvalidInput

KEYS_LIMIT = 4096
BATCH = 16
BATCH_BYTES = 64 << 20
"""Objects or blocks of one call: so many, as long as they have no more bytes."""
DEFAULT_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)

TRANSPORTS = ("tcp", "shm", "nixl", "ssd")
OBJECT_OPS = ("get_into", "get", "get_many", "put_from")
BLOCK_OPS = ("pull", "pull_many", "pull_busy", "pull_inside")
SSD_OPS = ("read", "write")
MEMORY_OPS = (*OBJECT_OPS, *BLOCK_OPS)
OPS = (*MEMORY_OPS, *SSD_OPS)
_MOVED = {
    "tcp": MEMORY_OPS,
    "shm": (*OBJECT_OPS, "pull", "pull_many"),
    "nixl": ("pull", "pull_many", "pull_busy"),
    "ssd": SSD_OPS,
}
"""What goes over each transport. The object store reads over TCP and mapped memory only; of pulls
over mapped memory no process but the reader's own knows, so that none could be busy."""


def check_counts(**counts: int) -> None:
    """See to it that there is something to measure.

    Raises:
        InvalidInput: one of these options is below 1.
    """
    for name, count in counts.items():
        if count < 1:
            raise InvalidInput(f"--{name} must be at least 1, not {count}", parameter=f"--{name}")


class StoreBenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Args:
        cycle_bytes: reads go round objects or blocks of so many bytes together (at most
            ``KEYS_LIMIT``).
        peer_python: an interpreter in whose environment ``mooncake`` can be imported.
        ssd: a directory on the disk that "ssd" is measured on.

    Raises:
        InvalidInput: no such transport or operation, or no operation that goes over a transport,
            or "ssd" without a directory, or nothing to do.
    """

    sizes: tuple[int, ...] = DEFAULT_SIZES
    transports: tuple[str, ...] = ("tcp", "shm")
    ops: tuple[str, ...] = OPS
    clients: tuple[int, ...] = (1, 8)
    cycle_bytes: int = 256 << 20
    rounds: int = 4
    round_s: float = 0.3
    peer_python: str | None = None
    ssd: str | None = None

    def __post_init__(self) -> None:
        check_counts(size=min(self.sizes), clients=min(self.clients), rounds=self.rounds)
        for name, known in (("transports", TRANSPORTS), ("ops", OPS)):
            for value in getattr(self, name):
                if value not in known:
                    raise InvalidInput(f"{value!r} is not among {name}: {', '.join(known)}")
        for transport in self.transports:
            if not self.wants_over(transport, OPS):
                raise InvalidInput(
                    f"nothing of {', '.join(self.ops)} goes over {transport}; "
                    f"choose from {', '.join(_MOVED[transport])}",
                    parameter="--op",
                )
        if "ssd" in self.transports and self.ssd is None:
            raise InvalidInput(
                "the SSD tier is measured where you say: give --ssd DIRECTORY", parameter="--ssd"
            )

    def wants(self, transport: str, op: str) -> bool:
        """Whether there is such a row, and it was asked for."""
        return transport in self.transports and op in self.ops and op in _MOVED[transport]

    def wants_over(self, transport: str, ops: tuple[str, ...]) -> bool:
        """Whether there is a row of any of these operations."""
        return any(self.wants(transport, op) for op in ops)

    def wants_any(self, ops: tuple[str, ...]) -> bool:
        """The same, over any transport."""
        return any(self.wants_over(transport, ops) for transport in self.transports)

    def count(self, size_bytes: int) -> int:
        """How many objects or blocks of this size are gone round."""
        return max(4, min(self.cycle_bytes // size_bytes, KEYS_LIMIT))


class StoreRow(msgspec.Struct, frozen=True):
    """One line. ``ratio`` is ours over the limit, in bytes a second.

    Attributes:
        transport: "tcp" (as if the node were remote), "shm" (same host), "nixl" (whatever UCX
            takes; on one host, cross-memory copies) or "ssd" (a node's tier, in this process).
        op: of the object store: get_into (caller's memory), get (a view, or fresh memory),
            get_many (up to ``BATCH`` objects at a call), put_from. Of the Transfer Engine, which
            moves blocks of KV between segments: pull (one block), pull_many (up to ``BATCH``);
            pull_busy (while the owner of the blocks computes and holds its interpreter's lock, as
            an engine does), pull_inside (the same, if threads of the owner served in place of its
            Messenger). A put of blocks is a pull by the other side. Of the SSD tier: read (into
            memory that begins on a page), write (many values, then a flush).
        p50_s, p99_s: time of a call.
        limit_bytes_per_s: tcp: a bare Python socket; shm and nixl: a copy and one unix round
            trip; pull_busy and pull_inside: the same pulls while the owner is idle; ssd: plain
            reads, or writes of 8 MiB and a sync, of the same disk.
    """

    transport: str
    op: str
    size_bytes: int
    clients: int
    bytes_per_s: float
    p50_s: float
    p99_s: float
    limit_bytes_per_s: float
    limit_p50_s: float
    ratio: float
    peer_bytes_per_s: float | None = None
    peer_p50_s: float | None = None
    peer_ratio: float | None = None
    """Ours over the peer's bytes a second."""


class Case(msgspec.Struct, frozen=True):
    """A row to be: the lanes are "limit", "ours", and "peer" where it has one."""

    transport: str
    op: str
    lanes: list[Lane]


def measure_case(
    config: StoreBenchConfig, case: Case, *, size_bytes: int, clients: int
) -> StoreRow:
    """Run the lanes of a case in turn."""
    lanes = [lane for lane in case.lanes if lane.name != "peer" or clients == 1]
    measured = measure(
        lanes, clients=clients, rounds=config.rounds, round_s=config.round_s, least_calls=4
    )
    ours, limit = measured["ours"], measured["limit"]
    peer: Measured | None = measured.get("peer")
    return StoreRow(
        transport=case.transport,
        op=case.op,
        size_bytes=size_bytes,
        clients=clients,
        bytes_per_s=ours.units_per_s,
        p50_s=ours.p50_s,
        p99_s=ours.p99_s,
        limit_bytes_per_s=limit.units_per_s,
        limit_p50_s=limit.p50_s,
        ratio=ours.units_per_s / limit.units_per_s,
        peer_bytes_per_s=None if peer is None else peer.units_per_s,
        peer_p50_s=None if peer is None else peer.p50_s,
        peer_ratio=None if peer is None else ours.units_per_s / peer.units_per_s,
    )
