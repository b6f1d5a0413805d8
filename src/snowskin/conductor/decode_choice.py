"""Which decode node takes a request: the least time between tokens after it has joined."""

from __future__ import annotations

import random
from math import inf

import msgspec

from snowskin.conductor.draw import draw_least, shortlist
from snowskin.cost.costs import DecodeCost
from snowskin.terms.commands import DecodeCandidate
from snowskin.terms.events import RequestArrived
from snowskin.terms.ids import NodeId


class DecodeView(msgspec.Struct, frozen=True, gc=False):
    """A decode node's load at the moment of the choice."""

    node: NodeId
    sequences: int
    """Requests placed on it, those that still prefill included."""
    context_tokens: int
    reserved_tokens: int
    """Prompts and output limits: what its engine sets aside on the device when they join."""
    sequence_limit: int
    device_tokens: int
    correction: float
    """Real over predicted step time, as observed on it."""

    def with_request(self, prompt_tokens: int, cost: DecodeCost) -> DecodeCandidate:
        """The node's load and predicted TBT with one more request."""
        sequences = self.sequences + 1
        context_tokens = self.context_tokens + prompt_tokens
        tbt_s = cost.step_s(sequences, context_tokens) * self.correction
        return DecodeCandidate(self.node, sequences, context_tokens, tbt_s)

    def has_room(self, reserve_tokens: int) -> bool:
        """Whether one more request could join at once; the engine's own rule."""
        return (
            self.sequences < self.sequence_limit
            and self.reserved_tokens + reserve_tokens <= self.device_tokens
        )


class DecodePool:
    """Every decode node that is up, with every request that was placed on it.

    Column by column, since a choice reads each of a hundred nodes once. The columns are the fleet's
    own and follow every event: they are read at once, and not kept.
    """

    __slots__ = (
        "context_tokens", "corrections", "device_tokens", "nodes", "reserved_tokens",
        "sequence_limits", "sequences",
    )  # fmt: skip

    def __init__(
        self,
        nodes: list[NodeId],
        sequences: list[int],
        context_tokens: list[int],
        reserved_tokens: list[int],
        sequence_limits: list[int],
        device_tokens: list[int],
        corrections: list[float],
    ) -> None:
        self.nodes = nodes
        self.sequences = sequences
        self.context_tokens = context_tokens
        self.reserved_tokens = reserved_tokens
        self.sequence_limits = sequence_limits
        self.device_tokens = device_tokens
        self.corrections = corrections

    def candidate(self, row: int, prompt_tokens: int, tbt_s: float) -> DecodeCandidate:
        """A node's load and predicted TBT with one more request."""
        return DecodeCandidate(
            self.nodes[row],
            self.sequences[row] + 1,
            self.context_tokens[row] + prompt_tokens,
            tbt_s,
        )


class DecodeChoice(msgspec.Struct, frozen=True, gc=False):
    """The chosen decode node, why, and the best candidates' scores."""

    chosen: DecodeCandidate
    candidates: tuple[DecodeCandidate, ...]
    reason: str


def choose_decode(
    arrived: RequestArrived, pool: DecodePool, cost: DecodeCost, rng: random.Random
) -> DecodeChoice:
    """The least predicted TBT among the nodes with room; among all if none has room.

    Equals are drawn at random. A request without room waits at its node; whether it may is for
    admission to say. Room is what the node's engine asks for: the prompt and the longest answer
    that the request may have (``engine.batching.DecodeBatch`` tells why).
    """
    prompt_tokens = arrived.prompt_tokens
    reserve_tokens = prompt_tokens + arrived.output_limit_tokens
    base_s, sequence_s, token_s = cost.base_s, cost.sequence_s, cost.context_token_s
    # As ``cost.step_s`` has it, without a call for each node.
    tbts = [
        (base_s + sequence_s * (sequences + 1) + token_s * (tokens + prompt_tokens)) * correction
        for sequences, tokens, correction in zip(
            pool.sequences, pool.context_tokens, pool.corrections
        )
    ]
    scores = tbts
    reason = "{} has the least TBT"
    # Most often even the fullest node would have room on the smallest device.
    if max(pool.sequences) >= min(pool.sequence_limits) or (
        max(pool.reserved_tokens) + reserve_tokens > min(pool.device_tokens)
    ):
        crowded = [
            sequences >= sequence_limit or tokens + reserve_tokens > device_tokens
            for sequences, sequence_limit, tokens, device_tokens in zip(
                pool.sequences,
                pool.sequence_limits,
                pool.reserved_tokens,
                pool.device_tokens,
            )
        ]
        if all(crowded):
            reason = "no decode node has room, {} is the least loaded"
        else:
            scores = [inf if full else tbt_s for full, tbt_s in zip(crowded, tbts)]
    row = draw_least(scores, rng)
    rows = shortlist(tbts, row)
    candidates = tuple([pool.candidate(listed, prompt_tokens, tbts[listed]) for listed in rows])
    return DecodeChoice(candidates[rows.index(row)], candidates, reason.format(pool.nodes[row]))
