from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.terms.errors import InvalidInput
from snowskin.trace.describe import describe
from snowskin.trace.formats import read_trace, write_trace
from snowskin.trace.records import trace_of
from snowskin.trace.shapes import (
    SHAPES,
    Arrivals,
    Documents,
    Mixture,
    Shape,
    fixed_shape,
    shape_named,
)
from snowskin.trace.synthesise import LengthDraw, synthesise


@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize("name", list(SHAPES))
def test_a_drawn_trace_has_the_published_statistics(name: str, seed: int) -> None:
    shape = SHAPES[name]
    summary = describe(trace_of(name, synthesise(shape, seed=seed), block_tokens=512))
    assert summary.requests == shape.requests
    assert summary.prompt_tokens.mean == pytest.approx(shape.prompt_tokens, rel=0.06)
    assert summary.output_tokens.mean == pytest.approx(shape.output_tokens, rel=0.03)
    assert summary.hit_ratio_blocks == pytest.approx(shape.cache_ratio, abs=0.03)
    assert summary.rate_per_s == pytest.approx(shape.rate_per_s, rel=0.08)


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    shape = msgspec.structs.replace(SHAPES["conversation"], requests=300)
    drawn = list(synthesise(shape, seed=3))
    assert drawn == list(synthesise(shape, seed=3))
    assert drawn != list(synthesise(shape, seed=4))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(drawn))


def test_bursty_arrivals_vary_more_than_poisson() -> None:
    for arrivals, least, most in ((Arrivals.POISSON, 0.9, 1.1), (Arrivals.BURSTY, 2.0, 4.5)):
        shape = msgspec.structs.replace(SHAPES["synthetic"], arrivals=arrivals)
        summary = describe(trace_of("t", synthesise(shape, seed=1), block_tokens=512))
        assert least < summary.arrival_cv < most


def test_parts_of_a_mixture_keep_their_shares_and_have_no_block_in_common() -> None:
    shape = msgspec.structs.replace(SHAPES["tool-agent"], requests=2_000)
    drawn = list(synthesise(shape, seed=0))
    assert len(drawn) == 2_000
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(drawn))
    heads = Counter(request.blocks[0] for request in drawn if request.blocks)
    (_, talks), (_, first_tool), (_, second_tool) = heads.most_common(3)
    assert (talks + first_tool + second_tool) / 2_000 > 0.99
    assert talks == pytest.approx(930, abs=20)
    assert (first_tool, second_tool) == (770, 300)


def test_arrivals_are_noted_to_the_stamp() -> None:
    shape = msgspec.structs.replace(SHAPES["conversation"], requests=500)
    stamps = {request.arrival_s / shape.stamp_s for request in synthesise(shape, seed=0)}
    assert len(stamps) < 100
    assert all(stamp == round(stamp) for stamp in stamps)


@given(st.integers(1, 300), st.floats(1.0, 6.0), st.integers(0, 50))
def test_documents_with_a_count_of_questions_share_more_towards_the_end(
    requests: int, questions: float, seed: int
) -> None:
    shape = Shape(
        name="deck",
        requests=requests,
        prompt_tokens=1_000,
        output_tokens=10,
        output_sigma=0.0,
        cache_ratio=0.5,
        rate_per_s=1.0,
        arrivals=Arrivals.POISSON,
        structure=Documents(
            document_tokens=900,
            document_sigma=0.0,
            question_tokens=10,
            question_sigma=0.0,
            fixed_count=0,
            questions=questions,
        ),
    )
    drawn = list(synthesise(shape, seed=seed, block_tokens=100))
    assert len(drawn) == requests
    documents = Counter(request.blocks[0] for request in drawn)
    assert sum(documents.values()) == requests
    if questions == 1.0:
        assert set(documents.values()) == {1}


def test_questions_on_documents_meet_few_known_ones_at_first_and_hardly_any_new_at_last() -> None:
    deck = SHAPES["synthetic"]
    drawn = [r for r in synthesise(deck, seed=0) if len(r.blocks) > 5]
    known: set[int] = set()
    again: list[bool] = []
    for request in drawn:
        again.append(request.blocks[0] in known)
        known.add(request.blocks[0])
    tenth = len(again) // 10
    assert sum(again[:tenth]) < 0.25 * tenth
    assert sum(again[-tenth:]) > 0.9 * tenth


def test_shares_of_a_mixture_must_add_up() -> None:
    mixture = SHAPES["synthetic"].structure
    assert isinstance(mixture, Mixture)
    with pytest.raises(InvalidInput, match="add up to 1"):
        Mixture(mixture.parts[:1])


def test_fixed_lengths_are_fixed_and_share_what_was_asked() -> None:
    shape = fixed_shape(16_384, 512, cache_ratio=0.5)
    trace = trace_of("t", synthesise(shape, seed=0), block_tokens=512)
    assert set(trace.prompt_tokens.tolist()) == {16_384}
    assert set(trace.output_tokens.tolist()) == {512}
    assert describe(trace).hit_ratio_blocks == pytest.approx(0.5, abs=0.02)


def test_prompts_never_leave_the_context() -> None:
    shape = msgspec.structs.replace(SHAPES["conversation"], requests=2_000, context_tokens=32_000)
    for request in synthesise(shape, seed=0):
        assert request.prompt_tokens >= 1
        assert request.prompt_tokens + request.output_tokens <= 32_000
        assert len(request.blocks) == request.prompt_tokens // 512


def test_a_written_drawing_reads_back_the_same(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(SHAPES["tool-agent"], requests=200)
    drawn = list(synthesise(shape, seed=0, block_tokens=64))
    path = tmp_path / "t.jsonl"
    write_trace(path, drawn, block_tokens=64, name="t")
    first_s = drawn[0].arrival_s
    again = [msgspec.structs.replace(row, arrival_s=row.arrival_s - first_s) for row in drawn]
    assert list(read_trace(path)) == again


def test_cut_off_lengths_keep_the_mean_that_was_asked_for() -> None:
    draw = LengthDraw(10_000, 1.4, limit=60_000, rng=random.Random(0))
    values = [draw() for _ in range(6_400)]
    assert sum(values) / len(values) == pytest.approx(10_000, rel=0.02)
    assert max(values) <= 60_000


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="conversation, tool-agent"):
        shape_named("novel")
    with pytest.raises(InvalidInput):
        fixed_shape(0, 5)
    with pytest.raises(InvalidInput, match="leaves no room"):
        synthesise(msgspec.structs.replace(SHAPES["conversation"], context_tokens=1_000), seed=0)
