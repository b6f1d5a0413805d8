"""The nodes that are up, by role, in the order of their joining."""

from __future__ import annotations

import random
from collections.abc import Mapping

from snowskin.conductor.config import ConductorConfig
from snowskin.conductor.decode_choice import DecodeView
from snowskin.conductor.prediction import Correction
from snowskin.conductor.prefill_choice import FetchSource, PrefillView
from snowskin.conductor.state import DecodeNode, PrefillNode
from snowskin.cost.profile import Profile
from snowskin.terms.events import NodeJoined
from snowskin.terms.ids import NodeId, Role


class Fleet:
    """Both pools. Corrections belong to a node's stay: a restarted node starts afresh."""

    def __init__(self, config: ConductorConfig, profile: Profile) -> None:
        self._config = config
        self._profile = profile
        self._block_bytes = profile.kv_bytes(config.block_tokens)
        self.prefill: dict[NodeId, PrefillNode] = {}
        self.decode: dict[NodeId, DecodeNode] = {}

    def __contains__(self, node: NodeId) -> bool:
        return node in self.prefill or node in self.decode

    def join(self, joined: NodeJoined) -> None:
        """A node is up, with nothing to do."""
        if joined.role is Role.PREFILL:
            self.prefill[joined.node] = PrefillNode(
                joined, link=self._correction(), compute=self._correction()
            )
        else:
            self.decode[joined.node] = DecodeNode(
                joined, link=self._correction(), compute=self._correction()
            )

    def lose(self, node: NodeId) -> None:
        """A node is gone, with all that was known of it."""
        self.prefill.pop(node, None)
        self.decode.pop(node, None)

    def node(self, node: NodeId) -> PrefillNode | DecodeNode | None:
        """A node that is up, whatever its role."""
        return self.prefill.get(node) or self.decode.get(node)

    def widest_decode_tokens(self) -> int:
        """The most tokens that any decode node's device memory holds."""
        return max([node.joined.device_tokens for node in self.decode.values()], default=0)

    def view_prefill(
        self, prefixes: Mapping[NodeId, int], usable_blocks: int, now_s: float
    ) -> list[PrefillView]:
        """Each prefill node with the prefix that it may reuse."""
        return [
            PrefillView(
                name,
                min(prefixes.get(name, 0), usable_blocks),
                node.queue_s(now_s),
                node.compute.ratio,
            )
            for name, node in self.prefill.items()
        ]

    def view_decode(self) -> list[DecodeView]:
        """Each decode node with every request that was placed on it."""
        return [node.view_placed() for node in self.decode.values()]

    def best_source(
        self, prefixes: Mapping[NodeId, int], usable_blocks: int, rng: random.Random
    ) -> FetchSource | None:
        """The holder of the longest prefix with the least bytes in flight, of either role.

        Decode nodes hold what they generated. Equals are drawn at random.
        """
        if not prefixes or not usable_blocks:
            return None
        best = min(max(prefixes.values()), usable_blocks)
        holders = [
            node
            for name, blocks in prefixes.items()
            if blocks >= best and (node := self.node(name)) is not None
        ]
        if not holders:
            return None
        if len(holders) > 1:
            least = min([node.egress_bytes for node in holders])
            holders = [node for node in holders if node.egress_bytes == least]
        source = holders[0] if len(holders) == 1 else rng.choice(holders)
        link = self._profile.transfer
        ratio = source.link.ratio
        return FetchSource(
            source.node,
            best,
            link.latency_s * ratio,
            source.egress_bytes / link.bytes_per_s * ratio,
            self._block_bytes / link.bytes_per_s * ratio,
        )

    def _correction(self) -> Correction:
        return Correction(
            weight=self._config.correction_weight, bound=self._config.correction_bound
        )
