"""``snowskin serve`` as a user runs it: one command, a real server, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from snowskin.cluster.prepare import profile_path
from snowskin.cost.profile import save_profile
from snowskin.engine.model import inspect_model
from tests.cluster.live import PROFILE
from tests.engine import tiny

START_S = 120.0
END_S = 20.0


class Server:
    """A running ``snowskin serve``."""

    def __init__(self, model_dir: Path, cache: Path, log: Path, *options: str) -> None:
        self.log = log
        self.environment = {**os.environ, "SNOWSKIN_CACHE": str(cache)}
        command = [sys.executable, "-m", "snowskin", "serve", "--model", str(model_dir)]
        command += ["--dtype", "fp32", "--threads", "1", "--port", "0", "--dram", "16MiB", *options]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=self.environment, start_new_session=True
            )
        self.url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            ready = re.search(r"ready: \S+ on (http://\S+)/v1", self.log.read_text())
            if ready:
                return ready[1]
            time.sleep(0.1)
        raise AssertionError(f"not ready:\n{self.log.read_text()}")

    def family(self) -> set[int]:
        """The server's process and all its descendants."""
        found, untold = set(), {self.process.pid}
        while untold:
            pid = untold.pop()
            found.add(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                untold |= {int(child) for child in children.read_text().split()} - found
        return found

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/snowskin/status").json())

    def node(self, name: str) -> dict[str, Any]:
        return next(node for node in self.status()["nodes"] if node["node"] == name)

    def snowskin(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return snowskin(*arguments, environment=self.environment | {"SNOWSKIN_URL": self.url})


def snowskin(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "snowskin", *arguments],
        capture_output=True,
        text=True,
        timeout=START_S,
        env=environment or dict(os.environ),
        check=False,
    )


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    running = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":
            running.add(pid)
    return running


def wait_until_gone(pids: set[int]) -> None:
    deadline_s = time.monotonic() + END_S
    while alive(pids):
        assert time.monotonic() < deadline_s, f"still running: {alive(pids)}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A cache folder with a profile, so that no start needs to measure."""
    cache = tmp_path_factory.mktemp("cache")
    info = inspect_model(model_dir, dtype="fp32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNOWSKIN_CACHE", str(cache))
        path = profile_path(info, threads=1, transport="auto")
    path.parent.mkdir(parents=True)
    save_profile(PROFILE, path)
    return cache


@pytest.fixture(scope="module")
def server(
    model_dir: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = Server(model_dir, cache, tmp_path_factory.mktemp("log") / "serve.log")
    yield server
    family = server.family()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(END_S) == 0
    assert not alive(family)


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
            if line:
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
    ],
)
def test_a_bad_option_is_refused_by_name_and_value(
    options: list[str], words: list[str], model_dir: Path, cache: Path
) -> None:
    options = [option.format(tiny=model_dir) for option in options]
    environment = {**os.environ, "SNOWSKIN_CACHE": str(cache)}
    ended = snowskin("serve", "--port", "0", *options, environment=environment)
    assert ended.returncode == 2
    for word in words:
        assert word in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_model_that_the_engine_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    ended = snowskin("serve", "--port", "0", "--model", str(tiny.build("gemma2", tmp_path)))
    assert ended.returncode == 2
    assert "soft-capping" in ended.stderr


def test_profile_measures_and_saves(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--model", str(model_dir), "--threads", "1", "--budget", "1", "--out", str(out)]
    ended = snowskin(
        "profile", *arguments, environment={**os.environ, "SNOWSKIN_CACHE": str(tmp_path)}
    )
    assert ended.returncode == 0, ended.stderr
    saved = list((tmp_path / "profiles").glob("*.json"))
    assert [path.read_bytes() for path in saved] == [out.read_bytes()]
