"""Which nodes there are, how they are, and what they have counted over all their restarts."""

from __future__ import annotations

import msgspec

from snowskin.cluster import messages as m
from snowskin.terms.events import NodeReported
from snowskin.terms.ids import NodeId, Role
from snowskin.terms.serving import NodeState, NodeStatus
from snowskin.transfer.messenger import Peer


class _Entry:
    """One node."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.state = NodeState.STARTING
        self.peer: Peer | None = None
        self.heard_s = 0.0
        self.report: NodeReported | None = None
        self.counters = m.NodeCounters()
        self.committed_before = 0
        self.evicted_before = 0


class Roster:
    """The front's list of nodes. Fixed in its members, changed in their states."""

    def __init__(self, roles: dict[NodeId, Role]) -> None:
        self._entries = {node: _Entry(role) for node, role in roles.items()}

    def role(self, node: NodeId) -> Role:
        """What the node computes."""
        return self._entries[node].role

    def peer(self, node: NodeId) -> Peer | None:
        """The node's Messenger; None while the node is not ready."""
        return self._entries[node].peer

    def is_ready(self, node: NodeId) -> bool:
        """True where the node takes work."""
        return self._entries[node].state is NodeState.READY

    @property
    def all_ready(self) -> bool:
        """True where every node takes work."""
        return all(entry.state is NodeState.READY for entry in self._entries.values())

    @property
    def can_serve(self) -> bool:
        """True where each role has a node that takes work."""
        ready = {e.role for e in self._entries.values() if e.state is NodeState.READY}
        return ready == set(Role)

    def join(self, ready: m.NodeReady, *, now_s: float) -> None:
        """The node takes work."""
        entry = self._entries[ready.node]
        entry.state = NodeState.READY
        entry.peer = ready.peer
        entry.heard_s = now_s

    def hear(self, node: NodeId, beat: m.Heartbeat, *, now_s: float) -> None:
        """The node lives."""
        entry = self._entries[node]
        entry.heard_s = now_s
        entry.report = beat.report
        entry.counters = beat.counters

    def lose(self, node: NodeId) -> bool:
        """The node's process has ended; True where it was taking work."""
        entry = self._entries[node]
        was_ready = entry.state is NodeState.READY
        entry.state = NodeState.LOST
        entry.peer = None
        entry.report = None
        entry.committed_before += entry.counters.committed_blocks
        entry.evicted_before += entry.counters.evicted_blocks
        entry.counters = m.NodeCounters()
        return was_ready

    def silent(self, *, now_s: float, timeout_s: float) -> tuple[NodeId, ...]:
        """Ready nodes that have said nothing for ``timeout_s``."""
        return tuple(
            node
            for node, entry in self._entries.items()
            if entry.state is NodeState.READY and now_s - entry.heard_s > timeout_s
        )

    def status(self, node: NodeId, *, pid: int | None, restarts: int) -> NodeStatus:
        """The node now, and its totals."""
        entry = self._entries[node]
        counters = entry.counters
        status = NodeStatus(
            node=node,
            role=entry.role,
            state=entry.state,
            pid=pid,
            restarts=restarts,
            block_count=counters.blocks_total,
            used_blocks=counters.blocks_used,
            committed_blocks=entry.committed_before + counters.committed_blocks,
            evicted_blocks=entry.evicted_before + counters.evicted_blocks,
        )
        if entry.report is None:
            return status
        return msgspec.structs.replace(
            status,
            running_sequences=entry.report.running_sequences,
            waiting_sequences=entry.report.waiting_sequences,
            context_tokens=entry.report.context_tokens,
        )

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """All of them, in a fixed order."""
        return tuple(self._entries)
