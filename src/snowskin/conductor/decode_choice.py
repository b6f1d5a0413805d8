"""Which decode node takes a request: the least time between tokens after it has joined."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import msgspec

from snowskin.conductor.draw import draw_least, shortlist
from snowskin.cost.costs import DecodeCost
from snowskin.terms.commands import DecodeCandidate
from snowskin.terms.ids import NodeId


class DecodeView(msgspec.Struct, frozen=True, gc=False):
    """A decode node's load at the moment of the choice."""

    node: NodeId
    sequences: int
    """Requests placed on it, those that still prefill included."""
    context_tokens: int
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

    def has_room(self, prompt_tokens: int) -> bool:
        """Whether one more request, and its first token, fits."""
        return (
            self.sequences < self.sequence_limit
            and self.context_tokens + prompt_tokens < self.device_tokens
        )


class DecodeChoice(msgspec.Struct, frozen=True, gc=False):
    """The chosen decode node, why, and the best candidates' scores."""

    chosen: DecodeCandidate
    candidates: tuple[DecodeCandidate, ...]
    reason: str


def choose_decode(
    prompt_tokens: int, nodes: Sequence[DecodeView], cost: DecodeCost, rng: random.Random
) -> DecodeChoice:
    """The least predicted TBT among the nodes with room; among all if none has room.

    Equals are drawn at random. A request without room waits at its node; whether it may is for
    admission to say.
    """
    tbts = [
        cost.step_s(view.sequences + 1, view.context_tokens + prompt_tokens) * view.correction
        for view in nodes
    ]
    crowded = [not view.has_room(prompt_tokens) for view in nodes]
    if all(crowded):
        index = draw_least(tbts, rng)
        reason = f"no decode node has room, {nodes[index].node} is the least loaded"
    else:
        scores = [inf if full else tbt_s for full, tbt_s in zip(crowded, tbts, strict=True)]
        index = draw_least(scores, rng)
        reason = f"{nodes[index].node} has the least TBT"
    indices = shortlist(tbts, index)
    candidates = tuple([nodes[listed].with_request(prompt_tokens, cost) for listed in indices])
    return DecodeChoice(candidates[indices.index(index)], candidates, reason)
