from __future__ import annotations

import json

import pytest

from snowskin.api.choice_text import ChoiceDelta, PlacedToken
from snowskin.api.choices import Usage
from snowskin.api.errors import ApiError, as_api_error
from snowskin.api.formats import ChatFormat, Collected, CompletionFormat, token_name
from snowskin.api.plans import Plan, Prompt
from snowskin.api.reply import event
from snowskin.api.tokenizer import TextTokenizer
from snowskin.terms.errors import InvalidInput, NodeUnavailable, Overloaded, RequestFailed
from snowskin.terms.ids import RequestId
from snowskin.terms.request import GenerationRequest, SampledToken, TokenLogprob

USAGE = Usage(prompt_tokens=7, cached_tokens=4, output_tokens=2)


def plan(*, logprobs: bool = False, include_usage: bool = False, echo: str = "") -> Plan:
    request = GenerationRequest(RequestId("req-1"), (5,), (), 10)
    prompt = Prompt((5,), (request,), echo=echo)
    return Plan("m", (prompt,), (), stream=True, include_usage=include_usage, logprobs=logprobs)


def delta(tokenizer: TextTokenizer, text: str, reason: str | None = None) -> ChoiceDelta:
    placed = []
    at = 0
    for token in tokenizer.encode(text, add_special_tokens=False):
        length = len(tokenizer.decode([token]))
        sampled = SampledToken(token, -0.25, (TokenLogprob(40, -1.5),))
        placed.append(PlacedToken(sampled, at, at + length))
        at += length
    assert reason in (None, "stop", "length")
    return ChoiceDelta(0, text, tuple(placed), reason)


def test_an_event_is_one_line_of_json_between_empty_lines() -> None:
    data = event({"text": "a\n\n😀\u2028"})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert json.loads(data[6:]) == {"text": "a\n\n😀\u2028"}


def test_a_chat_chunk_has_text_and_its_end_a_chunk_of_its_own(tokenizer: TextTokenizer) -> None:
    chunks = ChatFormat(plan(), tokenizer).chunks(delta(tokenizer, "core", "length"))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"content": "core"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [None, None]


def test_a_delta_with_nothing_to_show_makes_no_chunk(tokenizer: TextTokenizer) -> None:
    nothing = ChoiceDelta(0, "", (PlacedToken(SampledToken(40), 0, 0),), None)
    assert ChatFormat(plan(), tokenizer).chunks(nothing) == []
    assert CompletionFormat(plan(), tokenizer).chunks(nothing) == []


def test_a_chat_without_a_token_still_has_its_logprobs_field(tokenizer: TextTokenizer) -> None:
    whole = ChatFormat(plan(logprobs=True), tokenizer).whole([Collected([], [], "stop")], USAGE)
    assert whole["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert whole["choices"][0]["message"]["content"] == ""


def test_completion_logprobs_are_four_lists_of_one_length(tokenizer: TextTokenizer) -> None:
    [chunk] = CompletionFormat(plan(logprobs=True), tokenizer).chunks(delta(tokenizer, "The core"))
    logprobs = chunk["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in logprobs.values()}) == 1
    assert "".join(logprobs["tokens"]) == "The core"
    assert logprobs["top_logprobs"][0] == {tokenizer.decode([40]): -1.5}


def test_an_echo_opens_a_streamed_completion(tokenizer: TextTokenizer) -> None:
    [opening] = CompletionFormat(plan(echo="Once"), tokenizer).opening()
    assert opening["choices"][0]["text"] == "Once"
    assert CompletionFormat(plan(), tokenizer).opening() == []


@pytest.mark.parametrize("make", [ChatFormat, CompletionFormat])
def test_usage_counts_prompt_and_output_and_names_the_cached_part(
    make: type[ChatFormat | CompletionFormat], tokenizer: TextTokenizer
) -> None:
    form = make(plan(include_usage=True), tokenizer)
    chunk = form.usage_chunk(USAGE)
    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    [first, *_] = form.chunks(delta(tokenizer, "core"))
    assert first["usage"] is None
    assert form.whole([Collected(["x"], [], "stop")], USAGE)["usage"] == chunk["usage"]


def test_a_token_is_named_by_its_text_or_else_by_its_bytes() -> None:
    assert token_name("é".encode()) == "é"
    assert token_name(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert token_name(b"") == ""


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (InvalidInput("x", parameter="n"), 400, "invalid_request_error", None),
        (Overloaded("x", retry_after_s=0.0), 429, "rate_limit_error", "1"),
        (Overloaded("x", retry_after_s=2.0), 429, "rate_limit_error", "2"),
        (Overloaded("x", retry_after_s=2.01), 429, "rate_limit_error", "3"),
        (NodeUnavailable("x"), 503, "service_unavailable_error", "8"),
        (RequestFailed("x"), 500, "server_error", None),
    ],
)
def test_each_error_of_the_cluster_has_its_answer(
    error: Exception, status: int, kind: str, retry_after: str | None
) -> None:
    answer = as_api_error(error, unavailable_retry_s=7.5)
    assert answer is not None
    assert (answer.status, answer.kind) == (status, kind)
    assert answer.headers().get("retry-after") == retry_after
    assert set(answer.body()["error"]) == {"message", "type", "param", "code"}


def test_an_error_that_nobody_foresaw_has_no_answer_of_its_own() -> None:
    assert as_api_error(ValueError("x"), unavailable_retry_s=1) is None
    assert as_api_error(ApiError("x"), unavailable_retry_s=1) is not None
