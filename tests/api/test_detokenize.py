from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snowskin.api.detokenize import WINDOW_LIMIT_TOKENS, IncrementalText
from snowskin.api.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"
texts = st.text(
    st.sampled_from("ab  \n.é月餅😀🥮ß\u200d") | st.characters(codec="utf-8"), max_size=60
)


def pieces(tokenizer: TextTokenizer, tokens: list[int], context: tuple[int, ...] = ()) -> list[str]:
    incremental = IncrementalText(tokenizer, context)
    return [*(incremental.push(token) for token in tokens), incremental.finish()]


@given(text=texts)
def test_pieces_of_byte_level_tokens_join_to_the_full_text(
    tokenizer: TextTokenizer, text: str
) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, tokens)) == text == tokenizer.decode(tokens)


@given(text=texts)
def test_pieces_of_byte_fallback_tokens_join_to_the_full_text(
    fallback_tokenizer: TextTokenizer, text: str
) -> None:
    tokens = fallback_tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(fallback_tokenizer, tokens)) == fallback_tokenizer.decode(tokens)


@settings(max_examples=300)
@given(tokens=st.lists(st.integers(0, 600), max_size=WINDOW_LIMIT_TOKENS))
def test_pieces_of_any_tokens_even_broken_ones_join_to_the_full_text(
    tokenizer: TextTokenizer, tokens: list[int]
) -> None:
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@given(text=texts)
def test_no_piece_but_the_last_shows_half_a_character(tokenizer: TextTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(pieces(tokenizer, tokens)[:-1])


def test_an_emoji_split_over_tokens_comes_whole_with_its_last(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("🦀", add_special_tokens=False)
    assert len(tokens) > 1
    assert pieces(tokenizer, tokens) == [""] * (len(tokens) - 1) + ["🦀", ""]


def test_an_unfinished_character_shows_only_at_the_end(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("ok 🦀", add_special_tokens=False)[:-1]
    assert "".join(pieces(tokenizer, tokens)[:-1]).strip() == "ok"
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_first_word_loses_its_space_only_where_it_begins_a_text(
    fallback_tokenizer: TextTokenizer,
) -> None:
    tokens = fallback_tokenizer.encode("the capital is", add_special_tokens=False)
    for cut in range(1, len(tokens)):
        before, after = tokens[:cut], tokens[cut:]
        going_on = "".join(pieces(fallback_tokenizer, after, context=tuple(before)))
        assert fallback_tokenizer.decode(before) + going_on == "the capital is"


def test_special_tokens_between_words_leave_the_words_spaces(
    fallback_tokenizer: TextTokenizer,
) -> None:
    first, second = (
        fallback_tokenizer.encode(word, add_special_tokens=False) for word in ("the", "core")
    )
    tokens = [*first, 2, *second]
    assert "".join(pieces(fallback_tokenizer, tokens)) == "the core"
    assert fallback_tokenizer.decode(tokens) == "the core"


@pytest.mark.parametrize("kind", ["tokenizer", "fallback_tokenizer"])
def test_broken_text_without_end_is_decoded_in_a_bounded_window(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: TextTokenizer = request.getfixturevalue(kind)
    half = tokenizer.encode("🦀", add_special_tokens=False)[-1]
    assert tokenizer.token_bytes(half) == b"\x80"
    incremental = IncrementalText(tokenizer)
    shown = "".join(incremental.push(half) for _ in range(1000))
    assert len(incremental._window) <= 2 * WINDOW_LIMIT_TOKENS
    assert set(shown) == {REPLACEMENT}
