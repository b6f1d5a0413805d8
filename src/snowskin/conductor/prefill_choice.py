"""Which prefill node takes a request: Algorithm 1 of the paper, and its rivals.

A policy is a plain function of frozen views. ``POLICIES`` lists them all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from snowskin.cost.costs import PrefillCost
from snowskin.terms.commands import PrefillCandidate
from snowskin.terms.ids import NodeId


class PrefillView(msgspec.Struct, frozen=True, gc=False):
    """A prefill node at the moment of the choice."""

    node: NodeId
    local_blocks: int
    """Leading blocks of this prompt that it holds, and may reuse."""
    queue_s: float
    """Predicted time until it could start."""
    correction: float
    """Real over predicted prefill time, as observed on it."""


class FetchSource(msgspec.Struct, frozen=True, gc=False):
    """The best replica of the longest prefix: the holder with the least bytes in flight."""

    node: NodeId
    blocks: int
    latency_s: float
    queued_s: float
    """Time that its link needs for what it already sends."""
    block_s: float
    """Time for one block over its link."""

    def transfer_s(self, blocks: int) -> float:
        """Predicted time to fetch so many blocks from it."""
        return self.latency_s + self.queued_s + blocks * self.block_s


class PrefillQuestion(msgspec.Struct, frozen=True, gc=False):
    """What a policy is asked."""

    prompt_tokens: int
    block_tokens: int
    cost: PrefillCost
    balancing_threshold: float
    source: FetchSource | None
    """None if no node holds a block of the prompt."""


class PrefillChoice(msgspec.Struct, frozen=True, gc=False):
    """A policy's answer, with its reason and every candidate's scores."""

    chosen: PrefillCandidate
    candidates: tuple[PrefillCandidate, ...]
    reason: str


Policy = Callable[[PrefillQuestion, Sequence[PrefillView], random.Random], PrefillChoice]


def choose_at_random(
    question: PrefillQuestion, nodes: Sequence[PrefillView], rng: random.Random
) -> PrefillChoice:
    """Any node, with equal chance; it reuses what it happens to hold."""
    candidates = tuple(_local_candidate(question, view) for view in nodes)
    return PrefillChoice(rng.choice(candidates), candidates, "drawn at random")


def choose_least_queue(
    question: PrefillQuestion, nodes: Sequence[PrefillView], rng: random.Random
) -> PrefillChoice:
    """The node that is free soonest, whatever it holds."""
    candidates = tuple(_local_candidate(question, view) for view in nodes)
    least_s = min(candidate.queue_s for candidate in candidates)
    chosen = _draw([c for c in candidates if c.queue_s == least_s], rng)
    return PrefillChoice(chosen, candidates, f"{chosen.node} has the shortest queue")


def choose_least_local_ttft(
    question: PrefillQuestion, nodes: Sequence[PrefillView], rng: random.Random
) -> PrefillChoice:
    """The least T_queue + T_prefill, with each node's own prefix only (FAST '25, Fig. 5)."""
    candidates = tuple(_local_candidate(question, view) for view in nodes)
    chosen = _least_ttft(candidates, rng)
    return PrefillChoice(chosen, candidates, _reason(chosen))


def choose_by_algorithm_1(
    question: PrefillQuestion, nodes: Sequence[PrefillView], rng: random.Random
) -> PrefillChoice:
    """The least T_transfer + T_queue + T_prefill (arXiv 2407.00079 §6.1, Algorithm 1).

    A node whose own prefix is near enough to the best one computes locally. Any other may fetch
    the difference from the best replica. We depart from the paper in one point: such a node takes
    the better of fetching and computing locally, where the paper always fetches. A fetch over a
    congested link can cost more than it saves, and then nobody would gain by it.
    """
    source = question.source
    if source is None:
        return choose_least_local_ttft(question, nodes, rng)
    threshold = question.balancing_threshold
    candidates: list[PrefillCandidate] = []
    for view in nodes:
        local = _local_candidate(question, view)
        # Without a local prefix the ratio is infinite, and 0 × threshold is below any source.
        if source.blocks > view.local_blocks and source.blocks >= view.local_blocks * threshold:
            fetched = _fetching_candidate(question, view, source)
            candidates.append(fetched if fetched.ttft_s < local.ttft_s else local)
        else:
            candidates.append(local)
    chosen = _least_ttft(candidates, rng)
    return PrefillChoice(chosen, tuple(candidates), _reason(chosen))


POLICIES: dict[str, Policy] = {
    "kvcache-centric": choose_by_algorithm_1,
    "cache-aware": choose_least_local_ttft,
    "load-balance": choose_least_queue,
    "random": choose_at_random,
}
"""Every way to choose a prefill node, by the name that the command line uses."""


def _local_candidate(question: PrefillQuestion, view: PrefillView) -> PrefillCandidate:
    blocks = view.local_blocks
    prefill_s = question.cost.seconds(question.prompt_tokens, blocks * question.block_tokens)
    return PrefillCandidate(
        view.node, blocks, blocks, 0.0, view.queue_s, prefill_s * view.correction
    )


def _fetching_candidate(
    question: PrefillQuestion, view: PrefillView, source: FetchSource
) -> PrefillCandidate:
    reused_tokens = source.blocks * question.block_tokens
    return PrefillCandidate(
        view.node,
        view.local_blocks,
        source.blocks,
        source.transfer_s(source.blocks - view.local_blocks),
        view.queue_s,
        question.cost.seconds(question.prompt_tokens, reused_tokens) * view.correction,
        source.node,
    )


def _least_ttft(candidates: Sequence[PrefillCandidate], rng: random.Random) -> PrefillCandidate:
    times = [candidate.ttft_s for candidate in candidates]
    least_s = min(times)
    return _draw([c for c, ttft_s in zip(candidates, times, strict=True) if ttft_s == least_s], rng)


def _draw(equals: list[PrefillCandidate], rng: random.Random) -> PrefillCandidate:
    """Random among equals, or an idle cluster's load would pile up on its first node."""
    return equals[0] if len(equals) == 1 else rng.choice(equals)


def _reason(chosen: PrefillCandidate) -> str:
    if chosen.fetch_from is not None:
        fetched = chosen.reused_blocks - chosen.local_blocks
        return f"least TTFT: {chosen.node} fetches {fetched} blocks from {chosen.fetch_from}"
    if chosen.local_blocks:
        return f"least TTFT: {chosen.node} holds {chosen.local_blocks} blocks of the prompt"
    return f"least TTFT: {chosen.node} computes the whole prompt"
