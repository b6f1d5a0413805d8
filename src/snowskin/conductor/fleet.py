"""The nodes that are up, by role, in the order of their joining."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import compress

from snowskin.conductor.admission import Refusal
from snowskin.conductor.config import ConductorConfig
from snowskin.conductor.decode_choice import DecodePool
from snowskin.conductor.prediction import Correction
from snowskin.conductor.prefill_choice import FetchSource, PrefillPool
from snowskin.conductor.state import (
    DecodeColumns,
    DecodeNode,
    Node,
    PrefillColumns,
    PrefillNode,
)
from snowskin.cost.profile import Profile
from snowskin.terms.commands import RejectCause
from snowskin.terms.events import IncomingTraffic, NodeJoined
from snowskin.terms.ids import NodeId, Role

_NO_NODE_RETRY_S = 5.0
"""A launcher restarts a node within seconds; no prediction of ours knows better."""


class Fleet:
    """Both pools. Corrections belong to a node's stay: a restarted node starts afresh.

    What its peers have shown is the best guess for a node that has shown nothing: with a factor of
    1 among peers that are faster than their profile, a new node would be left idle.
    """

    def __init__(self, config: ConductorConfig, profile: Profile) -> None:
        self._config = config
        self._profile = profile
        self._block_bytes = profile.kv_bytes(config.block_tokens)
        self.prefill: dict[NodeId, PrefillNode] = {}
        self.decode: dict[NodeId, DecodeNode] = {}
        self._nodes: dict[NodeId, Node] = {}
        self._incoming: dict[NodeId, tuple[IncomingTraffic, ...]] = {}
        """Each node's last word of its links from its peers."""
        self._line_up()

    def __contains__(self, node: NodeId) -> bool:
        return node in self._nodes

    def join(self, joined: NodeJoined) -> None:
        """A node is up, with nothing to do."""
        link = self._correction([node.link for node in self._nodes.values()])
        if joined.role is Role.PREFILL:
            compute = self._correction([node.compute for node in self.prefill.values()])
            prefill = PrefillNode(joined, link=link, compute=compute)
            self.prefill[joined.node] = self._nodes[joined.node] = prefill
        else:
            compute = self._correction([node.compute for node in self.decode.values()])
            decode = DecodeNode(joined, link=link, compute=compute)
            self.decode[joined.node] = self._nodes[joined.node] = decode
        self._line_up()

    def lose(self, node: NodeId) -> None:
        """A node is gone, with all that was known of it."""
        self.hear_traffic(node, ())
        del self._nodes[node]
        self.prefill.pop(node, None)
        self.decode.pop(node, None)
        self._line_up()

    def node(self, node: NodeId) -> Node | None:
        """A node that is up, whatever its role."""
        return self._nodes.get(node)

    def widest_decode_tokens(self) -> int:
        """The most tokens that any decode node's device memory holds."""
        return self._widest_decode_tokens

    def obstacle(self, now_s: float) -> Refusal | None:
        """What keeps every request from being placed; None if nothing does."""
        if not self.prefill:
            return Refusal(RejectCause.NO_NODE, "no prefill node is up", _NO_NODE_RETRY_S)
        if not self.decode:
            return Refusal(RejectCause.NO_NODE, "no decode node is up", _NO_NODE_RETRY_S)
        for node in self.prefill.values():
            if not node.is_full():
                return None
        # A place is free as soon as the first of a queue is done.
        room_in_s = min([node.mean_turn_s(now_s) for node in self.prefill.values()])
        return Refusal(
            RejectCause.PREFILL_FULL, "the queue of every prefill node is full", room_in_s
        )

    def view_prefill(
        self, prefixes: Mapping[NodeId, int], usable_blocks: int, now_s: float
    ) -> PrefillPool:
        """The prefill nodes whose queue is not full, with the prefix that each may reuse."""
        columns = self._prefill_columns
        held = [prefixes.get(node, 0) for node in columns.nodes]
        if max(held) > usable_blocks:
            held = [min(blocks, usable_blocks) for blocks in held]
        # As ``PrefillNode.queue_s`` has it, without a call for each node.
        queue_s = [
            queued_s + left_s if (left_s := running_s - (now_s - since_s)) > 0 else queued_s
            for queued_s, running_s, since_s in zip(
                columns.queued_s, columns.running_s, columns.since_s
            )
        ]
        if min(columns.free_places) > 0:
            return PrefillPool(columns.nodes, held, queue_s, columns.corrections)
        open_rows = [places > 0 for places in columns.free_places]
        return PrefillPool(
            list(compress(columns.nodes, open_rows)),
            list(compress(held, open_rows)),
            list(compress(queue_s, open_rows)),
            list(compress(columns.corrections, open_rows)),
        )

    def view_decode(self) -> DecodePool:
        """Every decode node with every request that was placed on it."""
        return self._decode_pool

    def hear_traffic(self, reporter: NodeId, incoming: Sequence[IncomingTraffic]) -> None:
        """A node says what it still waits for from each of its peers, and how fast that comes."""
        for traffic in self._incoming.pop(reporter, ()):
            if (peer := self._nodes.get(traffic.peer)) is not None:
                peer.forget_traffic(reporter)
        if incoming:
            self._incoming[reporter] = tuple(incoming)
        for traffic in incoming:
            if (peer := self._nodes.get(traffic.peer)) is not None:
                peer.hear_traffic(reporter, traffic, self._profile.transfer)

    def best_source(
        self, prefixes: dict[NodeId, int], usable_blocks: int, rng: random.Random
    ) -> FetchSource | None:
        """The holder of the longest prefix with the least bytes in flight, of either role.

        Decode nodes hold what they generated. Equals are drawn at random.

        Args:
            prefixes: the longest last, as ``Directory.longest_prefix`` gives them.
        """
        if not prefixes or not usable_blocks:
            return None
        best = usable_blocks
        least = 0
        holders: list[Node] = []
        for name, blocks in reversed(prefixes.items()):
            node = self._nodes.get(name)
            if node is None:
                continue
            if not holders:
                best = min(blocks, usable_blocks)
            elif blocks < best:
                break
            busy_bytes = node.busy_bytes
            if not holders or busy_bytes < least:
                least, holders = busy_bytes, [node]
            elif busy_bytes == least:
                holders.append(node)
        if not holders:
            return None
        source = holders[0] if len(holders) == 1 else rng.choice(holders[::-1])
        return FetchSource(
            source.node,
            best,
            least,
            self._block_bytes,
            self._profile.transfer,
            source.link.ratio,
            source.measured,
        )

    def _line_up(self) -> None:
        """Give each node its row in the columns that choices read."""
        self._prefill_columns = PrefillColumns(len(self.prefill))
        for row, prefill in enumerate(self.prefill.values()):
            prefill.show_in(self._prefill_columns, row)
        columns = self._decode_columns = DecodeColumns(len(self.decode))
        for row, decode in enumerate(self.decode.values()):
            decode.show_in(columns, row)
        self._widest_decode_tokens = max(columns.device_tokens, default=0)
        self._decode_pool = DecodePool(
            columns.nodes,
            columns.sequences,
            columns.context_tokens,
            columns.reserved_tokens,
            columns.sequence_limits,
            columns.device_tokens,
            columns.corrections,
        )

    def _correction(self, peers: Sequence[Correction]) -> Correction:
        return Correction(
            weight=self._config.correction_weight,
            bound=self._config.correction_bound,
            start=sum([peer.ratio for peer in peers]) / len(peers) if peers else 1.0,
        )
