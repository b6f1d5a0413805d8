from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.api.stop_strings import StopStrings


def shown(strings: list[str], pieces: list[str]) -> tuple[str, bool]:
    stops = StopStrings(strings)
    text = "".join(stops.push(piece) for piece in pieces)
    return text + stops.finish(), stops.stopped


def test_text_ends_before_the_stop_string() -> None:
    assert shown(["END"], ["one ENDless"]) == ("one ", True)


def test_a_stop_string_over_several_pieces_is_seen() -> None:
    assert shown(["\n\n"], ["a\n", "\nb"]) == ("a", True)


def test_text_that_may_become_a_stop_string_is_withheld_until_it_cannot() -> None:
    stops = StopStrings(["STOP"])
    assert [stops.push(piece) for piece in ("go S", "TO", "OL")] == ["go ", "", "STOOL"]


def test_withheld_text_is_shown_when_the_text_ends() -> None:
    assert shown(["STOP"], ["go STO"]) == ("go STO", False)


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    stops = StopStrings([])
    assert stops.push("anything") == "anything"


def test_nothing_is_shown_after_the_end() -> None:
    stops = StopStrings(["x"])
    assert [stops.push(piece) for piece in ("ax", "b", "c")] == ["a", "", ""]
    assert stops.finish() == ""


def test_the_stop_string_that_is_completed_first_ends_the_text() -> None:
    assert shown(["abcd", "bc"], ["abcd"]) == ("a", True)


def test_of_two_completed_together_the_longer_counts() -> None:
    assert shown(["bc", "abc"], ["xabc"]) == ("x", True)


def test_text_passed_by_is_shown_even_if_it_holds_a_stop_string() -> None:
    stops = StopStrings(["x"])
    assert stops.pass_by("axb") == "axb"
    assert stops.push("cx") == "c"


alphabet = st.text("ab\n", min_size=1, max_size=4)


@given(st.lists(alphabet, min_size=1, max_size=4), st.lists(st.text("ab\nc"), max_size=12))
def test_the_result_does_not_depend_on_the_pieces(strings: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    result, stopped = shown(strings, pieces)
    assert (result, stopped) == shown(strings, list(text)) == shown(strings, [text])
    assert text.startswith(result)
    assert stopped == any(string in text for string in strings)
    assert not any(string in result for string in strings)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_withheld_is_shorter_than_the_longest_stop_string(size: int) -> None:
    stops = StopStrings(["a" * size])
    text = "ba" * 10
    held = len(text) - len(stops.push(text)) if size > 1 else 0
    assert held < size
