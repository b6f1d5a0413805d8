"""What can go wrong between a user and the stand-alone store, each with a name and a remedy."""

from __future__ import annotations

from snowskin.terms.errors import SnowskinError


class StoreError(SnowskinError):
    """The root of all errors of the stand-alone store."""


class KeyMissing(StoreError, LookupError):
    """No readable object has this key. An empty value is no missing key."""


class KeyConflict(StoreError):
    """The key has other content already, and objects are write-once: remove it, or choose another
    key."""


class PoolFullError(StoreError):
    """No node can make room: what it holds is pinned, leased or larger than the node. Unpin or
    remove objects, or add nodes."""


class MasterUnreachable(StoreError, ConnectionError):
    """The master did not answer in time: start it, or correct its address."""


class ReplicaUnreachable(StoreError, ConnectionError):
    """The object exists, but none of the nodes that hold it could be read in time."""


class StoreTimeout(StoreError, TimeoutError):
    """It took longer than the client's ``timeout_s``."""


class NoSuchTransfer(StoreError, LookupError):
    """No transfer has this id, or it ended so long ago that it was forgotten."""


class StoreRefused(StoreError):
    """The master or a node would not do it; the message says why and what to do."""


ERRORS: dict[str, type[StoreError]] = {
    kind.__name__: kind
    for kind in (
        KeyMissing,
        KeyConflict,
        PoolFullError,
        ReplicaUnreachable,
        StoreTimeout,
        NoSuchTransfer,
        StoreRefused,
    )
}
"""Those that travel as answers, by name."""
