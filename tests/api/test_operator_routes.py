from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from snowskin.api.config import ApiConfig
from snowskin.api.tokenizer import TextTokenizer
from snowskin.measure.records import Slo
from tests.api.rule_machine import RuleMachine
from tests.api.serving import served

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def url(machine: RuleMachine, tokenizer: TextTokenizer) -> Iterator[str]:
    with served(machine, tokenizer, ApiConfig(slo=Slo(ttft_s=60, tbt_s=60))) as url:
        yield url


def samples(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_is_503_while_nodes_start_and_200_when_they_serve(
    machine: RuleMachine, url: str
) -> None:
    machine.ready = False
    starting = httpx.get(f"{url}/health")
    machine.ready = True
    ready = httpx.get(f"{url}/health")
    assert (starting.status_code, starting.json()) == (503, {"status": "starting"})
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})


def test_metrics_count_what_clients_saw(machine: RuleMachine, url: str) -> None:
    for _ in range(2):
        httpx.post(f"{url}/v1/chat/completions", json={"messages": USER})
    httpx.post(f"{url}/v1/chat/completions", json={"messages": USER, "n": 0})
    machine.capacity = 0
    httpx.post(f"{url}/v1/chat/completions", json={"messages": USER})
    seen = samples(url)
    tokens = len(machine.submitted[0].tokens)
    output = len(machine.script) + 1
    assert seen["snowskin_requests_total|completed"] == 2
    assert seen["snowskin_requests_total|invalid"] == 1
    assert seen["snowskin_requests_total|rejected"] == 1
    assert seen["snowskin_effective_requests_total"] == 2
    assert seen["snowskin_ttft_seconds_count"] == seen["snowskin_tbt_seconds_count"] == 2
    assert seen["snowskin_token_interval_seconds_count"] == 2 * (output - 1)
    assert seen["snowskin_prompt_tokens_total"] == 2 * tokens
    assert 0 < seen["snowskin_cached_prompt_tokens_total"] < tokens
    assert seen["snowskin_prefix_hits_total"] == 1
    assert seen["snowskin_generated_tokens_total"] == 2 * output


def test_metrics_show_the_clusters_status(url: str) -> None:
    seen = samples(url)
    assert seen["snowskin_ready"] == 1
    assert seen["snowskin_rejections_total|ttft"] == 7
    assert seen["snowskin_transfer_bytes_total|fetch"] == 4096
    assert seen["snowskin_transfer_seconds_total|fetch"] == 0.25
    assert seen["snowskin_transfer_failures_total|fetch"] == 1
    assert seen["snowskin_node_restarts_total|decode-0|decode"] == 2
    assert seen["snowskin_node_evicted_blocks_total|decode-0|decode"] == 3
    assert seen["snowskin_node_queue_sequences|decode-0|decode"] == 0
    assert all(name.startswith("snowskin_") for name in seen)


def test_a_request_is_explained_by_the_id_of_its_answer(url: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": USER})
    request_id = answer.headers["x-request-id"]
    assert request_id == answer.json()["id"]
    explained = httpx.get(f"{url}/snowskin/explain/{request_id}").json()
    assert explained["request"] == request_id
    assert explained["decision"]["reason"] == "there is one node"
    assert explained["decision"]["tbt_s"] is None


def test_an_unknown_request_is_not_explained(url: str) -> None:
    answer = httpx.get(f"{url}/snowskin/explain/req-nope")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"


def test_served_requests_are_told_page_by_page_without_their_text(url: str) -> None:
    httpx.post(f"{url}/v1/completions", json={"prompt": "The capital of", "n": 3})
    first = httpx.get(f"{url}/snowskin/requests").json()
    assert (first["model"], first["block_tokens"]) == ("rule-machine", 4)
    assert [request["number"] for request in first["requests"]] == [1, 2]
    assert set(first["requests"][0]) == {
        "number",
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "blocks",
    }
    second = httpx.get(f"{url}/snowskin/requests", params={"after": 2}).json()
    assert [request["number"] for request in second["requests"]] == [3]
    assert httpx.get(f"{url}/snowskin/requests?after=3").json()["requests"] == []


@pytest.mark.parametrize("after", ["-1", "", "x", "1" * 30])
def test_a_page_after_what_is_no_number_is_refused(url: str, after: str) -> None:
    answer = httpx.get(f"{url}/snowskin/requests", params={"after": after})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "after"


def test_request_ids_are_long_and_all_different(machine: RuleMachine, url: str) -> None:
    httpx.post(f"{url}/v1/completions", json={"prompt": "x", "n": 20})
    ids = {request.request for request in machine.submitted}
    assert len(ids) == 20
    assert {len(request_id) for request_id in ids} == {len("req-") + 32}


def test_the_status_lists_the_nodes(url: str) -> None:
    [node] = httpx.get(f"{url}/snowskin/status").json()["nodes"]
    assert (node["node"], node["role"], node["state"]) == ("decode-0", "decode", "ready")


def test_text_becomes_tokens_and_tokens_text(url: str, tokenizer: TextTokenizer) -> None:
    text = "The capital 😀"
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()
    assert tokens["tokens"] == tokenizer.encode(text)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 200)
    back = httpx.post(f"{url}/detokenize", json={"tokens": tokens["tokens"]})
    assert back.json() == {"prompt": text}


def test_messages_become_the_tokens_that_a_chat_is_served_with(
    machine: RuleMachine, url: str
) -> None:
    httpx.post(f"{url}/v1/chat/completions", json={"messages": USER})
    tokens = httpx.post(f"{url}/tokenize", json={"messages": USER}).json()["tokens"]
    assert tuple(tokens) == machine.submitted[0].tokens


def test_tokenize_wants_either_a_prompt_or_messages(url: str) -> None:
    assert httpx.post(f"{url}/tokenize", json={}).status_code == 400
    assert httpx.post(f"{url}/detokenize", json={"tokens": [512]}).status_code == 400


def test_the_docs_show_every_route_and_every_field(url: str) -> None:
    assert httpx.get(f"{url}/docs").status_code == 200
    schema = httpx.get(f"{url}/openapi.json").json()
    chat = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    assert chat["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatBody"}
    models = schema["components"]["schemas"]
    assert {"ChatBody", "CompletionBody", "TokenizeBody", "Message", "StreamOptions"} <= set(models)
    assert models["ChatBody"]["properties"]["temperature"]["maximum"] == 2
    assert "/snowskin/explain/{request_id}" in schema["paths"]


def test_a_key_is_wanted_everywhere_but_at_health(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    closed = ["/v1/models", "/v1/models/rule-machine", "/metrics", "/snowskin/status"]
    closed.append("/snowskin/explain/req-x")
    with served(machine, tokenizer, ApiConfig(api_key="Schlüssel-1")) as url:
        for path in closed:
            for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic x"}):
                answer = httpx.get(url + path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            assert httpx.post(url + path, content=b"{").status_code == 401
        right = {"authorization": "bearer Schlüssel-1".encode()}
        assert httpx.get(f"{url}/v1/models", headers=right).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
    assert not machine.submitted
