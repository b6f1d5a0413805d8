"""From a body's bytes to a checked model, or to an error that names the parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError

from snowskin.api.errors import ApiError, shown

B = TypeVar("B", bound=BaseModel)

UNUSED = frozenset(
    {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "priority"}
)
"""Fields that are accepted and change nothing."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "documents": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
"""Fields of OpenAI or vLLM that are known but not served, and the values that ask for nothing."""

UNSUPPORTED_IN_MESSAGES: Mapping[str, tuple[object, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
    "refusal": ("",),
    "annotations": ([],),
}
"""The same for the fields of a message."""


def parse_body(raw: bytes, model: type[B]) -> B:
    """The body as ``model``.

    Raises:
        ApiError: 400, naming what is wrong.
    """
    body = _decode(raw)
    if not isinstance(body, dict):
        raise ApiError(f"The body must be a JSON object, not {shown(body)}.", code="invalid_json")
    present = {name: value for name, value in body.items() if value is not None}
    fields = model.model_fields
    wanted = _without_unserved(
        {name: value for name, value in present.items() if name not in UNUSED or name in fields},
        {name: values for name, values in UNSUPPORTED.items() if name not in fields},
    )
    _check_best_of(wanted)
    if isinstance(wanted.get("messages"), list):
        wanted["messages"] = [
            _plain_message(message, index) for index, message in enumerate(wanted["messages"])
        ]
    try:
        return model.model_validate(wanted)
    except ValidationError as error:
        raise _named(error, model) from None


def _decode(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _without_unserved(
    fields: Mapping[str, Any], unserved: Mapping[str, tuple[object, ...]], *, path: str = ""
) -> dict[str, Any]:
    kept = {}
    for name, value in fields.items():
        if name not in unserved:
            kept[name] = value
        elif value not in unserved[name]:
            harmless = ", ".join(repr(allowed) for allowed in unserved[name])
            raise ApiError(
                f"'{path}{name}' is not supported by this server (it was {shown(value)}). "
                + (f"Leave it out, or send {harmless}." if harmless else "Leave it out."),
                code="unsupported_parameter",
                param=f"{path}{name}",
            )
    return kept


def _check_best_of(fields: dict[str, Any]) -> None:
    """``best_of`` is served where it picks nothing, so that it never reaches the models."""
    best_of = fields.pop("best_of", None)
    if best_of is not None and best_of != fields.get("n", 1):
        raise ApiError(
            f"'best_of' is not supported beyond n: it was {shown(best_of)}, and n is "
            f"{shown(fields.get('n', 1))}. Leave it out, or send the same as n.",
            code="unsupported_parameter",
            param="best_of",
        )


def _plain_message(message: Any, index: int) -> Any:
    """A message without nulls; refused by name where it holds what is not served."""
    if not isinstance(message, dict):
        return message
    path = f"messages.{index}."
    present = {name: value for name, value in message.items() if value is not None}
    present = _without_unserved(present, UNSUPPORTED_IN_MESSAGES, path=path)
    if present.get("role") in ("tool", "function"):
        raise ApiError(
            f"'{path}role' {present['role']!r} is not supported by this server: it serves no tools."
            " Send system, developer, user or assistant.",
            code="unsupported_parameter",
            param=f"{path}role",
        )
    parts = present.get("content")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise ApiError(
                f"'{path}content' of type {part['type']!r} is not supported by this server: it "
                "reads text only.",
                code="unsupported_parameter",
                param=f"{path}content",
            )
    return present


def _named(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """The first thing wrong, in OpenAI's words."""
    first = error.errors(include_url=False)[0]
    location = [part for part in first["loc"] if not _is_branch(part)]
    param = ".".join(str(part) for part in location) or None
    match first["type"]:
        case "extra_forbidden":
            return ApiError(
                f"Unknown parameter: '{param}' (it was {shown(first['input'])}).",
                code="unknown_parameter",
                param=param,
            )
        case "missing":
            return ApiError(
                f"Missing required parameter: '{param}'.",
                code="missing_required_parameter",
                param=param,
            )
        case _:
            accepted = _accepted(model, location) or first["msg"].removeprefix("Value error, ")
            return ApiError(
                f"Invalid value for '{param}': {shown(first['input'])}. Expected: {accepted}.",
                param=param,
            )


def _is_branch(part: int | str) -> bool:
    """Whether a part of pydantic's location names a branch of a union and no field."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)


def _accepted(model: type[BaseModel], location: Sequence[int | str]) -> str | None:
    """The accepted range of a bounded field, e.g. ``0 <= temperature <= 2``."""
    if not location or (field := model.model_fields.get(str(location[0]))) is None:
        return None
    low = high = ""
    for bound in field.metadata:
        match bound:
            case Ge():
                low = f"{bound.ge} <= "
            case Gt():
                low = f"{bound.gt} < "
            case Le():
                high = f" <= {bound.le}"
            case Lt():
                high = f" < {bound.lt}"
    if not low and not high:
        return None
    kind = "an integer" if "int" in str(field.annotation) else "a number"
    return f"{kind} with {low}{location[0]}{high}"
