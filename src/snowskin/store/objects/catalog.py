"""The master's knowledge: which object lies on which nodes, who writes what, what is under way.

Pure: it reads no clock and touches no socket. Each verb returns what is to be sent, as ``Send``
(to a node) and ``Say`` (the answer to a question that had to wait).

What a key is goes through three states: *reserved* (someone writes it; not readable), *committed*
(readable from at least one node), *leaving* (being removed from its nodes; not readable). The
nodes' reports are the truth: what a node says that it holds is readable, unless the key has other
content.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from snowskin.store.objects.entries import (
    CatalogNode,
    CatalogObject,
    Errand,
    Reservation,
    conflict_message,
    missing_message,
)
from snowskin.store.objects.words import (
    Accepted,
    Copy,
    Done,
    Drop,
    Located,
    NodeAddress,
    NodeStat,
    ObjectFact,
    Pin,
    PinHere,
    PutBusy,
    PutExists,
    PutGranted,
    PutStart,
    Refusal,
    Reply,
)

RESERVATION_S = 30.0
"""How long a writer may take, plus the time for its bytes at ``SLOWEST_BYTES_PER_S``."""
SLOWEST_BYTES_PER_S = 5e6
COMMAND_S = 10.0
"""A node that has not carried a removal out by then is not waited for."""
DEFAULT_OBJECT_LIMIT = 20_000_000


class Send(NamedTuple):
    """A message to a node."""

    node: str
    message: Reply


class Say(NamedTuple):
    """The answer that a question had to wait for; ``ticket`` is whatever came with it."""

    ticket: object
    message: Reply


Output = Send | Say


class CatalogConfig(msgspec.Struct, frozen=True):
    """Bounds."""

    object_limit: int = DEFAULT_OBJECT_LIMIT


class Catalog:
    """See the module. ``readable`` may be read, and is changed here only."""

    def __init__(self, config: CatalogConfig | None = None, *, rng: random.Random) -> None:
        self._config = config or CatalogConfig()
        self._rng = rng
        self.readable: dict[str, CatalogObject] = {}
        self.nodes: dict[str, CatalogNode] = {}
        self._reserved: dict[str, Reservation] = {}
        self._of_owner: dict[object, dict[str, None]] = {}
        self._leaving: dict[str, Errand] = {}
        self._errand_of: dict[int, Errand] = {}
        self._copies: dict[int, tuple[str, str]] = {}
        """Node and key of each copy that is being made."""
        self._void: dict[int, tuple[str, str]] = {}
        """Of these, the ones whose object was removed meanwhile."""
        self._number = 0
        self.reclaimed_total = 0
        self.conflicts_total = 0

    # Nodes.

    def join(self, address: NodeAddress, capacity_bytes: int) -> Refusal | None:
        """A node is here; it holds nothing until it reports. None: welcome."""
        known = self.nodes.get(address.name)
        if known is not None:
            return Refusal(
                "StoreRefused",
                f"a node called {address.name!r} is up already at {known.address.host}:"
                f"{known.address.port}; choose another --name",
            )
        self.nodes[address.name] = CatalogNode(address, capacity_bytes)
        return None

    def lose(self, name: str) -> tuple[Output, ...]:
        """A node died: nothing can be read from it any more."""
        node = self.nodes.pop(name, None)
        if node is None:
            return ()
        for key in node.keys:
            self._forget_replica(key, name)
        for number, (target, _) in list(self._copies.items()):
            if target == name:
                self._end_copy(number)
        outputs: list[Output] = []
        for number, errand in list(self._errand_of.items()):
            if errand.waiting[number] == name:
                outputs += self.command_ended(number)
        return tuple(outputs)

    def report(
        self, name: str, number: int, committed: Sequence[ObjectFact], dropped: Sequence[str]
    ) -> tuple[Accepted, tuple[Output, ...]]:
        """What a node dropped and committed, in this order."""
        node = self.nodes[name]
        for key in dropped:
            if key in node.keys:
                held = self.readable[key]
                del node.keys[key]
                node.used_bytes -= held.size_bytes
                self._forget_replica(key, name)
        rejected: list[str] = []
        outputs: list[Output] = []
        for fact in committed:
            if not self._learn(node, name, fact):
                rejected.append(fact.key)
                continue
            pin = self.readable[fact.key].pin
            if pin != fact.pin:
                outputs.append(Send(name, PinHere(self.next_number(), fact.key, pin)))
        return Accepted(number, tuple(rejected)), tuple(outputs)

    # Writing.

    def start_put(
        self, start: PutStart, owner: object, *, now_s: float
    ) -> PutGranted | PutExists | PutBusy | Refusal:
        """Reserve a key and choose nodes for it."""
        held = self.readable.get(start.key)
        if held is not None:
            if held.digest == start.digest and held.size_bytes == start.size_bytes:
                return PutExists(tuple(held.nodes))
            self.conflicts_total += 1
            return Refusal("KeyConflict", conflict_message(start.key))
        if start.key in self._leaving:
            return PutBusy()
        reserved = self._reserved.get(start.key)
        if reserved is not None:
            if reserved.owner is not owner:
                return PutBusy()
            self._unreserve(start.key)
        if len(self.readable) + len(self._reserved) >= self._config.object_limit:
            return Refusal(
                "PoolFullError",
                f"the master has {len(self.readable)} objects, its limit; remove some, or start "
                "it with a higher --objects",
            )
        chosen = self._choose(start)
        if isinstance(chosen, Refusal):
            return chosen
        until_s = now_s + RESERVATION_S + start.size_bytes / SLOWEST_BYTES_PER_S
        self._reserved[start.key] = Reservation(start, chosen, owner, until_s)
        self._of_owner.setdefault(owner, {})[start.key] = None
        for name in chosen:
            self.nodes[name].reserved_bytes += start.size_bytes
        return PutGranted(chosen)

    def end_put(self, key: str, owner: object) -> None:
        """The writer has finished or given up."""
        reserved = self._reserved.get(key)
        if reserved is not None and reserved.owner is owner:
            self._unreserve(key)

    def end_owner(self, owner: object) -> None:
        """A writer died: what it had reserved is free."""
        for key in self._of_owner.get(owner, {}).copy():
            self._unreserve(key)
            self.reclaimed_total += 1

    # Reading and keeping.

    def locate(self, key: str) -> Located | None:
        """Where an object can be read; None if it cannot."""
        held = self.readable.get(key)
        if held is None:
            return None
        nodes = held.nodes
        return Located(held.size_bytes, held.digest, (*nodes,), (*nodes.values(),), held.pin)

    def longest_prefix(self, keys: Sequence[str]) -> dict[str, int]:
        """How many leading keys each node holds, for all nodes at once; those without the first
        are absent."""
        prefixes: dict[str, int] = {}
        alive: list[str] | None = None
        for count, key in enumerate(keys):
            held = self.readable.get(key)
            nodes = held.nodes if held is not None else {}
            if alive is None:
                alive = list(nodes)
            for name in alive:
                if name not in nodes:
                    prefixes[name] = count
            alive = [name for name in alive if name in nodes]
            if not alive:
                return prefixes
        prefixes.update(dict.fromkeys(alive or (), len(keys)))
        return prefixes

    def remove(self, key: str, ticket: object, *, now_s: float) -> tuple[Output, ...]:
        """Take a key from its nodes; the answer comes when none serves it any more."""
        held = self.readable.pop(key, None)
        if held is None and key in self._leaving:
            self._leaving[key].tickets.append(ticket)
            return ()
        if held is None:
            return (Say(ticket, Refusal("KeyMissing", missing_message(key))),)
        errand = Errand(key, ticket, now_s + COMMAND_S, removes=True)
        self._leaving[key] = errand
        self._void |= {number: copy for number, copy in self._copies.items() if copy[1] == key}
        for name in held.nodes:
            node = self.nodes[name]
            del node.keys[key]
            node.used_bytes -= held.size_bytes
        return tuple(self._send(errand, name, Drop(self.next_number(), key)) for name in held.nodes)

    def set_pin(self, key: str, pin: Pin, ticket: object, *, now_s: float) -> tuple[Output, ...]:
        """Pin or unpin an object; the answer comes when all its nodes have done so."""
        held = self.readable.get(key)
        if held is None:
            return (Say(ticket, Refusal("KeyMissing", missing_message(key))),)
        held.pin = pin
        errand = Errand(key, ticket, now_s + COMMAND_S, removes=False)
        return tuple(
            self._send(errand, name, PinHere(self.next_number(), key, pin)) for name in held.nodes
        )

    def command_ended(self, number: int) -> tuple[Output, ...]:
        """A node has carried a command out, or died; of use if a question waits for it."""
        self._end_copy(number)
        errand = self._errand_of.pop(number, None)
        if errand is None:
            return ()
        del errand.waiting[number]
        if errand.waiting:
            return ()
        if errand.removes:
            del self._leaving[errand.key]
        return tuple(Say(ticket, Done()) for ticket in errand.tickets)

    def drop_replica(self, key: str, name: str) -> Send:
        """Give one of several replicas up."""
        held = self.readable[key]
        node = self.nodes[name]
        assert len(held.nodes) > 1, f"{name} has the last replica of {key!r}"
        del held.nodes[name]
        del node.keys[key]
        node.used_bytes -= held.size_bytes
        return Send(name, Drop(self.next_number(), key))

    def copy_command(self, key: str, target: str) -> Send:
        """Have a node copy an object from those that hold it."""
        held = self.readable[key]
        sources = tuple(self.nodes[name].address for name in held.nodes)
        copy = Copy(self.next_number(), key, held.size_bytes, held.digest, held.pin, sources)
        self._copies[copy.number] = (target, key)
        return Send(target, copy)

    def emptiest(self, size_bytes: int, *, avoid: Iterable[str]) -> list[str]:
        """Nodes that an object could go to, the emptiest first; equals in random order."""
        avoided = set(avoid)
        names = [name for name in self.nodes if name not in avoided]
        self._rng.shuffle(names)
        fills = {name: round(self.nodes[name].fill_ratio(size_bytes), 2) for name in names}
        fitting = [name for name in names if self.nodes[name].capacity_bytes >= size_bytes]
        return sorted(fitting, key=fills.__getitem__)

    def next_number(self) -> int:
        """For the next command to a node."""
        self._number += 1
        return self._number

    def reservations(self) -> int:
        """Keys that are being written."""
        return len(self._reserved)

    def expire(self, *, now_s: float) -> tuple[Output, ...]:
        """Reclaim abandoned reservations; answer questions that a node holds up."""
        for key in [key for key, held in self._reserved.items() if held.until_s <= now_s]:
            self._unreserve(key)
            self.reclaimed_total += 1
        outputs: list[Output] = []
        late = [errand for errand in self._errand_of.values() if errand.until_s <= now_s]
        for errand in dict.fromkeys(late):
            for number in errand.waiting:
                del self._errand_of[number]
            if errand.removes:
                del self._leaving[errand.key]
            names = ", ".join(sorted(errand.waiting.values()))
            message = (
                f"{names} did not confirm within {COMMAND_S:.0f} s that {errand.key!r} was "
                f"{'removed' if errand.removes else 'pinned or unpinned'}; it is done on all others"
            )
            outputs += [Say(ticket, Refusal("StoreTimeout", message)) for ticket in errand.tickets]
        return tuple(outputs)

    def node_stats(self) -> tuple[NodeStat, ...]:
        """Of all nodes that are up."""
        return tuple(
            NodeStat(
                name=name,
                host=node.address.host,
                port=node.address.port,
                objects=len(node.keys),
                used_bytes=node.used_bytes,
                usage=node.usage,
            )
            for name, node in self.nodes.items()
        )

    def _send(self, errand: Errand, name: str, command: Drop | PinHere) -> Send:
        errand.waiting[command.number] = name
        self._errand_of[command.number] = errand
        return Send(name, command)

    def _choose(self, start: PutStart) -> tuple[str, ...] | Refusal:
        if start.node is not None and start.node not in self.nodes:
            known = ", ".join(self.nodes) or "none"
            return Refusal("StoreRefused", f"no node {start.node!r} is up; there are: {known}")
        ordered = self.emptiest(start.size_bytes, avoid=start.avoid)
        if start.node in ordered:
            ordered.remove(start.node)
            ordered.insert(0, start.node)
        elif start.node is not None:
            ordered = []
        if ordered:
            return tuple(ordered[: start.replicas])
        if not self.nodes:
            return Refusal("PoolFullError", "no node is up: start one with `snowskin store node`")
        return Refusal(
            "PoolFullError",
            f"no node has room for {start.key!r} ({start.size_bytes} bytes): what they hold is "
            "pinned, leased or being written, or they are too small; unpin or remove objects, or "
            "add nodes",
        )

    def _learn(self, node: CatalogNode, name: str, fact: ObjectFact) -> bool:
        held = self.readable.get(fact.key)
        if held is None:
            reserved = self._reserved.get(fact.key)
            if fact.key in self._leaving or (
                (name, fact.key) in self._void.values()
                if reserved is None
                else reserved.digest != fact.digest
            ):
                return False
            held = self.readable[fact.key] = CatalogObject(fact.size_bytes, fact.digest, fact.pin)
        elif held.digest != fact.digest:
            self.conflicts_total += 1
            return False
        held.nodes[name] = fact.tier
        if fact.key not in node.keys:
            node.keys[fact.key] = None
            node.used_bytes += fact.size_bytes
        reserved = self._reserved.get(fact.key)
        if reserved is not None:
            reserved.unreported.discard(name)
            if not reserved.unreported:
                self._unreserve(fact.key)
        return True

    def _forget_replica(self, key: str, name: str) -> None:
        held = self.readable[key]
        del held.nodes[name]
        if not held.nodes:
            del self.readable[key]

    def _end_copy(self, number: int) -> None:
        self._copies.pop(number, None)
        self._void.pop(number, None)

    def _unreserve(self, key: str) -> None:
        reserved = self._reserved.pop(key)
        owned = self._of_owner[reserved.owner]
        del owned[key]
        if not owned:
            del self._of_owner[reserved.owner]
        for name in reserved.nodes:
            node = self.nodes.get(name)
            if node is not None:
                node.reserved_bytes = max(0, node.reserved_bytes - reserved.size_bytes)
