"""What the master keeps of objects, of writers, of nodes, and of commands under way."""

from __future__ import annotations

from snowskin.store.objects.words import NodeAddress, NodeUsage, Pin, PutStart


class CatalogObject:
    """A committed object; ``nodes`` hold it, each on a tier, in the order in which they came to."""

    __slots__ = ("digest", "nodes", "pin", "size_bytes")

    def __init__(self, size_bytes: int, digest: bytes, pin: Pin) -> None:
        self.size_bytes = size_bytes
        self.digest = digest
        self.pin = pin
        self.nodes: dict[str, str] = {}


class Reservation:
    """Someone writes a key; ``owner`` is whatever ends when the writer dies.

    ``unreported`` are those of its nodes that have not said yet that they hold the object.
    """

    __slots__ = ("digest", "nodes", "owner", "size_bytes", "unreported", "until_s")

    def __init__(
        self, start: PutStart, nodes: tuple[str, ...], owner: object, until_s: float
    ) -> None:
        self.size_bytes = start.size_bytes
        self.digest = start.digest
        self.nodes = nodes
        self.unreported = set(nodes)
        self.owner = owner
        self.until_s = until_s


class CatalogNode:
    """A node that is up. ``used_bytes`` counts reservations too."""

    __slots__ = ("address", "capacity_bytes", "keys", "reserved_bytes", "usage", "used_bytes")

    def __init__(self, address: NodeAddress, capacity_bytes: int) -> None:
        self.address = address
        self.capacity_bytes = max(1, capacity_bytes)
        self.keys: dict[str, None] = {}
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.usage = NodeUsage()

    def fill_ratio(self, more_bytes: int) -> float:
        """How full it would be."""
        return (self.used_bytes + self.reserved_bytes + more_bytes) / self.capacity_bytes


class Errand:
    """Commands to nodes that questions wait for; ``waiting``: number of the command → node."""

    __slots__ = ("key", "removes", "tickets", "until_s", "waiting")

    def __init__(self, key: str, ticket: object, until_s: float, *, removes: bool) -> None:
        self.key = key
        self.tickets = [ticket]
        self.until_s = until_s
        self.removes = removes
        self.waiting: dict[int, str] = {}


def missing_message(key: str) -> str:
    """Of the error KeyMissing."""
    return f"there is no object {key!r}"


def conflict_message(key: str) -> str:
    """Of the error KeyConflict."""
    return (
        f"{key!r} has other content already, and objects are write-once: remove it first, or "
        "choose another key"
    )
