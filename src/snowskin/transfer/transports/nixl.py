"""Reading a peer's segment with NIXL, which takes RDMA where there is any, and else UCX's TCP or,
on one host, cross-memory copies.

Both ends register their mapping of the segment with a NIXL agent; the peer's agent takes no part
in a read beyond what its transport needs. So the reader does all of the protocol of
``transfer.memory`` by itself, with reads of the slot table before and after those of the bytes:
generation, then parts ready, then bytes, then generation. Each of these is complete before the
next begins, as one-sided reads come in no order otherwise. What a seal says is verified against
the stored checksum.

A node's Messenger serves, so that over TCP the engine's process is not slowed down; but it maps
the segment to read only, which RDMA NICs may refuse to register. Then make a ``NixlServer`` in the
owner's own process, which costs it nothing where reads are one-sided, and put its ``address`` into
the ``Peer``. Tested here is UCX over TCP and cross-memory copies; on RDMA hardware nothing yet.

NIXL authenticates nobody. What opens a segment is the agent's description, which travels with the
``Peer`` in control messages; whoever holds it may read. Register nothing that is to be kept from
those who see control messages.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.memory import Segment
from snowskin.transfer.peer import NixlAddress, Peer
from snowskin.transfer.progress import PullProgress
from snowskin.transfer.transports.nixl_reading import SCRATCH_BYTES, Pieces, Reading
from snowskin.transfer.wire import SILENCE_LIMIT_S

MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
PEERS_LIMIT = 256
PAUSE_LEAST_S = 20e-6
PAUSE_MOST_S = 1e-3


def import_nixl() -> ModuleType:
    """NIXL's Python module.

    Raises:
        InvalidInput: it is not installed.
    """
    errors: list[str] = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            errors.append(str(error))
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return module
    raise InvalidInput(
        "the transport nixl needs NIXL, which cannot be imported; install snowskin[nixl] "
        f"({'; '.join(errors)})",
        parameter="transport",
    )


def _make_agent(*, progress: bool) -> Any:
    """A new agent.

    Args:
        progress: whether a thread of NIXL's own, which takes part of a processor core even while
            idle, answers peers; needed where their reads are not one-sided.
    """
    module = import_nixl()
    config = module.nixl_agent_config(
        backends=["UCX"],
        enable_prog_thread=progress,
        sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    return module.nixl_agent(f"snowskin-{secrets.token_hex(8)}", config)


class NixlServer:
    """A segment that NIXL agents elsewhere may read, for as long as this object lives.

    Raises:
        InvalidInput: NIXL is not installed.
    """

    def __init__(self, segment: Segment) -> None:
        self._agent = _make_agent(progress=True)
        start = segment.generation.ctypes.data
        self._memory = self._agent.register_memory(
            [(start, segment.layout.total_bytes, 0, "")], "DRAM"
        )
        self.address = NixlAddress(description=self._agent.get_agent_metadata(), start=start)

    def close(self) -> None:
        """Serve no more; call it before the segment is closed. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._agent.deregister_memory(memory)


class NixlTransport:
    """This node's agent, and what it knows of those of its peers.

    Args:
        segment: where pulled blocks go.
    """

    def __init__(self, segment: Segment) -> None:
        self._agent = _make_agent(progress=False)
        self._lock = threading.Lock()
        self._peers: dict[bytes, str] = {}
        self._scratch: list[npt.NDArray[np.uint8]] = []
        self._memory = [self._register(segment.data.reshape(-1))]

    def pull(self, peer: Peer, progress: PullProgress) -> None:
        """Read until every block has landed or missed, or the pull must stop.

        Raises:
            TransferFailed: the peer has no NIXL agent, or it cannot be reached.
        """
        if peer.nixl is None:
            raise TransferFailed(f"{peer.node} has no NIXL agent; start its node with NIXL too")
        scratch = self._take_scratch()
        reading = Reading(peer.layout, peer.nixl.start, progress, scratch)
        try:
            agent = self._know(peer.nixl)
            reading.run(lambda ours, theirs: self._read(agent, ours, theirs))
        except OSError as error:
            # Disconnected, so that no read that was given up writes into our memory later.
            self._forget(peer.nixl.description)
            if not reading.reached:
                raise TransferFailed(f"cannot read {peer.node} with NIXL: {error}") from error
        finally:
            with self._lock:
                self._scratch.append(scratch)

    def close(self) -> None:
        """Let go of peers and memory. No pull may be running."""
        for description in list(self._peers):
            self._forget(description)
        while self._memory:
            self._agent.deregister_memory(self._memory.pop())
        self._scratch.clear()

    def _read(self, agent: str, ours: Pieces, theirs: Pieces) -> None:
        """Read pieces of a peer's memory into pieces of ours.

        Raises:
            OSError: the peer is gone, or does not answer.
        """
        handle = None
        try:
            with self._lock:
                local = self._agent.get_xfer_descs([(*piece, 0) for piece in ours], "DRAM")
                remote = self._agent.get_xfer_descs([(*piece, 0) for piece in theirs], "DRAM")
                handle = self._agent.initialize_xfer("READ", local, remote, agent)
                state = self._agent.transfer(handle)
            deadline_s = time.monotonic() + SILENCE_LIMIT_S
            pause_s = PAUSE_LEAST_S
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"a read took longer than {SILENCE_LIMIT_S} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MOST_S)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise ConnectionError(f"a read ended as {state}")
        except OSError:
            raise
        except Exception as error:
            # NIXL's own errors share no base class but Exception.
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            if handle is not None:
                self._release(handle)

    def _release(self, handle: Any) -> None:
        """Cancel what still runs; what cannot be cancelled ends with the peer's connection."""
        with self._lock, contextlib.suppress(Exception):
            handle.release()

    def _register(self, memory: npt.NDArray[np.uint8]) -> Any:
        return self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def _take_scratch(self) -> npt.NDArray[np.uint8]:
        """Registered memory for entries of a peer's table; as much of it as pulls at once."""
        with self._lock:
            if self._scratch:
                return self._scratch.pop()
            scratch = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
            self._memory.append(self._register(scratch))
            return scratch

    def _know(self, address: NixlAddress) -> str:
        """The name of a peer's agent, made known to ours.

        Raises:
            OSError: its description is none.
        """
        with self._lock:
            known = self._peers.get(address.description)
            if known is not None:
                return known
            oldest = next(iter(self._peers)) if len(self._peers) >= PEERS_LIMIT else None
        if oldest is not None:
            self._forget(oldest)
        with self._lock:
            try:
                name: str = self._agent.add_remote_agent(address.description)
            except Exception as error:
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
            self._peers[address.description] = name
            return name

    def _forget(self, description: bytes) -> None:
        """Disconnect from a peer; nothing of ours is written by its reads from then on."""
        with self._lock:
            name = self._peers.pop(description, None)
            if name is not None:
                with contextlib.suppress(Exception):
                    self._agent.remove_remote_agent(name)
