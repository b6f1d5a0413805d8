"""Text from tokens as they come: each step decodes a handful of tokens, however long the text."""

from __future__ import annotations

from collections.abc import Sequence

from snowskin.api.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""

WINDOW_LIMIT_TOKENS = 24
"""A character has at most 4 bytes, so more tokens without one can only be broken text."""

CONTEXT_TOKENS = 8
"""Tokens of the prompt that the first decoding sees."""


class IncrementalText:
    """The text of one generation; its pieces join to what decoding all tokens at once gives.

    A window of the latest tokens is decoded at each step, and what was given of it before is left
    out. Text that ends in a replacement character is withheld: its character may be unfinished.
    The window starts with tokens already given, because decoders treat a first token otherwise
    (some strip its space).

    Args:
        context: tokens before the generation, for a text that goes on from them; empty for a text
            of its own.
    """

    def __init__(self, tokenizer: TextTokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = [
            token for token in context[-CONTEXT_TOKENS:] if self._tokenizer.has_text(token)
        ]
        self._given = len(self._decoded().rstrip(REPLACEMENT))
        self._anchor = 0
        """Where in the window the tokens begin whose text is not complete yet."""
        if self._given:
            self._anchor = len(self._window)

    def push(self, token: int) -> str:
        """The text that ``token`` completes; often empty in the midst of a character."""
        if not self._tokenizer.has_text(token):
            return ""
        self._window.append(token)
        text = self._decoded()
        complete = text.rstrip(REPLACEMENT)
        if len(self._window) - self._anchor >= WINDOW_LIMIT_TOKENS:
            return self._settle(text)
        if len(complete) < len(text):
            return self._give(complete)
        return self._settle(text) if len(text) > self._given else ""

    def finish(self) -> str:
        """What was withheld: the generation is over."""
        return self._give(self._decoded())

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new

    def _settle(self, text: str) -> str:
        """Give the text, and let only the tokens that made it stand before the next ones."""
        new = self._give(text)
        self._window = self._window[self._anchor :]
        self._anchor = len(self._window)
        self._given = len(self._decoded())
        return new

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
