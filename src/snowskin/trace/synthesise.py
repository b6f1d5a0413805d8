"""Draw a trace of a given shape: one stream of requests in order of arrival, from one seed."""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from statistics import NormalDist

import msgspec

from snowskin.terms.errors import InvalidInput
from snowskin.trace.records import TraceRequest
from snowskin.trace.shapes import Arrivals, Documents, Mixture, Sessions, Shape

STRATA = 64
"""Lengths are drawn one from each of so many equal parts of their distribution, in random order,
so that a short trace already has the mean that was asked for."""

NORMAL = NormalDist()


class LengthDraw:
    """Token counts from a log-normal law cut off at ``limit``, its mean kept at ``mean``."""

    def __init__(
        self, mean: float, sigma: float, *, limit: int, rng: random.Random, least: int = 1
    ) -> None:
        self._sigma = sigma
        self._limit = limit
        self._least = least
        self._rng = rng
        self._pending: list[float] = []
        self._fixed = round(mean) if sigma <= 0 else None
        self._mu = 0.0 if sigma <= 0 else _cut_mu(mean, sigma, limit)

    def __call__(self) -> int:
        """The next length."""
        if self._fixed is not None:
            return max(self._least, min(self._fixed, self._limit))
        if not self._pending:
            self._pending = [(part + self._rng.random()) / STRATA for part in range(STRATA)]
            self._rng.shuffle(self._pending)
        uniform = min(max(self._pending.pop(), 1e-9), 1 - 1e-9)
        length = math.exp(self._mu + self._sigma * NORMAL.inv_cdf(uniform))
        return max(self._least, min(round(length), self._limit))


def _cut_mu(mean: float, sigma: float, limit: int) -> float:
    """The location at which min(X, limit), X log-normal, has this mean; by bisection."""
    if mean >= limit:
        raise InvalidInput(f"a mean of {mean} tokens does not fit under {limit}", parameter="shape")

    def cut_mean(mu: float) -> float:
        edge = (math.log(limit) - mu) / sigma
        body = math.exp(mu + sigma * sigma / 2.0) * NORMAL.cdf(edge - sigma)
        return body + limit * (1.0 - NORMAL.cdf(edge))

    low, high = -5.0, math.log(limit) + 6.0 * sigma
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return low


def _gaps(shape: Shape, rate_per_s: float, rng: random.Random) -> Callable[[], float]:
    """Draws the time to the next independent arrival."""
    mean_s = 1.0 / rate_per_s
    if shape.arrivals is Arrivals.POISSON:
        return lambda: rng.expovariate(rate_per_s)
    form = 1.0 / shape.burstiness**2
    return lambda: rng.gammavariate(form, mean_s / form)


class _BlockNames:
    """Hands out names of blocks that nobody had before."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int) -> tuple[int, ...]:
        start = self._next
        self._next += count
        return tuple(range(start, self._next))


def synthesise(shape: Shape, *, seed: int, block_tokens: int = 512) -> Iterator[TraceRequest]:
    """The requests of a trace of this shape, one by one, in order of arrival.

    Blocks are full blocks. The same arguments give the same requests.
    """
    if block_tokens < 1:
        raise InvalidInput(f"block tokens must be at least 1, got {block_tokens}")
    _prompt_limit(shape)
    drawn = _draw(shape, seed, block_tokens)
    return _stamped(drawn, shape.stamp_s) if shape.stamp_s else drawn


def _stamped(drawn: Iterator[TraceRequest], stamp_s: float) -> Iterator[TraceRequest]:
    for request in drawn:
        arrival_s = request.arrival_s // stamp_s * stamp_s
        yield msgspec.structs.replace(request, arrival_s=arrival_s)


def _draw(shape: Shape, seed: int, block_tokens: int) -> Iterator[TraceRequest]:
    rng = random.Random(f"trace-{shape.name}-{seed}")
    output = LengthDraw(
        shape.output_tokens, shape.output_sigma, limit=shape.output_limit_tokens, rng=rng
    )
    match shape.structure:
        case Sessions():
            return _draw_sessions(shape, shape.structure, output, rng, block_tokens)
        case Documents():
            return _draw_documents(shape, shape.structure, output, rng, block_tokens)
        case Mixture():
            return _draw_mixture(shape, shape.structure, seed, block_tokens)


def _draw_mixture(
    shape: Shape, mixture: Mixture, seed: int, block_tokens: int
) -> Iterator[TraceRequest]:
    """Each part as a trace of its own, with its share of rate and requests, in one order."""
    streams: list[Iterator[TraceRequest]] = []
    count = len(mixture.parts)
    begun, shares = 0, 0.0
    for index, part in enumerate(mixture.parts):
        shares += part.share
        end = round(shape.requests * shares)
        if end == begun:
            continue
        alone = msgspec.structs.replace(
            shape,
            name=f"{shape.name}-{index}",
            requests=end - begun,
            rate_per_s=shape.rate_per_s * part.share,
            structure=part.structure,
            output_tokens=part.output_tokens,
            output_sigma=part.output_sigma,
        )
        begun = end
        streams.append(_renamed(_draw(alone, seed, block_tokens), index, count))
    return heapq.merge(*streams, key=lambda request: request.arrival_s)


def _renamed(drawn: Iterator[TraceRequest], index: int, count: int) -> Iterator[TraceRequest]:
    """No block of one of ``count`` parts has the name of another's."""
    for request in drawn:
        blocks = tuple([block * count + index for block in request.blocks])
        yield msgspec.structs.replace(request, blocks=blocks)


def _prompt_limit(shape: Shape) -> int:
    limit = shape.context_tokens - shape.output_limit_tokens
    if limit < 1:
        raise InvalidInput(
            f"context of {shape.context_tokens} tokens leaves no room for a prompt beside "
            f"{shape.output_limit_tokens} output tokens",
            parameter="shape",
        )
    return limit


class _Turn(msgspec.Struct):
    """The next turn of a conversation that goes on."""

    prompt_tokens: int
    blocks: tuple[int, ...]
    is_later: bool


def _draw_sessions(
    shape: Shape, sessions: Sessions, output: LengthDraw, rng: random.Random, block_tokens: int
) -> Iterator[TraceRequest]:
    limit = _prompt_limit(shape)
    first = LengthDraw(sessions.first_tokens, sessions.first_sigma, limit=limit, rng=rng)
    message = LengthDraw(sessions.message_tokens, sessions.message_sigma, limit=limit, rng=rng)
    turns = 1.0 + sessions.continue_ratio / (1.0 - sessions.again_ratio)
    starts_per_s = shape.rate_per_s / turns
    gap = _gaps(shape, starts_per_s, rng)
    names = _BlockNames()
    system = names.fresh(sessions.system_tokens // block_tokens)
    serial = 0
    waiting: list[tuple[float, int, _Turn | None]] = [(gap(), serial, None)]
    for _ in range(shape.requests):
        arrival_s, _, turn = heapq.heappop(waiting)
        if turn is None:
            prompt = min(sessions.system_tokens + first(), limit)
            turn = _Turn(prompt, system[: prompt // block_tokens], False)
            serial += 1
            heapq.heappush(waiting, (arrival_s + gap(), serial, None))
        full = turn.prompt_tokens // block_tokens
        blocks = turn.blocks + names.fresh(full - len(turn.blocks))
        answer = output()
        yield TraceRequest(arrival_s, turn.prompt_tokens, answer, blocks)
        longer = turn.prompt_tokens + answer + message()
        chance = sessions.again_ratio if turn.is_later else sessions.continue_ratio
        if rng.random() < chance and longer <= limit:
            serial += 1
            later_s = arrival_s + rng.expovariate(1.0 / sessions.think_s)
            heapq.heappush(waiting, (later_s, serial, _Turn(longer, blocks, True)))


def _draw_documents(
    shape: Shape, documents: Documents, output: LengthDraw, rng: random.Random, block_tokens: int
) -> Iterator[TraceRequest]:
    limit = _prompt_limit(shape)
    document = LengthDraw(documents.document_tokens, documents.document_sigma, limit=limit, rng=rng)
    question = LengthDraw(documents.question_tokens, documents.question_sigma, limit=limit, rng=rng)
    gap = _gaps(shape, shape.rate_per_s, rng)
    names = _BlockNames()
    system = names.fresh(documents.system_tokens // block_tokens)

    def new_text() -> tuple[int, tuple[int, ...]]:
        tokens = documents.system_tokens + document()
        return tokens, system + names.fresh(tokens // block_tokens - len(system))

    now_s = 0.0
    for tokens, shared in islice(_texts(documents, shape.requests, new_text, rng), shape.requests):
        now_s += gap()
        prompt = min(tokens + question(), limit)
        full = prompt // block_tokens
        blocks = shared[:full] + names.fresh(max(0, full - len(shared)))
        yield TraceRequest(now_s, prompt, output(), blocks)


_Text = tuple[int, tuple[int, ...]]


def _texts(
    documents: Documents, requests: int, new_text: Callable[[], _Text], rng: random.Random
) -> Iterator[_Text]:
    """The document that each request is about, without end."""
    if documents.questions:
        yield from _until_exhausted(documents.questions, requests, new_text, rng)
    texts = [new_text() for _ in range(documents.fixed_count)]
    weights = [1.0 / (rank + 1) ** documents.zipf_exponent for rank in range(len(texts))]
    popularity = list(accumulate(weights))
    while True:
        if documents.fixed_count:
            yield texts[bisect(popularity, rng.random() * popularity[-1])]
        elif texts and rng.random() < documents.again_ratio:
            yield rng.choice(texts)
        else:
            texts.append(new_text())
            yield texts[-1]


def _until_exhausted(
    mean: float, requests: int, new_text: Callable[[], _Text], rng: random.Random
) -> Iterator[_Text]:
    """Documents with ``requests`` questions in all, asked in random order."""
    deck: list[tuple[_Text, int]] = []
    while requests:
        questions = 1
        while questions < requests and rng.random() < 1.0 - 1.0 / mean:
            questions += 1
        requests -= questions
        deck.append((new_text(), questions))
    while deck:
        index = rng.randrange(len(deck))
        text, left = deck[index]
        yield text
        if left > 1:
            deck[index] = (text, left - 1)
        else:
            deck[index] = deck[-1]
            deck.pop()
