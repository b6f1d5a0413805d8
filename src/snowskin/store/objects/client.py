"""``StoreClient``: the stand-alone store from any Python program."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from snowskin.store.objects.asking import MasterChannel
from snowskin.store.objects.buffers import check_key, memory_of
from snowskin.store.objects.entries import missing_message
from snowskin.store.objects.errors import (
    KeyMissing,
)
from snowskin.store.objects.reading import Reading
from snowskin.store.objects.store import digest_of
from snowskin.store.objects.words import (
    BATCH_LIMIT,
    REPLICAS_LIMIT,
    Answer,
    AskPrefix,
    AskStat,
    AskTransfer,
    ChangeReplica,
    Done,
    Exists,
    ExistsMany,
    Flags,
    Found,
    Keys,
    ListKeys,
    Located,
    Lookup,
    Pin,
    Prefixes,
    PutStart,
    Remove,
    SetPin,
    StoreStat,
    TransferStatus,
)
from snowskin.store.objects.writing import PutResult, Writing
from snowskin.terms.errors import InvalidInput
from snowskin.transfer.links import Links
from snowskin.transfer.nics import read_topology
from snowskin.transfer.paths import PathStat
from snowskin.transfer.peer import local_host_id
from snowskin.transfer.settings import TransferSettings
from snowskin.transfer.transports.tcp import TcpTransport

PinName = Literal["none", "soft", "hard"]
_PINS = {"none": Pin.NONE, "soft": Pin.SOFT, "hard": Pin.HARD}
PREFIX_LIMIT = 100_000
DEFAULT_MASTER = "127.0.0.1:7411"
TIMEOUT_LIMIT_S = 1e9
"""What sockets can be told."""
STRIPE_LEAST_BYTES = 2 << 20
"""No further path is used for less than so much. A further one costs about 0.1 ms, as measured with
two addresses of a two-core machine, where it gains nothing: there is no second NIC."""
LOCATION = "cpu:0"
"""Of a topology, the memory that objects come to."""


class ObjectInfo(msgspec.Struct, frozen=True):
    """What the master knows of an object.

    Attributes:
        digest: xxh3-128 of its content, in hex.
        nodes, tiers: where its replicas are; a tier is "dram" or "ssd".
    """

    key: str
    size_bytes: int
    digest: str
    nodes: tuple[str, ...]
    tiers: tuple[str, ...]
    pin: PinName


class StoreClient:
    """A client of the store. Safe to use from any thread; ``close`` it, or use it in a ``with``.

    Every method raises MasterUnreachable if the master is asked and does not answer in time, and
    InvalidInput for keys and buffers that cannot be. Keys are strings of 1 to 1000 bytes. Objects
    are write-once and of any size, empty ones included.

    Args:
        master: ``host:port``.
        cluster_key: what master and nodes were started with; None: they were given none.
        timeout_s: longest that a method waits for a master, or for nodes that do not answer.
        transport: "auto" maps the memory of nodes on this host and takes TCP to others; "tcp"
            takes TCP to all.
        transfer: slices, connections and patience where there are several paths to a node.
        topology: file that names the NICs to use, see ``transfer.topology``; None: whichever the
            kernel's routes say.
    """

    def __init__(
        self,
        master: str = DEFAULT_MASTER,
        *,
        cluster_key: str | bytes | None = None,
        timeout_s: float = 10.0,
        transport: Literal["auto", "tcp"] = "auto",
        transfer: TransferSettings | None = None,
        topology: str | Path | None = None,
    ) -> None:
        if transport not in ("auto", "tcp"):
            raise InvalidInput(f"transport is auto or tcp, not {transport!r}")
        if not 0 < round(timeout_s, 6) <= TIMEOUT_LIMIT_S:
            raise InvalidInput(
                f"timeout_s is {timeout_s}; it must be above 0, and at most {TIMEOUT_LIMIT_S:g}"
            )
        key = cluster_key.encode() if isinstance(cluster_key, str) else cluster_key or b""
        self._master = MasterChannel(parse_address(master), key, timeout_s)
        host_id = local_host_id() if transport == "auto" else None
        settings = transfer or TransferSettings(stripe_least_bytes=STRIPE_LEAST_BYTES)
        self._links = Links(settings.stall_s)
        nics = () if topology is None else read_topology(Path(topology)).nics(LOCATION)
        tcp = TcpTransport(key, self._links, settings, nics)
        self._reading = Reading(self._master, key, tcp, host_id=host_id, timeout_s=timeout_s)
        self._writing = Writing(self._master, self._reading, timeout_s)
        self._closed = threading.Event()
        threading.Thread(target=self._keep_leases, name="store-leases", daemon=True).start()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Views that are still held may change from now on. Idempotent.

        Whatever is asked of it afterwards raises StoreRefused.
        """
        self._closed.set()
        self._master.close()
        self._reading.close()

    # Writing.

    def put(
        self,
        key: str,
        value: Any,
        *,
        replicas: int = 1,
        node: str | None = None,
        pin: PinName = "none",
    ) -> PutResult:
        """Store an object; when it returns, every client can read it.

        Args:
            value: anything with contiguous bytes (bytes, bytearray, memoryview, numpy array, CPU
                tensor). It is not copied, and must not change meanwhile.
            replicas: on how many nodes, as far as there are so many with room.
            node: write there, and nowhere else if it is the only replica.
            pin: "soft": evicted last; "hard": never evicted.

        Raises:
            KeyConflict: the key has other content.
            PoolFullError: no node can make room.
            StoreTimeout: another client is writing the key, and does not come to an end.
        """
        key = check_key(key)
        replicas = _whole("replicas", replicas)
        if not 1 <= replicas <= REPLICAS_LIMIT:
            raise InvalidInput(f"replicas is {replicas}; it must be 1 to {REPLICAS_LIMIT}")
        wanted_pin = _pin(pin)
        view = memory_of(value)
        start = PutStart(key, len(view), digest_of(view), replicas, node)
        result = self._writing.put(start, view, wanted_pin)
        if wanted_pin is not Pin.NONE and result.status == "exists":
            self._master.ask(SetPin(key, wanted_pin), Done)
        return result

    def put_from(self, key: str, buffer: Any, **options: Any) -> PutResult:
        """The same as ``put``: it never copies. Options and errors are those of ``put``."""
        return self.put(key, buffer, **options)

    def put_many(self, values: Mapping[str, Any], **options: Any) -> dict[str, PutResult]:
        """Store several objects, one after the other.

        Raises:
            StoreError: as ``put``, at the first that fails; those before it are stored.
        """
        return {key: self.put(key, value, **options) for key, value in values.items()}

    # Reading.

    def get(self, key: str) -> memoryview:
        """An object's bytes, read-only.

        From a node of this host, large objects are viewed where they lie, without a copy; they stay
        there for as long as the view, or anything made from it, lives (and this client is open and
        not suspended for more than 20 s). Everything else comes in fresh memory, verified.

        Raises:
            KeyMissing: there is no such object.
            ReplicaUnreachable: there is, but no node that holds it answers.
        """
        return self._reading.get(check_key(key))

    def get_into(self, key: str, buffer: Any) -> int:
        """Read an object into your memory; how many bytes it has.

        Args:
            buffer: writable and contiguous, at least as large as the object.

        Raises:
            InvalidInput: it is smaller than the object.
            KeyMissing, ReplicaUnreachable: see ``get``. The buffer may hold anything then.
        """
        view = memory_of(buffer, writable=True)
        return self._reading.get_into(check_key(key), view)

    def get_range(self, key: str, first: int, count: int) -> memoryview:
        """``count`` bytes of an object from byte ``first`` on; fewer where it ends before.

        Raises:
            InvalidInput: it ends before ``first``.
            KeyMissing, ReplicaUnreachable: see ``get``.
        """
        first, count = _whole("first", first), _whole("count", count)
        if first < 0 or count < 0:
            raise InvalidInput(f"first and count are {first} and {count}; they must not be below 0")
        return self._reading.get_range(check_key(key), first, count)

    def get_many(self, keys: Sequence[str]) -> dict[str, memoryview | None]:
        """Several objects, with one question to the master; None for those that are missing.

        Objects of other hosts are asked for many at a time. Such share memory, 16 MiB or the size
        of the last of them more: it stays as long as one of them is in use.

        Raises:
            ReplicaUnreachable: see ``get``.
        """
        wanted = [check_key(key) for key in dict.fromkeys(keys)]
        early = self._reading.get_early(wanted)
        found: dict[str, memoryview | None] = {}
        for key in wanted:
            value = early.get(key)
            if value is None:
                try:
                    value = self._reading.get(key)
                except KeyMissing:
                    value = None
            found[key] = value
        return found

    # Asking.

    def exists(self, key: str) -> bool:
        """Whether an object can be read. It protects nothing: it may go right after."""
        return self._master.ask(Exists(check_key(key)), Answer).value

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """The same for many keys, in order; millions a second."""
        keys = list(keys)
        if not keys:
            return []
        questions = [
            ExistsMany(keys[start : start + BATCH_LIMIT])
            for start in range(0, len(keys), BATCH_LIMIT)
        ]
        replies = self._master.ask_all(questions)
        flags = b"".join(reply.values for reply in replies if isinstance(reply, Flags))
        return list(map(bool, flags))

    def longest_prefix(self, keys: Sequence[str]) -> dict[str, int]:
        """How many leading keys each node holds; nodes without the first are absent.

        For chains of which an object is of use only with all before it, as blocks of KV are.

        Args:
            keys: at most 100,000.
        """
        if len(keys) > PREFIX_LIMIT:
            raise InvalidInput(f"{len(keys)} keys in one chain; at most {PREFIX_LIMIT}")
        return self._master.ask(AskPrefix(list(keys)), Prefixes).counts

    def size(self, key: str) -> int:
        """An object's bytes.

        Raises:
            KeyMissing: there is no such object.
        """
        return self._locate(key).size_bytes

    def info(self, key: str) -> ObjectInfo:
        """An object's size, content digest, nodes and pin.

        Raises:
            KeyMissing: there is no such object.
        """
        found = self._locate(key)
        names: dict[Pin, PinName] = {Pin.NONE: "none", Pin.SOFT: "soft", Pin.HARD: "hard"}
        return ObjectInfo(
            key=key,
            size_bytes=found.size_bytes,
            digest=found.digest.hex(),
            nodes=found.nodes,
            tiers=found.tiers,
            pin=names[Pin(found.pin)],
        )

    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys that begin with ``prefix``, in order; those put or removed meanwhile may be among
        them or not. The master looks through all its keys for each ``BATCH_LIMIT`` of them."""
        after: str | None = None
        while True:
            page = self._master.ask(ListKeys(prefix, after, BATCH_LIMIT), Keys)
            yield from page.keys
            if not page.more:
                return
            after = page.keys[-1]

    def stat(self) -> StoreStat:
        """Counts of objects and bytes, and each node's memory, as last reported."""
        return self._master.ask(AskStat(), StoreStat)

    def path_stat(self) -> tuple[PathStat, ...]:
        """Health and load of each path to nodes that have several, as this client found it."""
        return self._links.path_stat()

    # Keeping.

    def remove(self, key: str) -> None:
        """Remove an object; when it returns, no one can read it any more (views stay).

        Raises:
            KeyMissing: there is no such object.
            StoreTimeout: it was removed, but a node does not confirm.
        """
        key = check_key(key)
        self._reading.forget(key)
        self._master.ask(Remove(key), Done)

    def pin(self, key: str, pin: PinName = "hard") -> None:
        """Keep an object: "soft": evicted last; "hard": never evicted; "none": as any other.

        Raises:
            KeyMissing: there is no such object.
        """
        self._master.ask(SetPin(check_key(key), _pin(pin)), Done)

    def unpin(self, key: str) -> None:
        """The same as ``pin(key, "none")``."""
        self.pin(key, "none")

    def change_replica(
        self, key: str, *, count: int | None = None, node: str | None = None
    ) -> TransferStatus:
        """Have more or fewer replicas, asynchronously: ask ``transfer_status`` how it goes.

        Args:
            count: how many there should be, at least 1.
            node: instead: one there too.

        Raises:
            KeyMissing: there is no such object.
            StoreRefused: no such node is up.
        """
        count = None if count is None else _whole("count", count)
        if (count is None) == (node is None) or (
            count is not None and not 1 <= count <= REPLICAS_LIMIT
        ):
            raise InvalidInput(f"give either a count of 1 to {REPLICAS_LIMIT} or a node")
        return self._master.ask(ChangeReplica(check_key(key), count, node), TransferStatus)

    def transfer_status(self, transfer: str | TransferStatus) -> TransferStatus:
        """How far a change of replicas has come; best effort, it says what there is and why.

        Raises:
            NoSuchTransfer: it ended long ago, or the master was restarted.
        """
        name = transfer.transfer if isinstance(transfer, TransferStatus) else transfer
        return self._master.ask(AskTransfer(name), TransferStatus)

    def _locate(self, key: str) -> Located:
        found = self._master.ask(Lookup((check_key(key),)), Found).objects[0]
        if found is None:
            raise KeyMissing(missing_message(key))
        return found

    def _keep_leases(self) -> None:
        while not self._closed.wait(1.0):
            self._reading.renew()


def _whole(name: str, value: int) -> int:
    """A whole number of whichever type, numpy's too."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidInput(f"{name} is a whole number, not {value!r}") from error


def _pin(name: str) -> Pin:
    if not isinstance(name, str) or name not in _PINS:
        raise InvalidInput(f"pin is none, soft or hard, not {name!r}")
    return _PINS[name]


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        InvalidInput: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidInput(
            f"{text!r} is no address of a master: write host:port, for example {DEFAULT_MASTER}",
            parameter="master",
        )
    return host.strip("[]"), int(port)
