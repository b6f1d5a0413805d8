"""Ends a text before a stop string, and withholds what may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one growing text.

    The first stop string to be *completed* ends the text; of two completed by the same character,
    the longer. So the result does not depend on the pieces in which the text comes.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part that may be shown. Sets ``stopped`` at a stop string; later text is dropped."""
        if self.stopped or not self._strings:
            return "" if self.stopped else text
        held = self._held + text
        if (start := self._first_stop(held)) is not None:
            self.stopped = True
            self._held = ""
            return held[:start]
        keep = self._undecided(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def pass_by(self, text: str) -> str:
        """Text that is shown whatever it contains: the least output has not come yet."""
        shown, self._held = self._held + text, ""
        return shown

    def finish(self) -> str:
        """What was withheld: the text is over and was no stop string."""
        return self.pass_by("")

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string begins that is completed first; None if there is none."""
        found = []
        for string in self._strings:
            if (start := text.find(string)) >= 0:
                found.append((start + len(string), start))
        return min(found)[1] if found else None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max(len(string) for string in self._strings) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            if any(string.startswith(end) for string in self._strings):
                return size
        return 0
