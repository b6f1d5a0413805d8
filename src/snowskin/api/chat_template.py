"""A model's chat template, rendered as transformers renders it, but without importing it.

Templates come with the model and are the operator's choice; they still run in jinja's immutable
sandbox, and what clients send is only ever data to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from snowskin.api.errors import ApiError
from snowskin.terms.errors import InvalidInput

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The special tokens that templates know by name."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only renders them."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template.

    Args:
        source: in jinja.
        special_tokens: by name, e.g. ``bos_token``; the template's variables.

    Raises:
        InvalidInput: it does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidInput(f"The model's chat template does not compile: {error}.") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as one text, special tokens included.

        Raises:
            ApiError: 400, the template refuses these messages.
        """
        known = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(known)
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise ApiError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error


def load_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a model directory; None if it has none.

    It is looked for in ``chat_template.jinja``, then in ``tokenizer_config.json`` (a text, or a
    list of named ones of which ``default`` is taken), then in ``chat_template.json``.
    """
    source = _source(model_dir, tokenizer_config)
    return None if source is None else ChatTemplate(source, special_tokens(tokenizer_config))


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of a ``tokenizer_config.json``."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = tokenizer_config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _source(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    if (file := model_dir / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if template is None and (file := model_dir / "chat_template.json").is_file():
        template = msgspec.json.decode(file.read_bytes()).get("chat_template")
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, this one escapes no HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
