"""Which NICs serve which memory: the topology matrix. Pure; ``transfer.nics`` looks at the system.

The matrix names, for each place where memory may lie, the NICs that are best for it and those
that also work, as Mooncake has it (FAST '25 §4.3.2)::

    {"cpu:0": [["eth0", "eth1"], ["eth2"]], "cpu:1": [["eth2"], ["eth0", "eth1"]]}

It is made from what the system says (NICs on a NUMA node are preferred by its memory), or read
from a file, where an address of this machine may stand in the place of a NIC's name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

import msgspec

from snowskin.terms.errors import InvalidInput
from snowskin.terms.ids import NodeId
from snowskin.transfer.paths import Path

PATHS_PER_PEER_LIMIT = 16
_LOCATION = re.compile(r"(cpu|cuda):\d+")


class Nic(msgspec.Struct, frozen=True):
    """A network interface as the system shows it.

    Attributes:
        addresses: with their prefix length, as in ``192.0.2.7/24``.
        numa_node: None where it belongs to none (virtual NICs do not).
    """

    name: str
    addresses: tuple[str, ...]
    numa_node: int | None = None


class LocalNic(msgspec.Struct, frozen=True):
    """One of our addresses that a path may begin at, or that a Messenger may listen on.

    Attributes:
        host: the address.
        prefix_bits: of its network; None: unknown, so that it reaches whatever is routed.
        tier: 0 if it is preferred by the memory in question, 1 otherwise.
    """

    host: str
    prefix_bits: int | None = None
    tier: int = 0

    def reaches(self, host: str) -> bool:
        """Whether an address is on the network of this NIC, so that no router lies between."""
        if self.prefix_bits is None:
            return False
        network = ipaddress.ip_network(f"{self.host}/{self.prefix_bits}", strict=False)
        try:
            return ipaddress.ip_address(host) in network
        except ValueError:
            return False  # A name.


class Address(msgspec.Struct, frozen=True):
    """Where a peer's Messenger listens; the tier is that of the NIC there."""

    host: str
    port: int
    tier: int = 0


class Topology(msgspec.Struct, frozen=True):
    """The matrix, and the addresses of the NICs that it names.

    Attributes:
        matrix: for each location, the preferred NICs and the others, best first.
        addresses: for each name in the matrix, its addresses with their prefix lengths.
    """

    matrix: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    addresses: Mapping[str, tuple[str, ...]]

    def nics(self, location: str) -> tuple[LocalNic, ...]:
        """The addresses that serve memory at a location, preferred ones first.

        Raises:
            InvalidInput: the matrix has no such location.
        """
        rows = self.matrix.get(location)
        if rows is None:
            raise InvalidInput(
                f"no location {location!r} in the topology; it has {', '.join(self.matrix)}",
                parameter="topology",
            )
        return tuple(
            _local_nic(address, tier)
            for tier, names in enumerate(rows)
            for name in names
            for address in self.addresses[name]
        )


def discovered_topology(nics: Sequence[Nic], numa_nodes: Sequence[int]) -> Topology:
    """The matrix that the system's own facts suggest.

    A NIC is preferred by the memory of its NUMA node, and by all memory if it belongs to none.
    Where a node has no NIC of its own, the others are its preferred ones.
    """
    reachable = [nic for nic in nics if nic.addresses]
    matrix: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for node in numa_nodes or (0,):
        near = tuple(nic.name for nic in reachable if nic.numa_node in {node, None})
        far = tuple(nic.name for nic in reachable if nic.numa_node not in {node, None})
        matrix[f"cpu:{node}"] = (near, far) if near else (far, ())
    return Topology(matrix=matrix, addresses={nic.name: nic.addresses for nic in reachable})


def parse_topology(text: bytes | str, nics: Sequence[Nic]) -> Topology:
    """The matrix of a topology file.

    Args:
        text: JSON, see above.
        nics: what this machine has, to which the names must refer.

    Raises:
        InvalidInput: it is no such matrix, or names what this machine does not have.
    """
    try:
        rows = msgspec.json.decode(text, type=dict[str, list[list[str]]])
    except msgspec.DecodeError as error:
        raise InvalidInput(
            'the topology must be JSON like {"cpu:0": [["eth0"], ["eth1"]]}: ' + str(error),
            parameter="topology",
        ) from error
    addresses: dict[str, tuple[str, ...]] = {}
    matrix: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for location, tiers in rows.items():
        if not _LOCATION.fullmatch(location):
            raise _invalid(location, "is no location; write cpu:N or cuda:N")
        if len(tiers) != 2:
            raise _invalid(location, f"has {len(tiers)} lists; give the preferred and the others")
        named = [name for names in tiers for name in names]
        if not named:
            raise _invalid(location, "names no NIC; leave the location out or name one")
        for name in named:
            if named.count(name) > 1:
                raise _invalid(location, f"names {name!r} twice")
            addresses[name] = _addresses_of(name, location, nics)
        matrix[location] = (tuple(tiers[0]), tuple(tiers[1]))
    if not matrix:
        raise InvalidInput(
            "the topology has no location; give at least cpu:0", parameter="topology"
        )
    return Topology(matrix=matrix, addresses=addresses)


def pair_paths(
    node: NodeId, addresses: Sequence[Address], nics: Sequence[LocalNic]
) -> tuple[Path, ...]:
    """The paths to a peer: which of our addresses goes with which of its own.

    Ours that is on the same network as the peer's address; all of ours where several are; and
    whichever the kernel's routes say where none is. The best tiers come first, and of equals the
    pairs are mixed, so that the first few do not all share one NIC.
    """
    paths: list[Path] = []
    for at, address in enumerate(addresses):
        ours = [nic for nic in nics if nic.reaches(address.host)]
        turn = at % len(ours) if ours else 0
        routed: list[LocalNic | None] = [None]
        for nic in [*ours[turn:], *ours[:turn]] or routed:
            path = Path(
                node=node,
                transport="tcp",
                host=address.host,
                port=address.port,
                local_host=nic.host if nic is not None else None,
                tier=max(address.tier, nic.tier if nic is not None else 0),
            )
            if path not in paths:
                paths.append(path)
    seen: dict[str, int] = {}
    ranks: dict[Path, int] = {}
    for path in paths:
        ranks[path] = seen[path.host] = seen.get(path.host, -1) + 1
    paths.sort(key=lambda path: (path.tier, ranks[path]))
    return tuple(paths[:PATHS_PER_PEER_LIMIT])


def _local_nic(address: str, tier: int) -> LocalNic:
    interface = ipaddress.ip_interface(address)
    return LocalNic(str(interface.ip), interface.network.prefixlen, tier)


def _addresses_of(name: str, location: str, nics: Sequence[Nic]) -> tuple[str, ...]:
    for nic in nics:
        if nic.name == name:
            if not nic.addresses:
                raise _invalid(location, f"names {name!r}, which has no address; give it one")
            return nic.addresses
        for address in nic.addresses:
            if address.partition("/")[0] == name:
                return (address,)
    try:
        if ipaddress.ip_address(name).is_loopback:
            return (f"{name}/8" if "." in name else f"{name}/128",)
    except ValueError:
        pass
    known = ", ".join(nic.name for nic in nics) or "none"
    raise _invalid(location, f"names {name!r}, which this machine does not have; it has {known}")


def _invalid(location: str, complaint: str) -> InvalidInput:
    return InvalidInput(f"topology: {location!r} {complaint}", parameter="topology")
