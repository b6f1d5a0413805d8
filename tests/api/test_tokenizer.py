from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from snowskin.api.errors import ApiError
from snowskin.api.tokenizer import TextTokenizer
from snowskin.terms.errors import InvalidInput
from tests.api.texts import byte_fallback_dir, byte_level_dir

TEXTS = [
    "The capital of France",
    " leading and  double spaces\n\ttabs",
    "naïve Straße 月餅 😀🥮",
    "<|start|>spelled out<|end|> and <s>others</s>",
    "",
]
CHATS = [
    [{"role": "user", "content": "Où est <la> gare? 😀"}],
    [
        {"role": "system", "content": "  Speak as a baker. "},
        {"role": "user", "content": 'Say "hi"\n'},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Again"},
    ],
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_tokens_and_text_equal_those_of_transformers(
    kind: str, text: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    ours, theirs = TextTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode(text) == theirs(text)["input_ids"]
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("ends", [{"add_bos_token": True}, {"add_eos_token": True}])
def test_tokenizer_json_alone_decides_on_the_ends_as_in_transformers(
    ends: dict[str, bool], tmp_path: Path
) -> None:
    folder = byte_fallback_dir(tmp_path, **ends)
    ours, theirs = TextTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("A rich core") == theirs("A rich core")["input_ids"]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("open_turn", [True, False])
def test_a_rendered_chat_equals_that_of_transformers(
    chat: list[dict[str, str]], open_turn: bool, byte_level: Path
) -> None:
    ours, theirs = TextTokenizer.load(byte_level), AutoTokenizer.from_pretrained(byte_level)
    assert ours.chat_template is not None
    text = ours.chat_template.render(
        chat, add_generation_prompt=open_turn, variables={"shout": True}
    )
    assert text == theirs.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=open_turn, shout=True
    )
    tokens = theirs.apply_chat_template(
        chat, add_generation_prompt=open_turn, shout=True, return_dict=False
    )
    assert ours.encode(text, add_special_tokens=False) == tokens


def test_the_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    folder = byte_level_dir(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    template = TextTokenizer.load(folder).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "x<|end|>"


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    folder = byte_level_dir(tmp_path, template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    template = TextTokenizer.load(folder).chat_template
    assert template is not None
    assert template.render([]) == "d"


def test_what_a_template_refuses_is_the_clients_error(tokenizer: TextTokenizer) -> None:
    assert tokenizer.chat_template is not None
    with pytest.raises(ApiError, match="Turns must alternate"):
        tokenizer.chat_template.render([{"role": "assistant", "content": "me first"}])


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    loaded = TextTokenizer.load(byte_level_dir(tmp_path, template=template)).chat_template
    assert loaded is not None
    with pytest.raises(ApiError, match="unsafe"):
        loaded.render([])


def test_a_template_that_does_not_compile_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not compile"):
        TextTokenizer.load(byte_level_dir(tmp_path, template="{% if %}"))


def test_a_directory_without_tokenizer_json_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no tokenizer\.json.*save_pretrained"):
        TextTokenizer.load(tmp_path)


def test_a_broken_tokenizer_json_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"tokenizer\.json cannot be read"):
        TextTokenizer.load(tmp_path)


def test_text_with_a_lone_surrogate_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidInput, match="Unicode"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("kind", ["tokenizer", "fallback_tokenizer"])
def test_the_bytes_of_tokens_join_to_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: TextTokenizer = request.getfixturevalue(kind)
    text = "The capital: 月餅 😀 naïve"
    content = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
    assert content.decode().lstrip() == text


def test_a_special_token_has_its_name_but_no_text(tokenizer: TextTokenizer) -> None:
    [end] = tokenizer.encode("<|end|>", add_special_tokens=False)
    assert tokenizer.token_bytes(end) == b"<|end|>"
    assert not tokenizer.has_text(end)
    assert not tokenizer.has_text(10**6)
    assert tokenizer.token_bytes(10**6) == b""


def test_the_front_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, snowskin.api.app; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
