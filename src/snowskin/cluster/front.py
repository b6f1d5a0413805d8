"""The live cluster as its front sees it: nodes, Conductor, requests. Fulfils the API's Backend."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from snowskin.cluster import messages as m
from snowskin.cluster.config import YIELDING_THREADS, NodeConfig, ServeConfig
from snowskin.cluster.dispatch import Dispatch
from snowskin.cluster.driver import ConductorDriver, Machine
from snowskin.cluster.flight import Flight
from snowskin.cluster.ledger import Ledger
from snowskin.cluster.roster import Roster
from snowskin.cluster.served import SALT_BYTES, Served
from snowskin.cluster.supervisor import NodeStartFailed, Supervisor
from snowskin.cluster.wire import FrontWire
from snowskin.conductor.journal import JournalHeader, RecordedConductor
from snowskin.cost.profile import Profile
from snowskin.store.directory import Directory
from snowskin.terms.commands import Command
from snowskin.terms.errors import InvalidInput, NodeUnavailable
from snowskin.terms.events import NodeJoined, NodeLost
from snowskin.terms.ids import NodeId, RequestId, Role, StartId
from snowskin.terms.request import GenerationRequest
from snowskin.terms.serving import ClusterStatus, Explanation, ServedPage, ServingInfo
from snowskin.transfer.child import Child

log = logging.getLogger("snowskin.front")

HEARTBEAT_TIMEOUT_S = 10.0
"""A node silent for so long hangs: it is killed and started again."""
HEARTBEAT_CHECK_S = 1.0
SEED_BITS = 63


class Cluster:
    """One Conductor, its nodes, and the requests in flight.

    Everything here runs on one event loop and nothing waits, so each message is dealt with whole.

    Args:
        info: what is served, as ``engine`` found it in the model's folder.
        profile: how long things take on this machine.
    """

    def __init__(self, config: ServeConfig, info: ServingInfo, profile: Profile) -> None:
        self._config = config
        self._info = info
        self._started_s = time.monotonic()
        self._cluster_key = (config.cluster_key or secrets.token_hex(32)).encode()
        counts = ((Role.PREFILL, config.prefill_nodes), (Role.DECODE, config.decode_nodes))
        self._roster = Roster(
            {NodeId(f"{role}-{i}"): role for role, count in counts for i in range(count)}
        )
        self._start = StartId(secrets.token_hex(8))
        self._served = Served(salt=secrets.token_bytes(SALT_BYTES), started_s=self._started_s)
        self._ledger = Ledger(self._served)
        header = JournalHeader(config.conductor, profile, config.seed)
        self._journal = None if config.journal is None else _open_journal(config.journal)
        if self._journal is None:
            self._conductor = header.conductor()
            machine: Machine = self._conductor
        else:
            recorded = RecordedConductor(header, self._record)
            self._conductor, machine = recorded.conductor, recorded
        self._driver = ConductorDriver(machine, execute=self._execute, clock=time.monotonic)
        self._dispatch = Dispatch(
            send=self._send,
            tell=self._driver.tell,
            peer_of=self._roster.peer,
            clock=time.monotonic,
            later=_call_later,
            ledger=self._ledger,
        )
        self._supervisor = Supervisor(
            self._roster.nodes, spawn=self._spawn, on_lost=self._lost, on_hopeless=self._give_up
        )
        self._wire: FrontWire | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._settled = asyncio.Event()
        self._hopeless: NodeStartFailed | None = None
        self._stopping = False

    # --- life ------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the nodes; they become ready one by one. Called on the event loop."""
        self._wire = FrontWire(host=self._config.node_host, cluster_key=self._cluster_key)
        self._supervisor.start()
        self._tasks = [
            asyncio.create_task(self._listen(self._wire)),
            asyncio.create_task(self._watch_heartbeats()),
        ]

    async def wait_ready(self) -> None:
        """Return once every node takes work.

        Raises:
            NodeStartFailed: a node will not come up; the CLI shows it and ends.
        """
        await self._settled.wait()
        if self._hopeless is not None:
            raise self._hopeless

    async def stop(self) -> None:
        """End all requests and all processes; what comes from now on is turned away."""
        self._stopping = True
        for flight in self._dispatch.flights():
            self._dispatch.fail(flight, "the server is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._supervisor.stop()
        self._driver.close()
        if self._wire is not None:
            self._wire.close()
        self._close_journal()

    # --- what the API asks -----------------------------------------------------------------

    @property
    def info(self) -> ServingInfo:
        """What is served."""
        return self._info

    @property
    def directory(self) -> Directory:
        """Which node holds which block, to be read and never written."""
        return self._conductor.directory

    async def submit(self, request: GenerationRequest) -> Flight:
        """Place a request; it is queued on its prefill node on return.

        Raises:
            Overloaded: not admitted.
            NodeUnavailable: no node of a needed role is up, or the server is shutting down.
        """
        if self._stopping:
            raise NodeUnavailable("the server is shutting down")
        flight = Flight(
            _seeded(request),
            block_tokens=self._config.block_tokens,
            now_s=time.monotonic(),
            finish=self._dispatch.finish,
        )
        self._dispatch.launch(flight)
        if flight.failure is not None:
            raise flight.failure
        return flight

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request went where it went; None if it is unknown or forgotten."""
        flight = self._dispatch.flight(request_id)
        if flight is not None:
            return flight.explanation()
        return self._ledger.explanation(request_id)

    def served(self, after: int) -> ServedPage:
        """The next of the remembered requests whose number is above ``after``, for a trace."""
        return ServedPage(
            start=self._start,
            model=self._info.model,
            block_tokens=self._config.block_tokens,
            requests=self._served.after(after),
        )

    def status(self) -> ClusterStatus:
        """One snapshot of everything."""
        directory = self.directory.stat()
        return ClusterStatus(
            ready=self._roster.can_serve,
            uptime_s=time.monotonic() - self._started_s,
            requests_in_flight=self._dispatch.in_flight,
            nodes=tuple(
                self._roster.status(
                    node,
                    pid=self._supervisor.pid(node),
                    restarts=self._supervisor.restarts(node),
                )
                for node in self._roster.nodes
            ),
            transfers=self._ledger.transfers,
            rejections={str(cause): n for cause, n in self._ledger.rejections.items()},
            hot_block_replicas=directory.replicas - directory.blocks,
            directory_blocks=directory.blocks,
        )

    # --- nodes -----------------------------------------------------------------------------

    def _spawn(self, node: NodeId, identity: str) -> Child:
        assert self._wire is not None
        config, role = self._config, self._roster.role(node)
        node_config = NodeConfig(
            node=node,
            identity=identity,
            role=role,
            front_address=self._wire.address,
            cluster_key=self._cluster_key,
            host=config.node_host,
            model_dir=self._info.model_dir,
            dtype=config.dtype,
            device=config.device,
            key_space=self._info.key_space,
            transport=config.transport,
            slice_bytes=config.slice_bytes,
            topology=config.topology,
            dram_bytes=config.dram_bytes,
            device_tokens=config.device_tokens,
            chunk_tokens=config.chunk_tokens,
            sequence_limit=config.sequence_limit,
            threads=config.engine_threads,
        )
        return Child("snowskin.cluster.node_process", node_config, environment=YIELDING_THREADS)

    def _send(self, node: NodeId, message: m.ToNode) -> None:
        # A node that is gone takes no messages; its end is noticed by the supervisor.
        if self._wire is not None and self._roster.is_ready(node):
            self._wire.send(self._supervisor.identity(node), message)

    def _record(self, line: bytes) -> None:
        """Write to the journal, as long as its disk has room: serving is worth more than it."""
        if self._journal is None:
            return
        try:
            self._journal.write(line)
        except OSError as error:
            log.error("the journal ends here: %s", error)
            self._close_journal()

    def _close_journal(self) -> None:
        journal, self._journal = self._journal, None
        if journal is not None:
            try:
                journal.close()
            except OSError as error:
                log.error("the journal's last lines are lost: %s", error)

    def _execute(self, command: Command) -> None:
        self._dispatch.execute(command)

    async def _listen(self, wire: FrontWire) -> None:
        while True:
            try:
                identity, message = await wire.receive()
            except msgspec.DecodeError as error:
                log.error("dropped a control message that is not one of ours: %s", error)
                continue
            node = NodeId(identity.partition("#")[0])
            if not self._supervisor.is_current(node, identity):
                continue
            try:
                self._hear(node, message)
            except Exception:
                # What this node has of which request is no longer known; its loss sets that right.
                log.exception("%s said what could not be dealt with", node)
                self._supervisor.kill(node, "it said what could not be dealt with")

    def _hear(self, node: NodeId, message: m.FromNode) -> None:
        now_s = time.monotonic()
        match message:
            case m.NodeReady():
                self._joined(message, now_s=now_s)
            case m.Heartbeat(report=report):
                self._roster.hear(node, message, now_s=now_s)
                self._driver.tell(report)
            case m.StoreChanged(changes=changes):
                for change in changes:
                    self._driver.tell(change)
            case _:
                self._dispatch.hear(node, message)

    def _joined(self, ready: m.NodeReady, *, now_s: float) -> None:
        self._roster.join(ready, now_s=now_s)
        self._supervisor.mark_ready(ready.node)
        log.info("%s is ready: %d blocks of DRAM", ready.node, ready.block_count)
        self._driver.tell(
            NodeJoined(
                node=ready.node,
                role=ready.role,
                block_count=ready.block_count,
                sequence_limit=ready.sequence_limit,
                device_tokens=ready.device_tokens,
            )
        )
        if self._roster.all_ready:
            self._settled.set()

    def _lost(self, node: NodeId) -> None:
        if self._roster.lose(node):
            self._driver.tell(NodeLost(node=node))

    def _give_up(self, failure: NodeStartFailed) -> None:
        self._hopeless = failure
        self._settled.set()

    async def _watch_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_CHECK_S)
            now_s = time.monotonic()
            for node in self._roster.silent(now_s=now_s, timeout_s=HEARTBEAT_TIMEOUT_S):
                self._supervisor.kill(node, f"it was silent for {HEARTBEAT_TIMEOUT_S:g} s")
            self._supervisor.kill_stalled(now_s=now_s)


def _call_later(delay_s: float, function: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, function)


def _seeded(request: GenerationRequest) -> GenerationRequest:
    """Have a seed where one is needed, so that every node of its way draws from one stream."""
    sampling = request.sampling
    if sampling.seed is not None or sampling.temperature == 0:
        return request
    seeded = msgspec.structs.replace(sampling, seed=secrets.randbits(SEED_BITS))
    return msgspec.structs.replace(request, sampling=seeded)


def _open_journal(path: str) -> BinaryIO:
    try:
        return Path(path).open("wb")
    except OSError as error:
        raise InvalidInput(f"--journal {path}: {error.strerror}", parameter="--journal") from error
