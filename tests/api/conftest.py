from __future__ import annotations

from pathlib import Path

import pytest

from snowskin.api.tokenizer import TextTokenizer
from tests.api.rule_machine import ANSWER, RuleMachine
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
