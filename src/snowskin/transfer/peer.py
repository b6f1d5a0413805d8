"""How a node's segment is reached; travels in control messages."""

from __future__ import annotations

from pathlib import Path

import msgspec

from snowskin.terms.ids import NodeId
from snowskin.transfer.memory import SegmentLayout
from snowskin.transfer.topology import Address


class NixlAddress(msgspec.Struct, frozen=True):
    """What a NIXL agent must know to read a segment.

    Attributes:
        description: of the agent that serves it, as NIXL packs it.
        start: address of the mapping there.
    """

    description: bytes
    start: int


class Peer(msgspec.Struct, frozen=True, cache_hash=True):
    """A node's Messenger: where it listens, and the shape of the segment that it serves."""

    node: NodeId
    host: str
    port: int
    shm_address: str
    """Name of an abstract unix socket that hands the segment to processes of the same host."""
    host_id: str
    """Equal where the unix socket can be reached, see ``local_host_id``."""
    layout: SegmentLayout
    addresses: tuple[Address, ...] = ()
    """All addresses where it listens, if they are more than ``host`` and ``port``."""
    nixl: NixlAddress | None = None
    """None where it serves no NIXL."""

    @property
    def every_address(self) -> tuple[Address, ...]:
        """Where it listens."""
        return self.addresses or (Address(self.host, self.port),)


def local_host_id() -> str:
    """What this process shares with exactly those that can hand it file descriptors.

    The running kernel's boot id and the network namespace, since abstract unix sockets belong to
    that: two containers of one machine differ, unless they share the network.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        namespace = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        namespace = 0
    return f"{boot}/{namespace}"
