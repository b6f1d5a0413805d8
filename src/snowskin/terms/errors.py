"""Errors with a name of their own. Each message says what was wrong and what to do about it."""

from __future__ import annotations


class SnowskinError(Exception):
    """The root of all errors that Snowskin raises on purpose."""


class InvalidInput(SnowskinError):
    """A value from outside is wrong. The edge (CLI or API) shows it to the user as it is.

    Args:
        parameter: the option or field at fault, as the user spells it; None if it is the whole.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class UnsupportedModel(SnowskinError):
    """The model has a part that the engine would compute wrongly; refused by name at start."""


class Overloaded(SnowskinError):
    """The request was not admitted; the API answers 429.

    Args:
        retry_after_s: when the Conductor expects to have room, by its own prediction.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailed(SnowskinError):
    """A request that had been admitted could not be finished, e.g. its node died."""


class NodeUnavailable(SnowskinError):
    """No node of the needed role is up."""


class TransferFailed(SnowskinError):
    """Bytes could not be had from a peer. Handled where it arises: the block is a miss."""
