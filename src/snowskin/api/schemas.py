"""What clients may send. OpenAI's fields and defaults, with vLLM's additions.

A field that is null counts as absent. Known fields that cannot be served are refused before these
models see them (``api.parsing``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
TOP_K_MAX = 2**31 - 1
"""More than any vocabulary; integers without bound do not fit the control wire."""
LEAST_REPETITION_PENALTY = 0.01
"""Logits divided by much less overflow, and nothing can be drawn from them (our choice)."""

TokenIds = Annotated[list[int], Field(min_length=1)]


class Body(BaseModel):
    """Strict: no unknown fields, no silent conversion, no infinities."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send the usage in a last chunk.")


class GenerationBody(Body):
    """The fields that both endpoints share."""

    model: str | None = Field(None, description="The served model's name; may be left out.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Output limit in tokens. Default: 16 for completions; for chats what the "
        "context leaves, up to the server's own limit.",
    )
    n: int = Field(1, ge=1, le=128, description="Choices per prompt.")
    stream: bool = Field(False, description="Send tokens as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    stop: str | list[str] | None = Field(
        None, description="At most 4 strings; generation ends before the first that appears."
    )
    stop_token_ids: list[int] = Field(
        default_factory=list, max_length=64, description="More tokens that end the generation."
    )
    temperature: float = Field(
        1.0,
        ge=0,
        le=2,
        description="0 takes the likeliest token. Default here, as for top_p, top_k, min_p and "
        "repetition_penalty: what the model's generation_config.json says, if it does.",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the likeliest this much.")
    top_k: int | None = Field(
        None,
        ge=-1,
        le=TOP_K_MAX,
        description="Sample from so many likeliest tokens; 0 or -1: all.",
    )
    min_p: float = Field(0.0, ge=0, le=1, description="Least probability, relative to the top.")
    seed: int | None = Field(
        None, ge=SEED_MIN, le=SEED_MAX, description="Same seed, same text; choice i: seed + i."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Against tokens seen at all.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="Against tokens seen often.")
    repetition_penalty: float = Field(
        1.0,
        ge=LEAST_REPETITION_PENALTY,
        le=10,
        description="Divides the logits of tokens of prompt and output.",
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, description="Token id (as string) to an addition to its logit."
    )
    ignore_eos: bool = Field(False, description="Go on past the model's end of text.")
    min_tokens: int = Field(0, ge=0, description="Least output before the text may end.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Only requests of the same salt share cached prefixes.",
    )
    user: str | None = Field(None, description="Accepted, not used.")

    @field_validator("stop")
    @classmethod
    def _few_and_not_empty(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > 4:
            raise ValueError(f"at most 4 stop strings are accepted, not {len(strings)}")
        if any(not string or len(string) > 256 for string in strings):
            raise ValueError("a stop string has 1 to 256 characters")
        return stop

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, whichever way they were written."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(Body):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = Field(None, description="Handed to the chat template.")
    reasoning_content: str | None = Field(None, description="Handed to the chat template.")

    def plain(self) -> dict[str, str]:
        """As chat templates want it: content as one string, developer as system."""
        content = self.content
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content
            if isinstance(content, str)
            else "\n".join(part.text for part in content),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


class ChatBody(GenerationBody):
    """A request for ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="The newer name of max_tokens; wins over it."
    )
    logprobs: bool = Field(False, description="Send each token's log-probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="And of so many likeliest tokens; needs logprobs."
    )
    add_generation_prompt: bool = Field(True, description="Open the assistant's turn.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More variables for the chat template."
    )


class CompletionBody(GenerationBody):
    """A request for ``/v1/completions``."""

    prompt: str | list[str] | TokenIds | list[TokenIds] = Field(
        description="Text, texts, token ids, or lists of token ids."
    )
    echo: bool = Field(False, description="Put the prompt before the answer.")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Log-probabilities of the token and so many likeliest."
    )
    add_special_tokens: bool = Field(True, description="Let the tokenizer add e.g. its BOS.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_of_four(cls, prompt: object) -> object:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt:
            if all(isinstance(item, str) for item in prompt):
                return prompt
            if _are_ids(prompt) or all(_are_ids(item) for item in prompt):
                return prompt
        raise ValueError(
            "a prompt is a string, a list of strings, a list of token ids, or a list of lists of "
            "token ids, and none of the lists is empty"
        )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class TokenizeBody(Body):
    """A request for ``/tokenize``: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = Field(True, description="Of a prompt; messages have their own.")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeBody(Body):
    """A request for ``/detokenize``."""

    model: str | None = None
    tokens: list[int]
