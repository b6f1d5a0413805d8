"""A live server's traffic becomes a trace, and the trace a simulation."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from snowskin.cli.recording import Recording
from snowskin.terms.errors import SnowskinError
from snowskin.terms.ids import StartId
from snowskin.terms.serving import ServedPage, ServedRequest
from snowskin.trace.formats import read_trace
from snowskin.trace.record import TraceRecorder
from tests.cli.serving import END_S, Server, snowskin

TURNS = 3
QUESTION = "tell me of the sea and of the land and of all that is between them, if you please"


def converse(url: str) -> tuple[list[int], list[int]]:
    """A conversation of three turns; its prompt tokens and its cached tokens, turn by turn."""
    messages, prompts, cached = [], [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{QUESTION} {turn}"})
        body = {"messages": messages, "max_tokens": 20, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        messages.append(answer["choices"][0]["message"])
        prompts.append(answer["usage"]["prompt_tokens"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return prompts, cached


def check_trace(path: Path, prompts: list[int], folder: Path) -> None:
    """The trace tells the conversation, and ``describe`` and ``simulate`` see its reuse."""
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == prompts
    assert trace.output_tokens.max() <= 20
    numbers = folder / "numbers.json"
    told = snowskin("trace", "describe", str(path), "--json", str(numbers))
    assert told.returncode == 0, told.stderr
    summary = json.loads(numbers.read_bytes())
    full = [tokens // 32 for tokens in prompts]
    assert summary["hit_ratio_blocks"] == pytest.approx(sum(full[:-1]) / sum(full))
    command = ["simulate", "--trace", str(path), "--prefill", "1", "--decode", "1"]
    played = snowskin(*command, "--json", str(numbers))
    assert played.returncode == 0, played.stderr
    outcome = json.loads(numbers.read_bytes())
    assert outcome["completed"] == TURNS
    assert outcome["hit_ratio"] > 0.2


def test_a_conversation_is_recorded_while_it_is_served_even_if_the_server_is_killed(
    model_dir: Path, cache: Path, tmp_path: Path
) -> None:
    path = tmp_path / "live.jsonl"
    server = Server(model_dir, cache, tmp_path / "log", "--record", str(path))
    try:
        prompts, cached = converse(server.url)
        assert cached[0] == 0 < cached[1] < cached[2]
        deadline_s = time.monotonic() + END_S
        while len(path.read_bytes().splitlines()) < 1 + TURNS:
            assert time.monotonic() < deadline_s, path.read_text()
            time.sleep(0.05)
        remembered = tmp_path / "remembered.jsonl"
        told = server.snowskin("trace", "record", str(remembered))
        assert told.returncode == 0, told.stderr
        assert "3 requests" in told.stdout
        again = server.snowskin("trace", "record", str(remembered))
        assert again.returncode == 2
        assert "exists already" in again.stderr
    finally:
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(END_S)
    assert QUESTION not in path.read_text()
    assert path.read_bytes().splitlines()[1:] == remembered.read_bytes().splitlines()[1:]
    check_trace(path, prompts, tmp_path)


def test_a_recording_ends_whole_with_its_server(
    model_dir: Path, cache: Path, tmp_path: Path
) -> None:
    path = tmp_path / "live.jsonl"
    server = Server(model_dir, cache, tmp_path / "log", "--record", str(path))
    try:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
    finally:
        server.process.terminate()
        assert server.process.wait(END_S) == 0
    assert len(read_trace(path)) == 1
    assert f"the recording {path} ends with request 1" in server.log.read_text()


def test_a_recording_that_cannot_begin_is_told_before_anything_is_started(
    model_dir: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    ran = snowskin("serve", "--model", str(model_dir), "--port", "0", "--record", str(taken))
    assert ran.returncode == 2
    assert "taken exists already; name a new file" in ran.stderr


def test_a_server_that_is_not_there_gives_no_trace_but_the_remedy(tmp_path: Path) -> None:
    out = tmp_path / "t"
    ran = snowskin("trace", "record", str(out), "--url", "http://127.0.0.1:9")
    assert ran.returncode == 2
    assert "--url http://HOST:PORT" in ran.stderr
    assert not out.exists()


def test_a_recording_ends_where_its_server_was_started_anew(tmp_path: Path) -> None:
    served = ServedRequest(1, 0.5, 40, 3, (7,))
    pages = iter(
        [
            ServedPage(StartId("one"), "m", 32, (served,)),
            ServedPage(StartId("other"), "m", 32, (msgspec.structs.replace(served, number=2),)),
        ]
    )
    path = tmp_path / "live.jsonl"
    with TraceRecorder(path, block_tokens=32, name="live") as recorder:
        recording = Recording(recorder, lambda _: next(pages))
        with pytest.raises(SnowskinError, match=r"started anew .* ends with request 1;"):
            recording.catch_up()
    assert read_trace(path).prompt_tokens.tolist() == [40]
