"""Bodies that are too large, no JSON or no Unicode, and routes that are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from snowskin.api.config import ApiConfig
from snowskin.api.tokenizer import TextTokenizer
from tests.api.rule_machine import RuleMachine
from tests.api.serving import served

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def url(machine: RuleMachine, tokenizer: TextTokenizer) -> Iterator[str]:
    with served(machine, tokenizer, ApiConfig(max_body_bytes=10_000)) as url:
        yield url


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 9000, b'{"n": ' + b"9" * 999 + b"}"]
)
def test_a_body_that_is_no_json_object_is_400(url: str, path: str, raw: bytes) -> None:
    answer = httpx.post(url + path, content=raw)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_body_too_large_is_413(url: str, path: str, declared: bool) -> None:
    raw = b"x" * 15_000
    content: Any = raw if declared else (raw[at : at + 1000] for at in range(0, len(raw), 1000))
    answer = httpx.post(url + path, content=content)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert "10000" in answer.json()["error"]["message"]


def test_text_that_is_not_unicode_is_400(url: str) -> None:
    raw = b'{"prompt": "a\\ud800b"}'
    for path in (COMPLETION, "/tokenize"):
        assert httpx.post(url + path, content=raw).status_code == 400


@pytest.mark.parametrize(("method", "path", "status"), [("GET", CHAT, 405), ("GET", "/nope", 404)])
def test_wrong_routes_have_openais_error_body(
    url: str, method: str, path: str, status: int
) -> None:
    answer = httpx.request(method, url + path)
    assert answer.status_code == status
    assert path in answer.json()["error"]["message"]
