"""``snowskin serve`` as a user runs it: one command, a real server, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.cli.serving import END_S, START_S, Server, family_of, snowskin, wait_until_gone
from tests.engine import tiny


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_chat_is_answered_whole_and_streamed_with_the_same_text(
    client: openai.OpenAI, server: Server
) -> None:
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "in the end, what is it that the others want of us?"}]
    whole = client.chat.completions.create(
        model=model, messages=question, temperature=0, max_tokens=20
    )
    stream = client.chat.completions.create(
        model=model,
        messages=question,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 32 * 32


def test_explain_tells_where_a_request_went_and_what_came_true(
    client: openai.OpenAI, server: Server
) -> None:
    raw = client.completions.with_raw_response.create(
        model=client.models.list().data[0].id, prompt="the sea and the land", max_tokens=4
    )
    told = server.snowskin("explain", raw.headers["x-request-id"])
    assert told.returncode == 0, told.stderr
    for word in ("prefill-0", "decode-0", "predicted", "real", "TTFT"):
        assert word in told.stdout
    unknown = server.snowskin("explain", "req-unknown")
    assert unknown.returncode == 2
    assert "req-unknown" in unknown.stderr


def test_explain_tells_why_a_request_was_turned_away(
    model_dir: Path, cache: Path, tmp_path: Path
) -> None:
    server = Server(model_dir, cache, tmp_path / "log", "--max-in-flight", "1")
    body = {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=START_S):
            refused = httpx.post(f"{server.url}/v1/completions", json=body)
        assert refused.status_code == 429
        told = server.snowskin("explain", refused.headers["x-request-id"])
        assert told.returncode == 0, told.stderr
        assert "rejected" in told.stdout
        assert "1 requests are in flight" in told.stdout
    finally:
        server.process.terminate()
        server.process.wait(END_S)


def test_the_log_has_one_line_for_a_request(client: openai.OpenAI, server: Server) -> None:
    raw = client.completions.with_raw_response.create(
        model=client.models.list().data[0].id, prompt="one and only", max_tokens=3
    )
    request = raw.headers["x-request-id"]
    lines = [line for line in server.log.read_text().splitlines() if request in line]
    assert len(lines) == 1
    assert "completed" in lines[0]
    assert "ttft=" in lines[0]


def test_sixty_four_streams_at_once_each_get_the_text_they_would_get_alone(
    client: openai.OpenAI, server: Server
) -> None:
    prompts = [f"the number {i} and the one after it" for i in range(64)]

    def ask(prompt: str) -> str:
        stream = client.completions.create(
            model="llama", prompt=prompt, temperature=0, max_tokens=12, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(64) as threads:
        together = list(threads.map(ask, prompts))
    assert together == [ask(prompt) for prompt in prompts]


def test_a_client_that_disconnects_leaves_nothing_in_flight(server: Server) -> None:
    body = {"model": "llama", "prompt": "on and on", "max_tokens": 900, "ignore_eos": True}
    body |= {"n": 16, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
        request = response.headers["x-request-id"]
    deadline_s = time.monotonic() + END_S
    while server.status()["requests_in_flight"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    told = httpx.get(f"{server.url}/snowskin/explain/{request}").json()
    assert told["state"] == "cancelled"
    assert told["output_tokens"] < 900


def test_killing_the_decode_node_ends_its_stream_with_one_error_and_it_serves_again(
    client: openai.OpenAI, server: Server
) -> None:
    body = {"model": "llama", "prompt": "on and on", "max_tokens": 900, "ignore_eos": True}
    events: list[str] = []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=END_S
    ) as response:
        for line in response.iter_lines():
            if not line:
                continue
            events.append(line)
            if len(events) == 5:
                os.kill(server.node("decode-0")["pid"], signal.SIGKILL)
                killed_s = time.monotonic()
    assert time.monotonic() - killed_s < 2.0  # Promised to users, hence an absolute bound.
    errors = [event for event in events if '"error"' in event]
    assert errors == events[-1:]
    assert "decode-0" in errors[0]
    deadline_s = time.monotonic() + START_S
    while server.node("decode-0")["state"] != "ready":
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    again = client.completions.create(model="llama", prompt="once more", max_tokens=3)
    assert again.usage is not None
    assert again.usage.completion_tokens == 3


def test_sigterm_ends_every_process(model_dir: Path, cache: Path, tmp_path: Path) -> None:
    server = Server(model_dir, cache, tmp_path / "log", "--prefill", "2")
    family = server.family()
    assert len(family) == 1 + 3 * 2  # The front; three nodes with a Messenger each.
    server.process.terminate()
    assert server.process.wait(END_S) == 0
    wait_until_gone(family)


def test_killing_the_parent_leaves_no_process(model_dir: Path, cache: Path, tmp_path: Path) -> None:
    server = Server(model_dir, cache, tmp_path / "log")
    family = server.family()
    server.process.kill()
    server.process.wait(END_S)
    wait_until_gone(family)


def test_a_port_in_use_is_told_at_once(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = snowskin("serve", "--model", str(model_dir), "--port", port)
    assert ended.returncode == 2
    assert port in ended.stderr
    assert "--port" in ended.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/no/such/model"], ["/no/such/model"]),
        (["--prefill", "0"], ["--prefill", "0"]),
        (["--policy", "fastest"], ["fastest", "kvcache-centric"]),
        (["--dram", "plenty"], ["--dram", "plenty"]),
        (["--dram", "900TiB", "--model", "{tiny}"], ["--dram", "available"]),
        (["--log-level", "loud"], ["--log-level", "loud"]),
        (["--host", "0.0.0.0"], ["--api-key", "--cluster-key"]),
        (["--node-host", "10.1.2.3", "--api-key", "k"], ["--cluster-key"]),
        (
            ["--host", "snow.invalid", "--api-key", "k", "--cluster-key", "k"],
            ["cannot listen on snow.invalid:0: "],
        ),
        (
            ["--node-host", "192.0.2.1", "--api-key", "k", "--cluster-key", "k"],
            ["--node-host", "192.0.2.1"],
        ),
    ],
)
def test_a_bad_option_is_refused_by_name_and_value(
    options: list[str], words: list[str], model_dir: Path, cache: Path
) -> None:
    options = [option.format(tiny=model_dir) for option in options]
    environment = {**os.environ, "SNOWSKIN_CACHE": str(cache)}
    usual = ["--model", str(model_dir), "--dtype", "fp32", "--threads", "1", "--port", "0"]
    ended = snowskin("serve", *usual, *options, environment=environment)
    assert ended.returncode == 2
    for word in words:
        assert word in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Unknown error" not in ended.stderr


def test_a_model_that_the_engine_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    ended = snowskin("serve", "--port", "0", "--model", str(tiny.build("gemma2", tmp_path)))
    assert ended.returncode == 2
    assert "soft-capping" in ended.stderr


def test_a_cache_folder_that_cannot_be_used_is_told_before_anything_is_measured(
    model_dir: Path, tmp_path: Path
) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    environment = {**os.environ, "SNOWSKIN_CACHE": str(no_folder)}
    ended = snowskin("serve", "--port", "0", "--model", str(model_dir), environment=environment)
    assert ended.returncode == 2
    assert str(no_folder) in ended.stderr
    assert "SNOWSKIN_CACHE" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "measuring" not in ended.stderr


def test_sigterm_during_the_first_measurement_leaves_no_process(
    model_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "SNOWSKIN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "snowskin", "serve", "--port", "0", "--model", str(model_dir)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    family: set[int] = set()
    deadline_s = time.monotonic() + END_S * 3
    while len(family) < 2:  # The front, and what it measures in.
        assert time.monotonic() < deadline_s, log.read_text()
        family = family_of(process.pid)
        time.sleep(0.05)
    process.terminate()
    assert process.wait(END_S) != 0
    wait_until_gone(family)
    assert not list((tmp_path / "cache").rglob("*.json*"))


def test_requests_that_come_during_the_shutdown_are_turned_away_at_once(
    model_dir: Path, cache: Path, tmp_path: Path
) -> None:
    server = Server(model_dir, cache, tmp_path / "log")
    body = {"prompt": "Hi", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    answers: list[httpx.Response] = []

    def keep_asking() -> None:
        with httpx.Client(timeout=END_S) as client:
            try:
                while True:
                    answers.append(client.post(f"{server.url}/v1/completions", json=body))
            except httpx.TransportError:
                return  # The server is gone.

    askers = [threading.Thread(target=keep_asking) for _ in range(4)]
    for asker in askers:
        asker.start()
    while server.status()["requests_in_flight"] < len(askers):
        time.sleep(0.05)
    server.process.terminate()
    assert server.process.wait(END_S) == 0
    for asker in askers:
        asker.join(END_S)
    refusals = [answer for answer in answers if answer.status_code != 200]
    assert refusals
    for answer in refusals:
        assert answer.json()["error"]["message"].endswith("the server is shutting down")
    assert "Traceback" not in server.log.read_text()


def test_profile_measures_and_saves(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--model", str(model_dir), "--threads", "1", "--budget", "1", "--out", str(out)]
    ended = snowskin(
        "profile", *arguments, environment={**os.environ, "SNOWSKIN_CACHE": str(tmp_path)}
    )
    assert ended.returncode == 0, ended.stderr
    saved = list((tmp_path / "profiles").glob("*.json"))
    assert [path.read_bytes() for path in saved] == [out.read_bytes()]
