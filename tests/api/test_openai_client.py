"""The official client against a real server on a real socket."""

from __future__ import annotations

import openai
import pytest

from snowskin.api.tokenizer import TextTokenizer
from tests.api.rule_machine import ANSWER, RuleMachine

USER = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_chat_is_answered_whole(client: openai.OpenAI, machine: RuleMachine) -> None:
    raw = client.chat.completions.with_raw_response.create(model="rule-machine", messages=USER)
    answer = raw.parse()
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(machine.script) + 1
    assert answer.usage.prompt_tokens == len(machine.submitted[0].tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id == raw.headers["x-request-id"] == machine.submitted[0].request


def test_a_chat_is_streamed_role_first_and_usage_last(
    client: openai.OpenAI, machine: RuleMachine
) -> None:
    chunks = list(
        client.chat.completions.create(
            model="rule-machine",
            messages=USER,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    first, *middle, ending, last = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == ANSWER
    assert all(chunk.choices[0].finish_reason is None for chunk in middle)
    assert ending.choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(machine.script) + 1
    assert {chunk.id for chunk in chunks} == {machine.submitted[0].request}


def test_without_include_usage_no_chunk_speaks_of_it(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="rule-machine", messages=USER, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert not any("usage" in chunk.model_fields_set for chunk in chunks)


def test_a_prompt_sent_twice_has_cached_tokens_but_not_under_another_salt(
    client: openai.OpenAI,
) -> None:
    def cached(**extra: object) -> int:
        answer = client.chat.completions.create(
            model="rule-machine", messages=USER, extra_body=extra
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(), cached(cache_salt="other") > 0, cached() > 0] == [0, False, True]


def test_max_tokens_under_both_names_ends_a_chat_for_length(client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        answer = client.chat.completions.create(model="rule-machine", messages=USER, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_across_tokens_ends_the_text_and_frees_the_generation(
    stream: bool, client: openai.OpenAI, machine: RuleMachine
) -> None:
    asked = {"model": "rule-machine", "messages": USER, "stop": ["France is Par", "never"]}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ("The capital 😀 of ", "stop")
    assert not machine.running
    assert machine.completed_early == [machine.submitted[0].request]
    assert not machine.cancelled


def test_min_tokens_lets_a_stop_string_pass(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="rule-machine",
        prompt="x",
        max_tokens=100,
        stop="capital",
        extra_body={"min_tokens": 60},
    )
    assert answer.choices[0].text.startswith(ANSWER)


def test_n_choices_sample_with_following_seeds_and_the_first_goes_ahead(
    client: openai.OpenAI, machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    answer = client.chat.completions.create(model="rule-machine", messages=USER, n=3, seed=1)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [tokenizer.decode(machine.script[1 + i :]) for i in range(3)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(machine.submitted[0].tokens)
    assert answer.usage.completion_tokens == sum(len(machine.script) - i for i in range(3))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert len({request.request for request in machine.submitted}) == 3
    assert machine.submitted[0].request == answer.id


def test_n_choices_are_streamed_together(client: openai.OpenAI, machine: RuleMachine) -> None:
    machine.step_s = 0.005
    chunks = list(
        client.chat.completions.create(model="rule-machine", messages=USER, n=2, stream=True)
    )
    roles = [chunk.choices[0].index for chunk in chunks[:2] if chunk.choices[0].delta.role]
    assert roles == [0, 1]
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == ANSWER
        assert mine[-1].finish_reason == "stop"


def test_chat_logprobs_name_every_token_and_its_rivals(
    client: openai.OpenAI, machine: RuleMachine
) -> None:
    asked = {"model": "rule-machine", "messages": USER, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == len(machine.script)
    assert bytes(byte for entry in whole.content for byte in entry.bytes or ()).decode() == ANSWER
    assert {len(entry.top_logprobs) for entry in whole.content} == {2}
    assert {entry.logprob for entry in whole.content} == {-0.5}
    assert any(entry.token.startswith("bytes:\\x") for entry in whole.content)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert [entry.model_dump() for entry in streamed] == [
        entry.model_dump() for entry in whole.content
    ]


def test_completion_logprobs_have_the_old_form(client: openai.OpenAI, machine: RuleMachine) -> None:
    answer = client.completions.create(model="rule-machine", prompt="Say", max_tokens=2, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 2
    assert [len(top) for top in logprobs.top_logprobs or ()] == [1] * 2
    assert logprobs.text_offset == [0, len((logprobs.tokens or [""])[0])]


def test_a_completion_has_sixteen_tokens_unless_told(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="rule-machine", prompt="Say")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.object == "text_completion"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("The core", 1), (["The core", "A skin"], 2), ([5, 6, 7], 1), ([[5, 6, 7], [8]], 2)],
)
def test_each_form_of_a_prompt_is_served_and_echoed(
    prompt: list[str], count: int, client: openai.OpenAI, tokenizer: TextTokenizer
) -> None:
    answer = client.completions.create(
        model="rule-machine", prompt=prompt, max_tokens=2, n=2, echo=True
    )
    first = prompt[0] if count == 2 else prompt
    echo = first if isinstance(first, str) else tokenizer.decode(first)
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    assert [choice.text.startswith(echo) for choice in answer.choices[:2]] == [True, True]
    streamed = client.completions.create(
        model="rule-machine", prompt=prompt, max_tokens=2, n=2, echo=True, stream=True
    )
    texts = [""] * (2 * count)
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_all_sampling_parameters_reach_the_backend(
    client: openai.OpenAI, machine: RuleMachine
) -> None:
    client.chat.completions.create(
        model="rule-machine",
        messages=USER,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -100},
        user="someone",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "ignore_eos": True,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "max_tokens": 30,
        },
    )
    [request] = machine.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 3, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.logit_bias == {7: -100.0}
    assert (request.stop_tokens, request.min_output_tokens) == ((9,), 2)
    assert request.output_limit_tokens == 30


def test_the_next_turn_may_send_the_last_answer_back_as_it_came(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model="rule-machine", messages=USER).choices[0].message
    again = [*USER, message, {"role": "user", "content": [{"type": "text", "text": "And Spain?"}]}]
    answer = client.chat.completions.create(model="rule-machine", messages=again)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["rule-machine"]
    assert client.models.retrieve("rule-machine").owned_by == "snowskin"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-4")
    assert raised.value.code == "model_not_found"
