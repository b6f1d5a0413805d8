"""Small builders: a cluster in round numbers, whose times can be told without a calculator.

A block has 100 tokens and 100 kB. Computing it takes 100 ms, fetching it 10 ms.
"""

import random
from typing import Any

import msgspec

from snowskin.conductor.conductor import Conductor
from snowskin.conductor.config import ConductorConfig
from snowskin.conductor.laws import check_laws
from snowskin.cost.costs import DecodeCost, LinkCost, PrefillCost
from snowskin.cost.profile import Profile
from snowskin.terms.commands import Command, RejectRequest, StartPrefill
from snowskin.terms.events import (
    BlocksCommitted,
    DecodeStarted,
    Event,
    FetchFinished,
    KvLanded,
    NodeJoined,
    Outcome,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestFinished,
)
from snowskin.terms.ids import BlockKey, NodeId, RequestId, Role, SlotIndex, Tier

BLOCK = 100
BLOCK_BYTES = 100_000
PROFILE = Profile(
    name="round",
    model="round",
    hardware="round",
    source="made up",
    kv_bytes_per_token=1000,
    prefill=PrefillCost(0.0, 1e-3, 0.0),
    decode=DecodeCost(10e-3, 1e-3, 1e-6),
    transfer=LinkCost(0.0, 10e6),
    load=LinkCost(0.0, 1e9),
)
P0, P1, P2 = (NodeId(f"prefill-{index}") for index in range(3))
D0, D1 = (NodeId(f"decode-{index}") for index in range(2))


def keys(story: str, blocks: int) -> tuple[BlockKey, ...]:
    """The keys of a prompt; the same story shares its blocks."""
    return tuple(BlockKey(f"{story:>8}{index:08}".encode()) for index in range(blocks))


def joined(node: NodeId, **limits: int) -> NodeJoined:
    role = Role.PREFILL if node.startswith("prefill") else Role.DECODE
    limits = {"block_count": 1000, "sequence_limit": 100, "device_tokens": 100_000, **limits}
    return NodeJoined(node, role, **limits)


def arrival(
    name: str, tokens: int = 1001, *, story: str | None = None, output_limit: int = 100
) -> RequestArrived:
    prompt = keys(story if story is not None else name, tokens // BLOCK)
    return RequestArrived(RequestId(name), tokens, prompt, output_limit)


def held(node: NodeId, story: str, blocks: int) -> BlocksCommitted:
    held = keys(story, blocks)
    return BlocksCommitted(node, Tier.DRAM, held, (SlotIndex(0),) * blocks, (1,) * blocks)


class Cluster:
    """A Conductor with a clock, that checks every law after every event."""

    def __init__(
        self,
        nodes: tuple[NodeId, ...] = (P0, P1, D0, D1),
        *,
        seed: int = 0,
        profile: Profile = PROFILE,
        **config: Any,
    ) -> None:
        settings = ConductorConfig(**{"block_tokens": BLOCK, "correction_weight": 0.5, **config})
        self.conductor = Conductor(settings, profile, random.Random(seed))
        self.now_s = 0.0
        self.tell(*map(joined, nodes))

    def tell(self, *events: Event, after_s: float = 0.0) -> tuple[Command, ...]:
        """Tell events at one moment; answers all commands together."""
        self.now_s += after_s
        commands: tuple[Command, ...] = ()
        for event in events:
            commands += self.conductor.handle(event, now_s=self.now_s)
            check_laws(self.conductor)
        return commands

    def place(self, event: RequestArrived) -> StartPrefill:
        """Let a request arrive which must be let in."""
        *_, start = self.tell(event)
        assert isinstance(start, StartPrefill), start
        return start

    def refuse(self, event: RequestArrived) -> RejectRequest:
        """Let a request arrive which must be turned away."""
        (reject,) = self.tell(event)
        assert isinstance(reject, RejectRequest), reject
        return reject

    def run(self, start: StartPrefill, *, until: str = "decode") -> tuple[Command, ...]:
        """Bring a request to the end of its ``prefill``, or of the way into its ``decode`` node."""
        name = start.request
        chosen = next(c for c in start.decision.prefill if c.node == start.prefill)
        commands: tuple[Command, ...] = ()
        if start.fetch is not None:
            blocks = len(start.fetch.blocks)
            fetched = FetchFinished(
                name,
                start.prefill,
                start.fetch.source,
                blocks,
                blocks * BLOCK_BYTES,
                blocks * 0.01,
            )
            commands += self.tell(fetched, after_s=chosen.transfer_s)
        commands += self.tell(
            PrefillStarted(name, start.prefill, chosen.reused_blocks * BLOCK),
        )
        commands += self.tell(
            PrefillFinished(name, start.prefill, chosen.prefill_s), after_s=chosen.prefill_s
        )
        if until == "decode":
            commands += self.tell(
                KvLanded(name, start.decode, 0, 0.0), DecodeStarted(name, start.decode)
            )
        return commands

    def finish(self, start: StartPrefill, outcome: Outcome = Outcome.COMPLETED) -> None:
        self.tell(RequestFinished(start.request, outcome, 10))


def with_link(bytes_per_s: float) -> Profile:
    return msgspec.structs.replace(PROFILE, transfer=LinkCost(0.0, bytes_per_s))
