"""Which prefill node takes a request: Algorithm 1 of the paper, and its rivals.

A policy is a plain function of frozen views. ``POLICIES`` lists them all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from snowskin.conductor.draw import draw_least, shortlist
from snowskin.cost.costs import LinkCost, PrefillCost
from snowskin.terms.commands import PrefillCandidate
from snowskin.terms.ids import NodeId


class PrefillPool:
    """Every prefill node that may take a request, at the moment of the choice.

    Column by column, since a choice reads each of a hundred nodes once.
    """

    __slots__ = ("corrections", "local_blocks", "nodes", "queue_s")

    def __init__(
        self,
        nodes: list[NodeId],
        local_blocks: list[int],
        queue_s: list[float],
        corrections: list[float],
    ) -> None:
        self.nodes = nodes
        self.local_blocks = local_blocks
        """Leading blocks of this prompt that a node holds, and may reuse."""
        self.queue_s = queue_s
        """Predicted time until a node could start."""
        self.corrections = corrections
        """Real over predicted prefill time, as observed on a node."""


class FetchSource(msgspec.Struct, frozen=True, gc=False):
    """The best replica of the longest prefix: the holder with the least bytes in flight."""

    node: NodeId
    blocks: int
    busy_bytes: int
    """That it already sends."""
    block_bytes: int
    link: LinkCost
    correction: float
    """Real over predicted time, as observed on fetches from it."""
    measured: Mapping[NodeId, LinkCost] = MappingProxyType({})
    """Links from it as the nodes at their other ends measured them: truer than both of these."""

    def transfer_s(self, blocks: int) -> float:
        """Predicted time to fetch so many blocks from it, to a node that has measured nothing."""
        return self.link.seconds(self.busy_bytes + blocks * self.block_bytes) * self.correction

    def measured_s(self, node: NodeId, blocks: int) -> float | None:
        """Predicted time to fetch so many blocks from it to a node that has measured the link."""
        link = self.measured.get(node)
        return None if link is None else link.seconds(self.busy_bytes + blocks * self.block_bytes)


class PrefillQuestion(msgspec.Struct, frozen=True, gc=False):
    """What a policy is asked."""

    prompt_tokens: int
    block_tokens: int
    cost: PrefillCost
    balancing_threshold: float
    source: FetchSource | None
    """None if no node holds a block of the prompt."""

    def prefill_s(self, reused_blocks: int) -> float:
        """Predicted time to prefill, before correction."""
        return self.cost.seconds(self.prompt_tokens, reused_blocks * self.block_tokens)

    def may_fetch(self, local_blocks: int) -> bool:
        """Whether the best prefix is so much longer than a node's own that a fetch is considered.

        Without a local prefix the ratio is infinite: 0 × threshold is below any source.
        """
        best_blocks = self.source.blocks if self.source is not None else 0
        return best_blocks > local_blocks and best_blocks >= local_blocks * self.balancing_threshold


class PrefillChoice(msgspec.Struct, frozen=True, gc=False):
    """A policy's answer, with its reason and the best candidates' scores, in node order."""

    chosen: PrefillCandidate
    candidates: tuple[PrefillCandidate, ...]
    reason: str


Policy = Callable[[PrefillQuestion, PrefillPool, random.Random], PrefillChoice]


def choose_at_random(
    question: PrefillQuestion, pool: PrefillPool, rng: random.Random
) -> PrefillChoice:
    """Any node, with equal chance; it reuses what it happens to hold."""
    index = rng.randrange(len(pool.nodes))
    seconds = _PrefillSeconds(question)
    candidates, chosen = _choice(pool, _local_ttfts(seconds, pool), index, seconds)
    return PrefillChoice(chosen, candidates, "drawn at random")


def choose_least_queue(
    question: PrefillQuestion, pool: PrefillPool, rng: random.Random
) -> PrefillChoice:
    """The node that is free soonest, whatever it holds."""
    index = draw_least(pool.queue_s, rng)
    candidates, chosen = _choice(pool, pool.queue_s, index, _PrefillSeconds(question))
    return PrefillChoice(chosen, candidates, f"{chosen.node} has the shortest queue")


def choose_least_local_ttft(
    question: PrefillQuestion, pool: PrefillPool, rng: random.Random
) -> PrefillChoice:
    """The least T_queue + T_prefill, with each node's own prefix only (FAST '25, Fig. 5)."""
    seconds = _PrefillSeconds(question)
    ttfts = _local_ttfts(seconds, pool)
    candidates, chosen = _choice(pool, ttfts, draw_least(ttfts, rng), seconds)
    return PrefillChoice(chosen, candidates, _reason(chosen))


def choose_by_algorithm_1(
    question: PrefillQuestion, pool: PrefillPool, rng: random.Random
) -> PrefillChoice:
    """The least T_transfer + T_queue + T_prefill (arXiv 2407.00079 §6.1, Algorithm 1).

    A node whose own prefix is near enough to the best one computes locally. Any other may fetch
    the difference from the best replica. We depart from the paper in one point: such a node takes
    the better of fetching and computing locally, where the paper always fetches. A fetch over a
    congested link can cost more than it saves, and then nobody would gain by it.
    """
    source = question.source
    if source is None:
        return choose_least_local_ttft(question, pool, rng)
    seconds = _PrefillSeconds(question)
    ttfts = _local_ttfts(seconds, pool)
    fetching = _fetch_seconds(question, source, pool)
    if fetching:
        fetched_s = seconds.of(source.blocks)
        ttfts = [
            ttft_s
            if transfer_s is None
            or ttft_s <= (fetching_s := transfer_s + queue_s + fetched_s * correction)
            else fetching_s
            for ttft_s, transfer_s, queue_s, correction in zip(
                ttfts, fetching, pool.queue_s, pool.corrections
            )
        ]
    least = draw_least(ttfts, rng)
    candidates, chosen = _choice(pool, ttfts, least, seconds, fetching, source)
    return PrefillChoice(chosen, candidates, _reason(chosen))


POLICIES: dict[str, Policy] = {
    "kvcache-centric": choose_by_algorithm_1,
    "cache-aware": choose_least_local_ttft,
    "load-balance": choose_least_queue,
    "random": choose_at_random,
}
"""Every way to choose a prefill node, by the name that the command line uses."""


class _PrefillSeconds:
    """Predicted prefill time by reused blocks: most nodes hold the same few prefixes."""

    __slots__ = ("_known", "_question")

    def __init__(self, question: PrefillQuestion) -> None:
        self._question = question
        self._known: dict[int, float] = {}

    def of(self, reused_blocks: int) -> float:
        """Before correction."""
        seconds = self._known.get(reused_blocks)
        if seconds is None:
            seconds = self._known[reused_blocks] = self._question.prefill_s(reused_blocks)
        return seconds


def _local_ttfts(seconds: _PrefillSeconds, pool: PrefillPool) -> list[float]:
    return [
        queue_s + seconds.of(blocks) * correction
        for queue_s, blocks, correction in zip(pool.queue_s, pool.local_blocks, pool.corrections)
    ]


def _fetch_seconds(
    question: PrefillQuestion, source: FetchSource, pool: PrefillPool
) -> list[float | None]:
    """What a fetch would take each node, None where none is open to it; empty if to nobody."""
    transfers = {
        blocks: source.transfer_s(source.blocks - blocks)
        for blocks in set(pool.local_blocks)
        if question.may_fetch(blocks)
    }
    if not transfers:
        return []
    fetching = [transfers.get(blocks) for blocks in pool.local_blocks]
    if source.measured:
        for index, (node, blocks) in enumerate(zip(pool.nodes, pool.local_blocks)):
            if blocks in transfers:
                measured_s = source.measured_s(node, source.blocks - blocks)
                fetching[index] = fetching[index] if measured_s is None else measured_s
    return fetching


def _candidate(
    pool: PrefillPool,
    index: int,
    seconds: _PrefillSeconds,
    fetching: list[float | None] | None,
    source: FetchSource | None,
) -> PrefillCandidate:
    """A node as it would do best: by a fetch, where that is open to it and pays."""
    blocks, queue_s = pool.local_blocks[index], pool.queue_s[index]
    correction = pool.corrections[index]
    prefill_s = seconds.of(blocks) * correction
    transfer_s = fetching[index] if fetching else None
    if source is not None and transfer_s is not None:
        fetched_s = seconds.of(source.blocks) * correction
        if transfer_s + queue_s + fetched_s < queue_s + prefill_s:
            return PrefillCandidate(
                pool.nodes[index],
                blocks,
                source.blocks,
                transfer_s,
                queue_s,
                fetched_s,
                source.node,
            )
    return PrefillCandidate(pool.nodes[index], blocks, blocks, 0.0, queue_s, prefill_s)


def _choice(
    pool: PrefillPool,
    scores: list[float],
    chosen: int,
    seconds: _PrefillSeconds,
    fetching: list[float | None] | None = None,
    source: FetchSource | None = None,
) -> tuple[tuple[PrefillCandidate, ...], PrefillCandidate]:
    """The candidates worth recording, in node order, and the chosen one among them."""
    indices = shortlist(scores, chosen)
    candidates = tuple([_candidate(pool, index, seconds, fetching, source) for index in indices])
    return candidates, candidates[indices.index(chosen)]


def _reason(chosen: PrefillCandidate) -> str:
    if chosen.fetch_from is not None:
        fetched = chosen.reused_blocks - chosen.local_blocks
        return f"least TTFT: {chosen.node} fetches {fetched} blocks from {chosen.fetch_from}"
    if chosen.local_blocks:
        return f"least TTFT: {chosen.node} holds {chosen.local_blocks} blocks of the prompt"
    return f"least TTFT: {chosen.node} computes the whole prompt"
