"""OpenAI's answers, whole and in chunks. Pure: from deltas to plain JSON values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from snowskin.api.choice_text import ChoiceDelta, PlacedToken
from snowskin.api.choices import Usage
from snowskin.api.plans import Plan
from snowskin.api.tokenizer import TextTokenizer


@dataclass(slots=True)
class Collected:
    """One choice, gathered for an answer in one piece."""

    texts: list[str] = field(default_factory=list)
    tokens: list[PlacedToken] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Take in the next delta."""
        self.texts.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.finish_reason = delta.finish_reason


class Format(Protocol):
    """How one endpoint writes its answers."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        ...

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Chunks of one delta, possibly none."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk after the last token, where the client asked for it."""
        ...

    def whole(self, collected: Sequence[Collected], usage: Usage) -> dict[str, Any]:
        """The answer in one piece; ``collected`` in the order of the choices."""
        ...


class ChatFormat:
    """``/v1/chat/completions``."""

    def __init__(self, plan: Plan, tokenizer: TextTokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._created_s = int(time.time())

    def opening(self) -> list[dict[str, Any]]:
        """The role of every choice."""
        return [
            self._chunk(index, {"role": "assistant", "content": ""}, None, None)
            for index in range(len(self._plan.prompts[0].choices))
        ]

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The text, then the reason of the end in a chunk of its own."""
        chunks = []
        logprobs = self._logprobs(delta.tokens)
        if delta.text or logprobs:
            chunks.append(self._chunk(delta.index, {"content": delta.text}, logprobs, None))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.index, {}, None, delta.finish_reason))
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """A chunk without choices."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_json(usage)}

    def whole(self, collected: Sequence[Collected], usage: Usage) -> dict[str, Any]:
        """A ``chat.completion``."""
        choices = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(choice.texts),
                    "refusal": None,
                },
                "logprobs": self._logprobs(choice.tokens, even_empty=True),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(collected)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage_json(usage)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._plan.request,
            "object": kind,
            "created": self._created_s,
            "model": self._plan.model,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._plan.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(
        self, tokens: Sequence[PlacedToken], *, even_empty: bool = False
    ) -> dict[str, Any] | None:
        if not self._plan.logprobs or not (tokens or even_empty):
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: PlacedToken) -> dict[str, Any]:
        sampled = token.sampled
        return {
            **self._named(sampled.token, sampled.logprob),
            "top_logprobs": [self._named(top.token, top.logprob) for top in sampled.top],
        }

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        content = self._tokenizer.token_bytes(token)
        return {"token": token_name(content), "logprob": logprob, "bytes": list(content)}


class CompletionFormat:
    """``/v1/completions``."""

    def __init__(self, plan: Plan, tokenizer: TextTokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._created_s = int(time.time())
        self._echoes = [prompt.echo for prompt in plan.prompts for _ in prompt.choices]

    def opening(self) -> list[dict[str, Any]]:
        """The prompts, where they are to be echoed."""
        return [
            self._chunk(index, echo, None, None) for index, echo in enumerate(self._echoes) if echo
        ]

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Text and, at the end, its reason."""
        logprobs = self._logprobs(delta.tokens)
        if not (delta.text or logprobs or delta.finish_reason):
            return []
        return [self._chunk(delta.index, delta.text, logprobs, delta.finish_reason)]

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """A chunk without choices."""
        return {**self._head(), "choices": [], "usage": usage_json(usage)}

    def whole(self, collected: Sequence[Collected], usage: Usage) -> dict[str, Any]:
        """A ``text_completion``."""
        choices = [
            {
                "index": index,
                "text": self._echoes[index] + "".join(choice.texts),
                "logprobs": self._logprobs(choice.tokens, even_empty=True),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(collected)
        ]
        return {**self._head(), "choices": choices, "usage": usage_json(usage)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._plan.request,
            "object": "text_completion",
            "created": self._created_s,
            "model": self._plan.model,
        }

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head(), "choices": [choice]}
        if self._plan.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(
        self, tokens: Sequence[PlacedToken], *, even_empty: bool = False
    ) -> dict[str, Any] | None:
        if not self._plan.logprobs or not (tokens or even_empty):
            return None
        return {
            "tokens": [self._name(token.sampled.token) for token in tokens],
            "token_logprobs": [token.sampled.logprob for token in tokens],
            "top_logprobs": [
                {self._name(top.token): top.logprob for top in token.sampled.top}
                for token in tokens
            ],
            "text_offset": [token.start for token in tokens],
        }

    def _name(self, token: int) -> str:
        return token_name(self._tokenizer.token_bytes(token))


def token_name(content: bytes) -> str:
    """A token as text; where it is a part of a character, its bytes as OpenAI writes them."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def usage_json(usage: Usage) -> dict[str, Any]:
    """The ``usage`` of an answer."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
