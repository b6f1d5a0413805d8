"""What this machine has in the way of NICs and NUMA nodes."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import re
import socket
import struct
from pathlib import Path

from snowskin.terms.errors import InvalidInput
from snowskin.transfer.topology import Nic, Topology, discovered_topology, parse_topology

_SYS = Path("/sys")
_SIOCGIFCONF = 0x8912
_SIOCGIFNETMASK = 0x891B
_IFREQ_BYTES = 40
_INTERFACES_LIMIT = 256
_LOOPBACK_TYPE = "772"  # ARPHRD_LOOPBACK


def read_topology(file: Path | None = None) -> Topology:
    """The topology of this machine: what a file says, or else what the system says.

    Raises:
        InvalidInput: the file cannot be read or is not valid.
    """
    nics = read_nics()
    if file is None:
        return discovered_topology(nics, read_numa_nodes())
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"cannot read the topology {file}: {error}", parameter="topology"
        ) from error
    return parse_topology(text, nics)


def read_nics(sys: Path = _SYS) -> tuple[Nic, ...]:
    """NICs that are up, by name, with their IPv4 addresses; without the loopback.

    Others than these (IPv6, loopback) can be used by naming their addresses in a topology file.
    """
    addresses = _ipv4_addresses()
    return tuple(
        Nic(
            name=folder.name,
            addresses=tuple(addresses.get(folder.name, ())),
            numa_node=_numa_node(folder),
        )
        for folder in sorted((sys / "class" / "net").glob("*"))
        if _read(folder / "type") not in {None, _LOOPBACK_TYPE}
        and _read(folder / "operstate") in {"up", "unknown"}
    )


def read_numa_nodes(sys: Path = _SYS) -> tuple[int, ...]:
    """The NUMA nodes of this machine; (0,) where it has no notion of them."""
    folders = (sys / "devices" / "system" / "node").glob("node*")
    found = [re.fullmatch(r"node(\d+)", folder.name) for folder in folders]
    return tuple(sorted(int(match[1]) for match in found if match)) or (0,)


def _numa_node(folder: Path) -> int | None:
    text = _read(folder / "device" / "numa_node")
    return int(text) if text is not None and int(text) >= 0 else None


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _ipv4_addresses() -> dict[str, list[str]]:
    """By interface, with their prefix lengths, as the kernel lists them."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        room = ctypes.create_string_buffer(_IFREQ_BYTES * _INTERFACES_LIMIT)
        request = struct.pack("iP", len(room), ctypes.addressof(room))
        used_bytes = struct.unpack("iP", fcntl.ioctl(asking, _SIOCGIFCONF, request))[0]
        for at in range(0, used_bytes, _IFREQ_BYTES):
            label = room.raw[at : at + 16].rstrip(b"\0")
            host = socket.inet_ntoa(room.raw[at + 20 : at + 24])
            answer = fcntl.ioctl(asking, _SIOCGIFNETMASK, room.raw[at : at + _IFREQ_BYTES])
            mask = socket.inet_ntoa(answer[20:24])
            bits = ipaddress.ip_network(f"0.0.0.0/{mask}").prefixlen
            name = label.decode().partition(":")[0]  # eth0:1 is a further address of eth0.
            found.setdefault(name, []).append(f"{host}/{bits}")
    return found
