"""What is wrong with a request is said by name, in OpenAI's error body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snowskin.api.config import ApiConfig
from snowskin.api.errors import ApiError
from snowskin.api.parsing import parse_body
from snowskin.api.prepare import Preparer
from snowskin.api.schemas import ChatBody, CompletionBody
from snowskin.api.tokenizer import TextTokenizer
from snowskin.terms.errors import InvalidInput
from tests.api.rule_machine import RuleMachine
from tests.api.texts import byte_level_dir

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def preparer(machine: RuleMachine, tokenizer: TextTokenizer) -> Preparer:
    return Preparer(machine.info, tokenizer, ApiConfig())


def refused_chat(preparer: Preparer, **fields: Any) -> ApiError:
    body = json.dumps({"messages": USER, **fields})
    with pytest.raises(ApiError) as raised:
        preparer.chat(body.encode())
    return raised.value


def refused_completion(preparer: Preparer, **fields: Any) -> ApiError:
    body = json.dumps({"prompt": "Hi", **fields})
    with pytest.raises(ApiError) as raised:
        preparer.completion(body.encode())
    return raised.value


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("temperature", 2.5, "0 <= temperature <= 2"),
        ("temperature", -1, "0 <= temperature <= 2"),
        ("top_p", 0, "0 < top_p <= 1"),
        ("top_k", -2, "-1 <= top_k <= 2147483647"),
        ("top_k", 2**64, "-1 <= top_k <= 2147483647"),
        ("min_p", 1.5, "0 <= min_p <= 1"),
        ("n", 0, "1 <= n <= 128"),
        ("n", 129, "1 <= n <= 128"),
        ("max_tokens", 0, "1 <= max_tokens"),
        ("max_completion_tokens", -5, "1 <= max_completion_tokens"),
        ("presence_penalty", 3, "-2 <= presence_penalty <= 2"),
        ("frequency_penalty", -3, "-2 <= frequency_penalty <= 2"),
        ("repetition_penalty", 0, "0.01 <= repetition_penalty <= 10"),
        ("repetition_penalty", 1e-320, "0.01 <= repetition_penalty <= 10"),
        ("top_logprobs", 21, "0 <= top_logprobs <= 20"),
        ("seed", 2**63, "-9223372036854775808 <= seed <= 9223372036854775807"),
        ("min_tokens", -1, "0 <= min_tokens"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_range(
    preparer: Preparer, field: str, value: float, accepted: str
) -> None:
    error = refused_chat(preparer, **{field: value})
    assert (error.status, error.param, error.kind) == (400, field, "invalid_request_error")
    assert field in error.message
    assert str(value) in error.message
    assert accepted in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("n", 1.5),
        ("n", "2"),
        ("stream", "yes"),
        ("seed", 2**70),
        ("stop", ["a"] * 5),
        ("stop", [""]),
        ("stop", [7]),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"0" * 20 + "512": 1}),
        ("logit_bias", {"0" * 5000 + "1": 1}),
        ("logit_bias", [5]),
        ("stop_token_ids", [512]),
        ("cache_salt", ""),
        ("messages", []),
        ("messages", "Hi"),
        ("stream_options", {"include_usage": True}),
        ("top_logprobs", 2),
        ("user", 5),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(
    preparer: Preparer, field: str, value: object
) -> None:
    error = refused_chat(preparer, **{field: value})
    assert (error.status, (error.param or "").split(".")[0]) == (400, field)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_no_json(preparer: Preparer, value: float) -> None:
    assert refused_chat(preparer, temperature=value).code == "invalid_json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {}),
        ("store", True),
        ("reasoning_effort", "high"),
        ("structured_outputs", {"json": {}}),
        ("best_of", 2),
    ],
)
def test_a_known_but_unserved_parameter_is_refused_as_such(
    preparer: Preparer, field: str, value: object
) -> None:
    error = refused_chat(preparer, **{field: value})
    assert (error.code, error.param) == ("unsupported_parameter", field)
    assert "not supported" in error.message


def test_unserved_parameters_that_ask_for_nothing_are_accepted(preparer: Preparer) -> None:
    body = {
        "messages": USER,
        "tools": [],
        "functions": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "best_of": 1,
        "store": False,
        "metadata": {"a": "b"},
        "user": "someone",
        "temperature": None,
    }
    plan = preparer.chat(json.dumps(body).encode())
    assert plan.prompts[0].choices[0].sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages.0.content"),
        ({"role": "wizard", "content": "x"}, "messages.0.role"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages.0.tool_call_id"),
        ({"role": "tool", "content": "x"}, "messages.0.role"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages.0.tool_calls"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages.0.content",
        ),
        ({"role": "user", "content": "x", "mood": "good"}, "messages.0.mood"),
        ("Hi", "messages.0"),
    ],
)
def test_what_is_wrong_in_a_message_is_named_by_its_place(
    preparer: Preparer, message: object, param: str
) -> None:
    assert refused_chat(preparer, messages=[message]).param == param


def test_an_unknown_parameter_is_named(preparer: Preparer) -> None:
    error = refused_chat(preparer, temprature=1)
    assert (error.code, error.param) == ("unknown_parameter", "temprature")
    assert "'temprature'" in error.message


def test_a_missing_parameter_is_named(preparer: Preparer) -> None:
    with pytest.raises(ApiError) as raised:
        preparer.chat(b"{}")
    assert (raised.value.code, raised.value.param) == ("missing_required_parameter", "messages")


@pytest.mark.parametrize(
    "prompt",
    [[], "", [[]], [5, "x"], ["x", 5], [[5], 5], {"a": 1}, [True], [-1], [512], 7, [[5.5]]],
)
def test_a_prompt_of_no_known_form_is_refused(preparer: Preparer, prompt: object) -> None:
    assert refused_completion(preparer, prompt=prompt).param == "prompt"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [("suffix", "x", "suffix"), ("best_of", 3, "best_of"), ("logprobs", True, "logprobs")],
)
def test_completions_have_refusals_of_their_own(
    preparer: Preparer, field: str, value: object, param: str
) -> None:
    assert refused_completion(preparer, **{field: value}).param == param


def test_echo_with_logprobs_is_refused(preparer: Preparer) -> None:
    assert refused_completion(preparer, echo=True, logprobs=1).param == "echo"


def test_prompts_times_choices_are_bounded(preparer: Preparer) -> None:
    error = refused_completion(preparer, prompt=["a"] * 65, n=2)
    assert "130 generations" in error.message


def test_a_prompt_too_long_is_refused_with_both_lengths(preparer: Preparer) -> None:
    error = refused_completion(preparer, prompt=[5] * 190, max_tokens=11)
    assert error.code == "context_length_exceeded"
    assert all(number in error.message for number in ("190", "11", "201", "200"))
    alone = refused_chat(preparer, messages=[{"role": "user", "content": "€" * 400}])
    assert alone.code == "context_length_exceeded"
    assert "200 tokens" in alone.message


def test_a_prompt_that_leaves_little_room_has_a_shorter_default_output(preparer: Preparer) -> None:
    plan = preparer.completion(json.dumps({"prompt": [5] * 195}).encode())
    assert plan.prompts[0].choices[0].output_limit_tokens == 5


def test_a_chat_may_fill_the_context_unless_the_settings_say_less(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    body = json.dumps({"messages": USER}).encode()
    free = Preparer(machine.info, tokenizer, ApiConfig()).chat(body).prompts[0]
    assert free.choices[0].output_limit_tokens == 200 - len(free.tokens)
    bound = Preparer(machine.info, tokenizer, ApiConfig(chat_output_tokens=9)).chat(body)
    assert bound.prompts[0].choices[0].output_limit_tokens == 9


def test_min_tokens_above_the_limit_is_refused(preparer: Preparer) -> None:
    error = refused_completion(preparer, min_tokens=6, max_tokens=5)
    assert (error.param, "5" in error.message) == ("min_tokens", True)


def test_a_model_that_is_not_served_is_not_found(preparer: Preparer) -> None:
    error = refused_chat(preparer, model="gpt-4")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_chats_need_a_chat_template(machine: RuleMachine, tmp_path: Path) -> None:
    bare = TextTokenizer.load(byte_level_dir(tmp_path, template=None))
    error = refused_chat(Preparer(machine.info, bare, ApiConfig()))
    assert error.code == "no_chat_template"
    assert "/v1/completions" in error.message


def test_seeds_of_later_choices_wrap_round(preparer: Preparer) -> None:
    body = {"prompt": "x", "n": 2, "seed": 2**63 - 1}
    plan = preparer.completion(json.dumps(body).encode())
    assert [choice.sampling.seed for choice in plan.prompts[0].choices] == [2**63 - 1, -(2**63)]


def test_tenants_share_no_keys(preparer: Preparer) -> None:
    def first(**fields: object) -> Any:
        body = {"prompt": list(range(2, 12)), **fields}
        return preparer.completion(json.dumps(body).encode()).prompts[0].choices[0]

    plain, salted = first(), first(cache_salt="tenant")
    assert len(plain.keys) == len(salted.keys) == 2
    assert not set(plain.keys) & set(salted.keys)
    assert plain.root != salted.root


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidInput, match="max_body_bytes is 0"):
        ApiConfig(max_body_bytes=0)
    with pytest.raises(InvalidInput, match="api_key is empty"):
        ApiConfig(api_key=" ")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
fields = st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "best_of"])


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.dictionaries(fields, json_values, max_size=4))
@pytest.mark.parametrize("model", [ChatBody, CompletionBody])
def test_any_body_is_parsed_or_refused_by_name(model: type[ChatBody], body: dict[str, Any]) -> None:
    refusal = None
    try:
        parse_body(json.dumps(body).encode(), model)
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        assert refusal.param or refusal.code == "invalid_json"
