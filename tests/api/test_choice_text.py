from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.api.choice_text import ChoiceDelta, ChoiceText
from snowskin.api.tokenizer import TextTokenizer
from snowskin.terms.ids import RequestId
from snowskin.terms.request import GenerationRequest, SampledToken
from snowskin.terms.serving import FinishReason, TokensArrived

END = 1
"""The end token of the byte-level tokenizer."""


def choice(tokenizer: TextTokenizer, *stop_strings: str, min_output_tokens: int = 0) -> ChoiceText:
    request = GenerationRequest(
        request=RequestId("req-1"),
        tokens=(5,),
        keys=(),
        output_limit_tokens=1000,
        stop_tokens=(END,),
        min_output_tokens=min_output_tokens,
    )
    return ChoiceText(0, request, tokenizer, stop_strings=stop_strings)


def arrived(
    *tokens: int, reason: FinishReason | None = None, cached_tokens: int = 0
) -> TokensArrived:
    return TokensArrived(tuple(map(SampledToken, tokens)), cached_tokens, reason)


def texts(deltas: list[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_a_stop_token_is_counted_but_has_no_text_and_no_logprob(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("The core", add_special_tokens=False)
    text = choice(tokenizer)
    delta = text.take(arrived(*tokens, END, reason="stop", cached_tokens=4))
    assert (delta.text, delta.finish_reason) == ("The core", "stop")
    assert len(delta.tokens) == len(tokens)
    assert (text.output_tokens, text.cached_tokens) == (len(tokens) + 1, 4)


def test_a_token_that_stops_elsewhere_is_text_where_generation_goes_on(
    tokenizer: TextTokenizer,
) -> None:
    delta = choice(tokenizer).take(arrived(END, 40, reason="length"))
    assert delta.text == tokenizer.decode([40])
    assert len(delta.tokens) == 2


def test_withheld_text_and_its_tokens_come_with_the_end(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("a STO", add_special_tokens=False)
    text = choice(tokenizer, "STOP")
    first = text.take(arrived(*tokens))
    last = text.take(arrived(END, reason="stop"))
    assert first.text + last.text == "a STO"
    assert "S" not in first.text
    assert len(first.tokens) + len(last.tokens) == len(tokens)
    assert last.tokens


def test_a_character_that_never_completes_is_shown_at_the_end(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("🦀", add_special_tokens=False)[:-1]
    delta = choice(tokenizer).take(arrived(*tokens, reason="length"))
    assert delta.text == "\ufffd"


def test_tokens_after_a_stop_string_in_the_same_message_are_dropped(
    tokenizer: TextTokenizer,
) -> None:
    tokens = tokenizer.encode("one.two.three", add_special_tokens=False)
    text = choice(tokenizer, ".")
    delta = text.take(arrived(*tokens))
    assert (delta.text, delta.finish_reason) == ("one", "stop")
    assert text.finished
    assert text.output_tokens < len(tokens)
    assert all(token.start < 3 for token in delta.tokens)


def test_tokens_after_the_end_are_our_mistake(tokenizer: TextTokenizer) -> None:
    text = choice(tokenizer)
    text.take(arrived(END, reason="stop"))
    with pytest.raises(AssertionError, match="after the end"):
        text.take(arrived(40))


words = st.text(st.sampled_from("ab .🦀é"), max_size=30)
stops = st.lists(st.text(st.sampled_from("ab .🦀"), min_size=1, max_size=3), max_size=4)


@given(answer=words, strings=stops, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_messages_may_be_merged_without_changing_the_answer(
    tokenizer: TextTokenizer, answer: str, strings: list[str], cuts: list[int]
) -> None:
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    merged, single = choice(tokenizer, *strings), choice(tokenizer, *strings)
    results = []
    for text, bounds in ((merged, edges), (single, list(range(len(tokens) + 1)))):
        deltas = []
        for low, high in pairwise(bounds):
            if not text.finished:
                deltas.append(text.take(arrived(*tokens[low:high])))
        if not text.finished:
            deltas.append(text.take(arrived(END, reason="stop")))
        placed = [token for delta in deltas for token in delta.tokens]
        results.append((texts(deltas), placed, deltas[-1].finish_reason, text.output_tokens))
    assert results[0] == results[1]


@given(answer=words, strings=stops)
def test_tokens_are_released_with_their_text_and_in_order(
    tokenizer: TextTokenizer, answer: str, strings: list[str]
) -> None:
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    text = choice(tokenizer, *strings)
    shown, released = 0, []
    for token in tokens:
        delta = text.take(arrived(token))
        shown += len(delta.text)
        released += delta.tokens
        if text.finished:
            break
        assert all(placed.end <= shown for placed in delta.tokens)
    assert [placed.sampled.token for placed in released] == tokens[: len(released)]
    assert all(a.end == b.start for a, b in pairwise(released))
