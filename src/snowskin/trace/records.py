"""A trace: when requests arrived, how long they were, and which prompt blocks they shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from snowskin.terms.errors import InvalidInput

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SPAN_LIMIT_S = 366 * 86_400
"""Most seconds from the first request to the last: a year. Our choice: whoever has more has
mistaken the unit, and to simulate the heartbeats of a year takes seconds, not hours."""

ADD_BATCH = 10_000
"""Requests that are turned into columns at once."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace."""

    arrival_s: float
    """Seconds since the trace began."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Names of the prompt's blocks in order. Equal names mean an equal prefix up to there."""


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """Requests in order of arrival, as columns (a quarter of a million of them fit 60 MB).

    ``block_ids[block_starts[i]:block_starts[i + 1]]`` are the blocks of request ``i``. The last of
    them may be a partial block: some published traces name it as well.
    """

    name: str
    block_tokens: int
    sharing_known: bool
    """False where the source tells nothing of shared prefixes; each block is then its own."""
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    block_ids: Ints
    block_starts: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __iter__(self) -> Iterator[TraceRequest]:
        ids = self.block_ids.tolist()
        starts = self.block_starts.tolist()
        columns = zip(
            self.arrival_s.tolist(),
            self.prompt_tokens.tolist(),
            self.output_tokens.tolist(),
            strict=True,
        )
        for index, (arrival_s, prompt, output) in enumerate(columns):
            blocks = tuple(ids[starts[index] : starts[index + 1]])
            yield TraceRequest(arrival_s, prompt, output, blocks)

    def sped_up(self, factor: float) -> Trace:
        """The same requests with every gap divided by ``factor``.

        Raises:
            InvalidInput: the factor is not above 0, or the last request would come too late.
        """
        if not factor > 0:
            raise InvalidInput(f"speed must be above 0, got {factor}", parameter="speed")
        if self.arrival_s[-1] / factor > SPAN_LIMIT_S:
            raise InvalidInput(
                f"at speed {factor:g} the last request of {self.name!r} would come after more than "
                f"a year; give a speed of at least {self.arrival_s[-1] / SPAN_LIMIT_S:.2g}",
                parameter="speed",
            )
        return replace(self, arrival_s=self.arrival_s / factor)

    def head(self, count: int) -> Trace:
        """The first ``count`` requests."""
        if count < 1:
            raise InvalidInput(f"requests must be at least 1, got {count}", parameter="requests")
        count = min(count, len(self))
        return replace(
            self,
            arrival_s=self.arrival_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            block_ids=self.block_ids[: self.block_starts[count]],
            block_starts=self.block_starts[: count + 1],
        )


class TraceBuilder:
    """Gathers requests, in batches or one by one, into a Trace."""

    def __init__(self, name: str, *, block_tokens: int, sharing_known: bool = True) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self.sharing_known = sharing_known
        self._batches: list[tuple[Floats, Ints, Ints, Ints, Ints]] = []

    def add_batch(
        self, arrival_s: Floats, prompt: Ints, output: Ints, counts: Ints, block_ids: Ints
    ) -> None:
        """Append requests; ``counts[i]`` blocks belong to the i-th."""
        self._batches.append((arrival_s, prompt, output, counts, block_ids))

    def add(self, requests: Iterable[TraceRequest]) -> TraceBuilder:
        """Append requests one by one; a generator's are never all in memory at once."""
        left = iter(requests)
        while rows := list(islice(left, ADD_BATCH)):
            self.add_batch(
                np.array([row.arrival_s for row in rows], dtype=np.float64),
                np.array([row.prompt_tokens for row in rows], dtype=np.int64),
                np.array([row.output_tokens for row in rows], dtype=np.int64),
                np.array([len(row.blocks) for row in rows], dtype=np.int64),
                np.fromiter(chain.from_iterable(row.blocks for row in rows), dtype=np.int64),
            )
        return self

    def build(self) -> Trace:
        """The trace, ordered by arrival (equal times keep their order).

        Raises:
            InvalidInput: there is no request, or the last one comes too late.
        """
        if not sum(len(batch[0]) for batch in self._batches):
            raise InvalidInput(f"the trace {self.name!r} holds no request", parameter="trace")
        columns = [np.concatenate(column) for column in zip(*self._batches, strict=True)]
        arrival_s, prompt, output, counts, block_ids = columns
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        if not self.sharing_known:
            block_ids = np.arange(starts[-1], dtype=np.int64)
        else:
            block_ids = _by_prefix(block_ids, starts)
        if np.any(np.diff(arrival_s) < 0):
            order = np.argsort(arrival_s, kind="stable")
            pieces = [block_ids[starts[row] : starts[row + 1]] for row in order]
            arrival_s, prompt, output = arrival_s[order], prompt[order], output[order]
            block_ids = np.concatenate(pieces)
            starts = np.concatenate(([0], np.cumsum(counts[order]))).astype(np.int64)
        span_s = arrival_s[-1] - arrival_s[0]
        if span_s > SPAN_LIMIT_S:
            raise InvalidInput(
                f"the last request of the trace {self.name!r} comes {span_s:g} s after the first: "
                "more than a year (Mooncake's timestamps are in ms, ours in s)",
                parameter="trace",
            )
        return Trace(
            self.name,
            self.block_tokens,
            self.sharing_known,
            arrival_s - arrival_s[0],
            prompt.astype(np.int64),
            output.astype(np.int64),
            block_ids.astype(np.int64),
            starts,
        )


def _by_prefix(block_ids: Ints, starts: Ints) -> Ints:
    """Ids that stand for whole prefixes, as those of the released traces do.

    Where a block follows different blocks in two requests they do not. Then they are taken for
    names of what the blocks hold, and each is named anew by its id and all that is before it.
    """
    before = np.empty_like(block_ids)
    before[1:] = block_ids[:-1]
    before[starts[:-1][np.diff(starts) > 0]] = -1
    if len(block_ids) and block_ids.max() > 4 * len(block_ids):
        names = np.unique(block_ids, return_inverse=True)[1]
    else:
        names = block_ids
    follows = np.empty(names.max(initial=0) + 1, dtype=np.int64)
    follows[names] = before
    if np.array_equal(follows[names], before):
        return block_ids
    renamed: dict[tuple[int, int], int] = {}
    fresh = np.empty_like(block_ids)
    name = -1
    for at, (own, is_first) in enumerate(zip(block_ids.tolist(), before < 0, strict=True)):
        prefix = (-1 if is_first else name, own)
        fresh[at] = name = renamed.setdefault(prefix, len(renamed))
    return fresh


def trace_of(name: str, requests: Iterable[TraceRequest], *, block_tokens: int) -> Trace:
    """A trace of these requests."""
    return TraceBuilder(name, block_tokens=block_tokens).add(requests).build()
