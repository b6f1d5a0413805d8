"""The journal: what a Conductor was told and what it answered, so that both can be had again.

A live run and a simulated one are driven by the same machine. That the recorded events, told to a
fresh Conductor with the same seed, give the same commands ("decision parity") is what makes the one
evidence of the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, TypeVar

import msgspec

from snowskin.conductor.conductor import Conductor
from snowskin.conductor.config import ConductorConfig
from snowskin.cost.profile import Profile
from snowskin.terms.commands import Command
from snowskin.terms.errors import InvalidInput
from snowskin.terms.events import Event

_T = TypeVar("_T")
_LENGTH_BYTES = 4
_ENTRY_LIMIT_BYTES = 1 << 30


class JournalHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a Conductor starts from."""

    config: ConductorConfig
    profile: Profile
    seed: int

    def conductor(self) -> Conductor:
        """A fresh Conductor as this header describes it."""
        return Conductor(self.config, self.profile, random.Random(self.seed))


class JournalEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of ``handle``."""

    now_s: float
    event: Event
    commands: tuple[Command, ...]


class Divergence(msgspec.Struct, frozen=True):
    """The first entry that a replay answered otherwise."""

    index: int
    entry: JournalEntry
    replayed: tuple[Command, ...]


class RecordedConductor:
    """A Conductor that writes each call down, as one length-prefixed MessagePack message.

    It has the Conductor's two verbs, so a driver needs not know which of them it drives.

    Args:
        write: takes the bytes of one record; a file's ``write`` serves.
    """

    def __init__(self, header: JournalHeader, write: Callable[[bytes], object]) -> None:
        self.conductor = header.conductor()
        self._write = write
        self._encoder = msgspec.msgpack.Encoder()
        self._put(header)

    def handle(self, event: Event, *, now_s: float) -> tuple[Command, ...]:
        """See ``Conductor.handle``."""
        commands = self.conductor.handle(event, now_s=now_s)
        self._put(JournalEntry(now_s, event, commands))
        return commands

    def next_wakeup_s(self) -> float | None:
        """See ``Conductor.next_wakeup_s``."""
        return self.conductor.next_wakeup_s()

    def _put(self, message: JournalHeader | JournalEntry) -> None:
        body = self._encoder.encode(message)
        self._write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)


def read_journal(stream: BinaryIO) -> tuple[JournalHeader, Iterator[JournalEntry]]:
    """The header and then, lazily, the entries; a last record cut short by a crash is left out.

    Raises:
        InvalidInput: the stream is no journal; at once, or on the entry that is broken.
    """
    head = _next_body(stream)
    if head is None:
        raise InvalidInput("the journal is empty")
    header = _decode(head, msgspec.msgpack.Decoder(JournalHeader))
    return header, _entries(stream)


def replay(header: JournalHeader, entries: Iterable[JournalEntry]) -> Divergence | None:
    """Tell a fresh Conductor the same; None if it answers the same throughout."""
    conductor = header.conductor()
    for index, entry in enumerate(entries):
        commands = conductor.handle(entry.event, now_s=entry.now_s)
        if commands != entry.commands:
            return Divergence(index, entry, commands)
    return None


def _entries(stream: BinaryIO) -> Iterator[JournalEntry]:
    decoder = msgspec.msgpack.Decoder(JournalEntry)
    while (body := _next_body(stream)) is not None:
        yield _decode(body, decoder)


def _next_body(stream: BinaryIO) -> bytes | None:
    length = stream.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    body_bytes = int.from_bytes(length, "little")
    if body_bytes > _ENTRY_LIMIT_BYTES:
        raise InvalidInput(f"a journal record of {body_bytes} bytes is no record of ours")
    body = stream.read(body_bytes)
    return body if len(body) == body_bytes else None


def _decode(body: bytes, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"the journal has a broken record: {error}") from error
