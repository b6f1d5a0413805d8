from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from snowskin.api.backend import Backend
from snowskin.api.tokenizer import TextTokenizer
from tests.api.rule_machine import ANSWER, RuleMachine
from tests.api.serving import served
from tests.api.texts import byte_fallback_dir, byte_level_dir


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_dir(tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_fallback_dir(tmp_path_factory.mktemp("byte-fallback"))


@pytest.fixture(scope="session")
def tokenizer(byte_level: Path) -> TextTokenizer:
    return TextTokenizer.load(byte_level)


@pytest.fixture(scope="session")
def fallback_tokenizer(byte_fallback: Path) -> TextTokenizer:
    return TextTokenizer.load(byte_fallback)


@pytest.fixture
def machine(tokenizer: TextTokenizer) -> RuleMachine:
    script = tokenizer.encode(ANSWER, add_special_tokens=False)
    [end] = tokenizer.encode("<|end|>", add_special_tokens=False)
    return RuleMachine(script, end, vocab_size=512)


@pytest.fixture
def client(machine: RuleMachine, tokenizer: TextTokenizer) -> Iterator[openai.OpenAI]:
    backend: Backend = machine
    with (
        served(backend, tokenizer) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client
