"""A node of the stand-alone store: lends its memory, serves it, and reports to the master."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from pathlib import Path

import msgspec

from snowskin.store.eviction import make_policy
from snowskin.store.objects.channels import NodeChannel, read_request
from snowskin.store.objects.link import Holdings, MasterLink
from snowskin.store.objects.listening import (
    listen_tcp,
    listen_unix,
    run_handshakes,
    split_hosts,
)
from snowskin.store.objects.serving import ClientServing, Leases
from snowskin.store.objects.store import GRANULE_BYTES, object_layout
from snowskin.store.objects.tiers import Tiers
from snowskin.store.objects.wire import Status
from snowskin.store.objects.words import Copy, Drop, Join, NodeAddress, NodeUsage, PinHere
from snowskin.store.ssd import SsdConfig
from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.memory import Segment
from snowskin.transfer.peer import local_host_id
from snowskin.transfer.topology import Address

EXPIRY_TICK_S = 1.0
WATERMARK_TICK_S = 0.05


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is told.

    Args:
        host: address to listen on and to be reached at; or several, separated by commas, as of
            several NICs: large objects come over all of them at once.
        port: the same at all addresses; 0: any.
        reached_at: where others reach it, if not there, as through a NAT.
        ssd_directory: where objects go that DRAM has no room for; None: nowhere.
        ssd_bytes: most that they take there.
        high_ratio, low_ratio: when memory is fuller than the first, objects are evicted in the
            background until it is no fuller than the second.

    Raises:
        InvalidInput: a value out of bounds.
    """

    master_host: str
    master_port: int
    name: str
    host: str = "127.0.0.1"
    port: int = 0
    reached_at: tuple[Address, ...] = ()
    cluster_key: bytes = b""
    dram_bytes: int = 1 << 30
    eviction: str = "lru"
    high_ratio: float = 0.95
    low_ratio: float = 0.90
    connections_limit: int = 512
    ssd_directory: str | None = None
    ssd_bytes: int = 0

    def __post_init__(self) -> None:
        if self.dram_bytes < GRANULE_BYTES:
            raise InvalidInput(
                f"dram_bytes is {self.dram_bytes}; it must be at least {GRANULE_BYTES}",
                parameter="dram",
            )
        if not 0 < self.low_ratio <= self.high_ratio <= 1:
            raise InvalidInput(
                f"the watermarks are {self.low_ratio} and {self.high_ratio}; they must be above 0, "
                "at most 1, and in order",
                parameter="low-watermark",
            )
        make_policy(self.eviction)
        self.ssd()

    def ssd(self) -> tuple[Path, SsdConfig] | None:
        """Directory and options of the SSD tier, if there is one."""
        if self.ssd_directory is None:
            return None
        config = SsdConfig(capacity_bytes=self.ssd_bytes, eviction=self.eviction)
        return Path(self.ssd_directory), config


class StoreNode:
    """A running node: ``start``, then ``stop``."""

    def __init__(self, config: NodeConfig) -> None:
        """Take the memory and the ports.

        Raises:
            InvalidInput: more memory than is available, or the SSD directory cannot be used, or
                an address is missing.
            StoreRefused: the port is taken.
        """
        self._config = config
        hosts = split_hosts(config.host)
        self._segment = Segment.create(object_layout(config.dram_bytes))
        self._tcp = [listen_tcp(host, config.port) for host in hosts]
        addresses = config.reached_at or tuple(
            Address(
                socket.gethostname() if host in {"0.0.0.0", "::"} else host,
                listening.getsockname()[1],
            )
            for host, listening in zip(hosts, self._tcp, strict=True)
        )
        self._unix, unix_name = listen_unix()
        self._leases: dict[int, Leases] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.address = NodeAddress(
            name=config.name,
            session=secrets.token_hex(8),
            host=addresses[0].host,
            port=addresses[0].port,
            unix=unix_name,
            host_id=local_host_id(),
            addresses=addresses if len(addresses) > 1 else (),
        )
        self.tiers = Tiers(
            self._segment, eviction=config.eviction, ssd=config.ssd(), tell=self._changed
        )
        self.store = self.tiers.dram
        self.link = MasterLink(
            (config.master_host, config.master_port),
            config.cluster_key,
            Join(self.address, config.dram_bytes, config.ssd_bytes),
            Holdings(
                facts=self.tiers.facts,
                fact=self.tiers.fact,
                remove=self.tiers.remove,
                obey=self._obey,
                usage=self.usage,
            ),
        )

    def start(self) -> None:
        """Serve and report, on threads."""
        for listening in (*self._tcp, self._unix):
            run_handshakes(
                listening,
                self._config.cluster_key,
                self._serve,
                limit=self._config.connections_limit,
            )
        for run in (self._keep_room, self._keep_leases_short):
            threading.Thread(target=run, name=run.__name__, daemon=True).start()
        self.tiers.start()
        self.link.start()

    def stop(self) -> None:
        """Leave, and have on SSD what is in DRAM; connections of clients end with the process.
        Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.link.stop()
        for listening in (*self._tcp, self._unix):
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        self.tiers.save()

    def usage(self) -> NodeUsage:
        """What it holds and has done."""
        with self._lock:
            leases = sum(len(held) for held in self._leases.values())
        return msgspec.structs.replace(self.tiers.usage(), leases=leases)

    def _changed(self, key: str) -> None:
        self.link.changed(key)

    def _serve(self, connection: socket.socket) -> None:
        leases = Leases(self.store)
        number = connection.fileno()
        with self._lock:
            self._leases[number] = leases
        try:
            with connection:
                ClientServing(connection, self.tiers, self.link, leases).run()
        finally:
            with self._lock:
                if self._leases.get(number) is leases:
                    del self._leases[number]
            leases.end()

    def _keep_room(self) -> None:
        """Evict ahead of need, so that writers seldom wait."""
        config = self._config
        while not self._stopping.wait(WATERMARK_TICK_S):
            self.tiers.sweep()
            if self.store.used_ratio() <= config.high_ratio:
                continue
            while self.store.used_ratio() > config.low_ratio and not self._stopping.is_set():
                if not self.store.evict_one():
                    break

    def _keep_leases_short(self) -> None:
        while not self._stopping.wait(EXPIRY_TICK_S):
            with self._lock:
                all_leases = list(self._leases.values())
            for leases in all_leases:
                leases.end_if_late()

    def _obey(self, command: Copy | PinHere | Drop) -> str | None:
        if isinstance(command, Drop):
            self.tiers.remove(command.key)
            return None
        if isinstance(command, PinHere):
            self.tiers.set_pin(command.key, command.pin)
            return None
        if self.tiers.fact(command.key) is not None:
            return None
        failure = "no node holds it"
        for source in command.sources:
            try:
                return self._copy_from(source, command)
            except (OSError, TransferFailed) as error:
                failure = f"reading it from {source.name} failed: {error}"
        return failure

    def _copy_from(self, source: NodeAddress, command: Copy) -> str | None:
        """Copy an object from another node; what failed here, if something did.

        Raises:
            OSError, TransferFailed: it could not be read there.
        """
        unix = source.host_id == self.address.host_id
        channel = NodeChannel.open(source, self._config.cluster_key, unix=unix)
        try:
            reply = channel.ask(read_request(command.key))
            if reply.status != Status.OK or reply.digest != command.digest:
                raise ConnectionError("it is not there any more")
            item = self.store.reserve(command.key, reply.length_bytes, command.pin)
            if item is None:
                return f"no room for {reply.length_bytes} bytes"
            try:
                channel.read_into(self.store.views(item), reply)
            except BaseException:
                self.store.abort(item)
                raise
        finally:
            channel.close()
        if not self.store.commit(item, command.digest):
            return None
        try:
            status = self.link.committed(command.key)
        finally:
            self.store.release(item)
        return None if status == Status.OK else f"the master did not take it: {status.name}"
