"""Asking the master: one question, one answer, over pooled connections, until a deadline."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from snowskin.store.objects.errors import ERRORS, MasterUnreachable, StoreRefused
from snowskin.store.objects.frames import LENGTH, FrameReader, decode_question, decode_reply, frame
from snowskin.store.objects.words import Question, Refusal, Reply, Warming
from snowskin.terms.errors import InvalidInput, TransferFailed
from snowskin.transfer.authentication import (
    HANDSHAKE_TIMEOUT_S,
    NotAuthenticated,
    authenticate_as_client,
)
from snowskin.transfer.wire import Lookout, is_silence, limit_blocking, tune

RETRY_S = 0.02
IDLE_LIMIT = 16

_T = TypeVar("_T")
_UNPACKABLE = (TypeError, ValueError, OverflowError)
"""What packing and unpacking raise for values of a wrong type."""


class MasterConnection:
    """One connection to the master, for one thread at a time. Any error means: close it."""

    def __init__(self, address: tuple[str, int], cluster_key: bytes, silence_s: float) -> None:
        """Connect and authenticate.

        Raises:
            OSError, NotAuthenticated: it did not work.
        """
        timeout_s = min(HANDSHAKE_TIMEOUT_S, silence_s)
        self._socket = socket.create_connection(address, timeout_s)
        try:
            tune(self._socket)
            authenticate_as_client(self._socket, cluster_key, timeout_s=timeout_s)
            limit_blocking(self._socket, receive_s=silence_s, send_s=silence_s)
        except BaseException:
            self._socket.close()
            raise
        self._reader = FrameReader(self._socket)
        self._lookout = Lookout(self._socket)

    def ask(self, question: Question) -> Reply:
        """The answer to one question."""
        self._socket.sendall(frame(question))
        self._lookout.look()
        return decode_reply(self._reader.receive())

    def ask_all(self, questions: Sequence[Question]) -> list[Reply]:
        """The answers to several, one more question being under way while one is answered."""
        replies: list[Reply] = []
        for position, question in enumerate(questions):
            self._socket.sendall(frame(question))
            if position:
                replies.append(decode_reply(self._reader.receive()))
        self._lookout.look()
        replies.append(decode_reply(self._reader.receive()))
        return replies

    def close(self) -> None:
        """Close it."""
        self._socket.close()


class MasterChannel:
    """The master, from any number of threads at once.

    Args:
        timeout_s: how long to try until MasterUnreachable.
    """

    def __init__(self, address: tuple[str, int], cluster_key: bytes, timeout_s: float) -> None:
        self.address = address
        self._cluster_key = cluster_key
        self._timeout_s = timeout_s
        self._idle: list[MasterConnection] = []
        self._is_open = True

    def ask(self, question: Question, kind: type[_T]) -> _T:
        """The answer, which is of this kind.

        Raises:
            StoreError: the master refused, by the error's name; or the channel is closed.
            InvalidInput: a question has an argument of a wrong type.
            MasterUnreachable: it did not answer in time.
        """
        reply = self.ask_any(question)
        if not isinstance(reply, kind):
            raise StoreRefused(f"the master answered with {type(reply).__name__}")
        return reply

    def ask_any(self, question: Question) -> Reply:
        """The answer, of whichever kind but Refusal and Warming; see ``ask``."""
        reply = self._ask_at_once(question)
        return self.ask_all((question,))[0] if reply is None else reply

    def ask_all(self, questions: Sequence[Question]) -> list[Reply]:
        """The answers to several questions of the same kind; see ``ask``."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            connection: MasterConnection | None = None
            problem: Exception | None = None
            try:
                connection = self._take()
                replies = connection.ask_all(questions)
            except NotAuthenticated:
                raise
            except (OSError, TransferFailed, msgspec.MsgspecError) as error:
                problem = error
                if connection is not None:
                    connection.close()
                self._drop_idle()
                _check(questions)
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if isinstance(error, _UNPACKABLE):
                    _check(questions)
                raise
            else:
                self._give_back(connection)
                if not any(isinstance(reply, Warming) for reply in replies):
                    return [_checked(reply) for reply in replies]
            if time.monotonic() >= deadline_s:
                host, port = self.address
                why = problem or "it has just started"
                why = "it is silent" if is_silence(problem) else why
                raise MasterUnreachable(
                    f"the master at {host}:{port} did not answer within {self._timeout_s} s "
                    f"({why}); start it with `snowskin store master`, "
                    "or correct its address"
                ) from problem
            time.sleep(RETRY_S)

    def _ask_at_once(self, question: Question) -> Reply | None:
        """The usual case without ado: one question, over an idle connection; None: try in full."""
        try:
            connection = self._idle.pop()
        except IndexError:
            return None
        try:
            reply = connection.ask(question)
        except (OSError, msgspec.MsgspecError):
            connection.close()
            self._drop_idle()
            return None
        except BaseException as error:
            connection.close()
            if isinstance(error, _UNPACKABLE):
                _check((question,))
            raise
        self._give_back(connection)
        return None if type(reply) is Warming else _checked(reply)

    def close(self) -> None:
        """Close the idle connections, and refuse whatever is asked from now on."""
        self._is_open = False
        self._drop_idle()

    def _take(self) -> MasterConnection:
        if not self._is_open:
            raise StoreRefused("this client is closed; make another one")
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return MasterConnection(self.address, self._cluster_key, self._timeout_s)

    def _give_back(self, connection: MasterConnection) -> None:
        if self._is_open and len(self._idle) < IDLE_LIMIT:
            self._idle.append(connection)
        else:
            connection.close()

    def _drop_idle(self) -> None:
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()


def _check(questions: Sequence[Question]) -> None:
    """See whether a master could understand questions that went wrong.

    Raises:
        InvalidInput: it could not: an argument is of a wrong type.
    """
    for question in questions:
        try:
            decode_question(frame(question)[LENGTH.size :])
        except _UNPACKABLE as error:
            raise InvalidInput(
                f"an argument of {type(question).__name__} is of a wrong type: {error}"
            ) from error


def _checked(reply: Reply) -> Reply:
    if isinstance(reply, Refusal):
        raise ERRORS.get(reply.error, StoreRefused)(reply.message)
    return reply
