"""The KV pool: directory, eviction, tiers; and a store of its own, see ``StoreClient``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snowskin.store.objects.aio import AsyncStoreClient
    from snowskin.store.objects.client import ObjectInfo, StoreClient
    from snowskin.store.objects.errors import (
        KeyConflict,
        KeyMissing,
        MasterUnreachable,
        NoSuchTransfer,
        PoolFullError,
        ReplicaUnreachable,
        StoreError,
        StoreRefused,
        StoreTimeout,
    )
    from snowskin.store.objects.writing import PutResult

_HOMES = {
    "AsyncStoreClient": "aio",
    "ObjectInfo": "client",
    "PutResult": "writing",
    "StoreClient": "client",
    "KeyConflict": "errors",
    "KeyMissing": "errors",
    "MasterUnreachable": "errors",
    "NoSuchTransfer": "errors",
    "PoolFullError": "errors",
    "ReplicaUnreachable": "errors",
    "StoreError": "errors",
    "StoreRefused": "errors",
    "StoreTimeout": "errors",
}

__all__ = [
    "AsyncStoreClient",
    "KeyConflict",
    "KeyMissing",
    "MasterUnreachable",
    "NoSuchTransfer",
    "ObjectInfo",
    "PoolFullError",
    "PutResult",
    "ReplicaUnreachable",
    "StoreClient",
    "StoreError",
    "StoreRefused",
    "StoreTimeout",
]


def __getattr__(name: str) -> Any:
    """Import the client only where it is used: the pure parts of this room need none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"snowskin.store.objects.{_HOMES[name]}"), name)
