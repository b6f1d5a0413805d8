"""One choice's tokens become text, log-probabilities and an end. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from snowskin.api.detokenize import IncrementalText
from snowskin.api.stop_strings import StopStrings
from snowskin.api.tokenizer import TextTokenizer
from snowskin.terms.request import GenerationRequest, SampledToken
from snowskin.terms.serving import FinishReason, TokensArrived


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and where its text begins in the choice's text, in characters."""

    sampled: SampledToken
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new of one choice."""

    index: int
    text: str
    tokens: tuple[PlacedToken, ...]
    """Those whose text is shown by now."""
    finish_reason: FinishReason | None


class ChoiceText:
    """One choice of a request, from its first token to its last.

    Args:
        index: among the choices of the body.
        context: tokens that the text goes on from; empty for a text of its own.
    """

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        tokenizer: TextTokenizer,
        *,
        stop_strings: Sequence[str] = (),
        context: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.request = request
        self.output_tokens = 0
        self.cached_tokens = 0
        self.finished = False
        self._text = IncrementalText(tokenizer, context)
        self._stops = StopStrings(stop_strings)
        self._waiting: deque[PlacedToken] = deque()
        self._made = 0
        self._shown = 0

    def take(self, arrived: TokensArrived) -> ChoiceDelta:
        """The next tokens. After a delta with a finish reason no more may come."""
        assert not self.finished, "tokens after the end of a choice"
        self.cached_tokens = arrived.cached_tokens
        last = len(arrived.tokens) - 1
        text = ""
        for position, sampled in enumerate(arrived.tokens):
            self.output_tokens += 1
            is_end = position == last and arrived.finish_reason == "stop"
            if is_end and sampled.token in self.request.stop_tokens:
                break
            text += self._show(sampled)
            if self._stops.stopped:
                break
        if arrived.finish_reason is not None and not self._stops.stopped:
            text += self._stops.push(self._text.finish())
            text += self._stops.finish()
        finish_reason = "stop" if self._stops.stopped else arrived.finish_reason
        self.finished = finish_reason is not None
        self._shown += len(text)
        return ChoiceDelta(self.index, text, self._released(), finish_reason)

    def _show(self, sampled: SampledToken) -> str:
        piece = self._text.push(sampled.token)
        start, self._made = self._made, self._made + len(piece)
        self._waiting.append(PlacedToken(sampled, start, self._made))
        if self.output_tokens <= self.request.min_output_tokens:
            return self._stops.pass_by(piece)
        return self._stops.push(piece)

    def _released(self) -> tuple[PlacedToken, ...]:
        """Tokens whose text is shown, or was cut off by a stop string in its midst."""
        released = []
        while self._waiting and self._is_shown(self._waiting[0]):
            released.append(self._waiting.popleft())
        return tuple(released)

    def _is_shown(self, token: PlacedToken) -> bool:
        """A token without text, as in the midst of a character, waits for the text after it."""
        if self.finished and not self._stops.stopped:
            return True
        if self.finished or token.start == token.end:
            return token.start < self._shown
        return token.end <= self._shown
