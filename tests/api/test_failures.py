"""What a client of the official package sees when the cluster fails or is full."""

from __future__ import annotations

import asyncio
import random

import httpx
import openai
import pytest

from snowskin.api.tokenizer import TextTokenizer
from tests.api.rule_machine import ANSWER, RuleMachine
from tests.api.serving import served, until

USER = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_failure_after_the_first_tokens_is_one_error_event(
    client: openai.OpenAI, machine: RuleMachine
) -> None:
    machine.fail_after_tokens = 3
    stream = client.chat.completions.create(model="rule-machine", messages=USER, stream=True)
    assert next(stream).choices[0].delta.role == "assistant"
    with pytest.raises(openai.APIError, match="decode-0 died"):
        list(stream)
    assert not machine.running


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token_has_a_status_of_its_own(
    stream: bool, client: openai.OpenAI, machine: RuleMachine
) -> None:
    machine.fail_after_tokens = 0
    with pytest.raises(openai.InternalServerError, match="decode-0 died") as raised:
        client.chat.completions.create(model="rule-machine", messages=USER, stream=stream)
    assert raised.value.code == "generation_failed"


@pytest.mark.parametrize("stream", [True, False])
def test_overload_is_429_with_whole_seconds_to_wait(
    stream: bool, client: openai.OpenAI, machine: RuleMachine
) -> None:
    machine.capacity = 0
    with pytest.raises(openai.RateLimitError, match="TTFT of 40 s") as raised:
        client.chat.completions.create(model="rule-machine", messages=USER, stream=stream)
    assert raised.value.response.headers["retry-after"] == "3"
    assert raised.value.response.headers["x-request-id"].startswith("req-")
    assert raised.value.code == "overloaded"


def test_no_node_is_503_with_seconds_to_wait(client: openai.OpenAI, machine: RuleMachine) -> None:
    machine.ready = False
    with pytest.raises(openai.InternalServerError) as raised:
        client.completions.create(model="rule-machine", prompt="x")
    assert raised.value.status_code == 503
    assert raised.value.response.headers["retry-after"] == "5"


def test_sixty_four_streams_at_once_all_end_well(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    machine.step_s = 0.002

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model="rule-machine", messages=USER, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            return await asyncio.gather(*(one(client) for _ in range(64)))

    with served(machine, tokenizer) as url:
        assert asyncio.run(all_of_them(url)) == [ANSWER] * 64
    assert not machine.running
    assert not machine.cancelled


def test_clients_that_leave_at_any_moment_leave_nothing(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    machine.script = machine.script * 50
    machine.context_tokens = 10_000
    machine.step_s = machine.prefill_s = 0.002
    rng = random.Random(7)

    async def one(client: openai.AsyncOpenAI, leaves_after_s: float, n: int) -> None:
        try:
            async with asyncio.timeout(leaves_after_s):
                stream = await client.chat.completions.create(
                    model="rule-machine", messages=USER, stream=n > 1, n=n
                )
                if n > 1:
                    async for _ in stream:
                        pass
        except TimeoutError:
            return

    async def all_of_them(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            plans = [(rng.uniform(0.001, 0.5), rng.choice([1, 2, 3])) for _ in range(60)]
            await asyncio.gather(*(one(client, *plan) for plan in plans))

    with served(machine, tokenizer) as url:
        asyncio.run(all_of_them(url))
        until(lambda: not machine.running)
    assert machine.cancelled


@pytest.mark.parametrize("body", [{"prompt": "Hi", "n": 12}, {"prompt": ["Hi"] * 12}])
def test_more_choices_than_the_cluster_has_room_for_take_turns(
    machine: RuleMachine, tokenizer: TextTokenizer, body: dict[str, object]
) -> None:
    machine.capacity, machine.step_s = 3, 0.002
    with served(machine, tokenizer) as url:
        answer = httpx.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert len(texts) == 12
    assert set(texts) == {texts[0]}
    assert not machine.running
