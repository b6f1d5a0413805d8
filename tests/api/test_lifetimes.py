"""Clients leave, stall, come too many; servers fail: nothing of a request stays behind."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from snowskin.api.config import ApiConfig
from snowskin.api.tokenizer import TextTokenizer
from tests.api.rule_machine import RuleMachine
from tests.api.serving import served, until

USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def url(machine: RuleMachine, tokenizer: TextTokenizer) -> Iterator[str]:
    with served(machine, tokenizer) as url:
        yield url


@contextmanager
def connection(url: str, path: str, **fields: object) -> Iterator[socket.socket]:
    """A bare socket on which a request was sent."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as sock:
        sock.settimeout(10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", urlsplit(url).port or 0))
        sock.sendall(head.encode() + body)
        yield sock


def reset(sock: socket.socket) -> None:
    """Close with RST, as a killed client's kernel may."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def endless(machine: RuleMachine, step_s: float) -> None:
    machine.script = machine.script * 10_000
    machine.context_tokens = 10**6
    machine.step_s = step_s


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("abruptly", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_frees_every_choice(
    path: str, abruptly: bool, n: int, machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    endless(machine, 0.01)
    prompt = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    with served(machine, tokenizer) as url:
        with connection(url, path, **prompt, stream=True, n=n, max_tokens=10**5) as sock:
            assert b"200 OK" in sock.recv(4096)
            until(lambda: len(machine.running) == n)
            if abruptly:
                reset(sock)
        until(lambda: not machine.running)
        assert len(machine.cancelled) == n
        text = httpx.get(f"{url}/metrics").text
        assert f'snowskin_requests_total{{outcome="cancelled"}} {n}.0' in text


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_before_its_whole_answer_frees_it(
    phase: str, machine: RuleMachine, url: str
) -> None:
    if phase == "prefill":
        machine.prefill_s = 3600
    else:
        machine.step_s = 3600
    with connection(url, CHAT, messages=USER):
        until(lambda: len(machine.running) == 1)
    until(lambda: not machine.running)
    assert machine.cancelled == [machine.submitted[0].request]


def test_a_client_that_leaves_while_it_sends_its_body_leaves_nothing(
    machine: RuleMachine, url: str
) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0)) as sock:
        sock.sendall(head.encode())
    assert httpx.post(url + CHAT, json={"messages": USER}).status_code == 200
    assert len(machine.submitted) == 1


def test_a_client_that_does_not_read_holds_its_generation_back(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    endless(machine, 0.0)
    with (
        served(machine, tokenizer) as url,
        connection(url, COMPLETION, prompt="Hi", stream=True, max_tokens=10**5) as sock,
    ):
        sock.recv(1024)
        counted = []

        def stalled() -> bool:
            time.sleep(0.1)
            counted.append(machine.given)
            return len(counted) > 3 and counted[-1] == counted[-3]

        until(stalled)
        assert machine.given < 10**5
        assert len(machine.running) == 1


def test_a_request_that_takes_too_long_is_cancelled_and_told_so(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    machine.step_s = 3600
    with served(machine, tokenizer, ApiConfig(request_timeout_s=0.2)) as url:
        whole = httpx.post(url + CHAT, json={"messages": USER})
        assert whole.status_code == 504
        assert whole.json()["error"]["code"] == "request_timeout"
        streamed = httpx.post(url + CHAT, json={"messages": USER, "stream": True})
    *_, last = streamed.text.strip().split("\n\n")
    assert streamed.status_code == 200
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert "[DONE]" not in streamed.text
    assert len(machine.cancelled) == 2
    assert not machine.running


def test_a_body_that_does_not_come_is_given_up(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{"
    with (
        served(machine, tokenizer, ApiConfig(body_timeout_s=0.1)) as url,
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=10) as sock,
    ):
        sock.sendall(head.encode())
        assert b" 408 " in sock.recv(4096)


def test_more_open_requests_than_allowed_are_429(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    machine.prefill_s = 3600
    with served(machine, tokenizer, ApiConfig(max_open_requests=2)) as url:
        with (
            connection(url, CHAT, messages=USER),
            connection(url, CHAT, messages=USER),
        ):
            until(lambda: len(machine.running) == 2)
            refused = httpx.post(url + CHAT, json={"messages": USER})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        until(lambda: not machine.running)
        machine.prefill_s = 0
        assert httpx.post(url + CHAT, json={"messages": USER}).status_code == 200


def test_more_pending_bodies_than_allowed_are_429(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    body = {"prompt": "x" * 500}
    with served(machine, tokenizer, ApiConfig(max_pending_body_bytes=400)) as url:
        assert httpx.post(url + COMPLETION, json=body).status_code == 429
        assert httpx.post(url + COMPLETION, json={"prompt": "x"}).status_code == 200


def test_a_failed_choice_takes_the_others_with_it(machine: RuleMachine, url: str) -> None:
    machine.fail_after_tokens = 5
    machine.step_s = 0.005
    answer = httpx.post(url + CHAT, json={"messages": USER, "n": 3, "stream": True})
    events = [line for line in answer.text.split("\n\n") if line]
    assert [b'"error"' in event.encode() for event in events].count(True) == 1
    assert '"error"' in events[-1]
    until(lambda: not machine.running)


def test_choices_of_one_prompt_wait_for_its_first_token(machine: RuleMachine, url: str) -> None:
    machine.prefill_s = 3600
    with connection(url, COMPLETION, prompt=["a", "b"], n=4):
        until(lambda: len(machine.submitted) == 2)
        time.sleep(0.05)
        assert len(machine.submitted) == 2


def test_our_own_mistake_is_500_without_details_and_is_logged(
    machine: RuleMachine, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine.bug = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR, logger="snowskin.api.reply"):
        answer = httpx.post(url + CHAT, json={"messages": USER})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text


def test_text_work_leaves_the_event_loop_free(
    machine: RuleMachine, tokenizer: TextTokenizer
) -> None:
    """While a long prompt is tokenised, health answers many times."""
    machine.context_tokens = 10**7
    with served(machine, tokenizer) as url, httpx.Client() as client:
        client.get(f"{url}/health")
        prompt = "The capital of France is Paris. " * 20_000
        answers: list[int] = []
        sender = threading.Thread(
            target=lambda: answers.append(
                httpx.post(
                    url + COMPLETION, json={"prompt": prompt, "max_tokens": 1}, timeout=60
                ).status_code
            )
        )
        sender.start()
        healthy = 0
        while sender.is_alive():
            healthy += client.get(f"{url}/health").status_code == 200
        sender.join()
    assert answers == [200]
    assert healthy > 5
