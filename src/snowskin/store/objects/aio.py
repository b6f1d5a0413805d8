"""``AsyncStoreClient``: the same store for programs that run on asyncio.

Calls run on threads of a pool of its own: that beats sockets on the event loop, and a large copy
does not hold the loop up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from snowskin.store.objects.client import ObjectInfo, PinName, StoreClient
from snowskin.store.objects.words import StoreStat, TransferStatus
from snowskin.store.objects.writing import PutResult
from snowskin.transfer.paths import PathStat

_T = TypeVar("_T")


class AsyncStoreClient:
    """``StoreClient`` with methods to be awaited; arguments, results and errors are the same.

    A call that is cancelled goes on in its thread to its end, unheard; do not reuse its buffer
    before.

    Args:
        calls: how many calls run at once; more wait.
        options: those of ``StoreClient``.
    """

    def __init__(self, master: str = "127.0.0.1:7411", *, calls: int = 16, **options: Any) -> None:
        self._client = StoreClient(master, **options)
        self._threads = ThreadPoolExecutor(calls, thread_name_prefix="store")

    async def __aenter__(self) -> AsyncStoreClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """See ``StoreClient.close``; waits for calls that run."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._client.close()

    async def put(self, key: str, value: Any, **options: Any) -> PutResult:
        """See ``StoreClient.put``."""
        return await self._call(self._client.put, key, value, **options)

    async def put_from(self, key: str, buffer: Any, **options: Any) -> PutResult:
        """See ``StoreClient.put_from``."""
        return await self._call(self._client.put_from, key, buffer, **options)

    async def put_many(self, values: Mapping[str, Any], **options: Any) -> dict[str, PutResult]:
        """See ``StoreClient.put_many``; here several at once."""
        names = list(values)
        results = await asyncio.gather(*(self.put(key, values[key], **options) for key in names))
        return dict(zip(names, results, strict=True))

    async def get(self, key: str) -> memoryview:
        """See ``StoreClient.get``."""
        return await self._call(self._client.get, key)

    async def get_into(self, key: str, buffer: Any) -> int:
        """See ``StoreClient.get_into``."""
        return await self._call(self._client.get_into, key, buffer)

    async def get_range(self, key: str, first: int, count: int) -> memoryview:
        """See ``StoreClient.get_range``."""
        return await self._call(self._client.get_range, key, first, count)

    async def get_many(self, keys: Sequence[str]) -> dict[str, memoryview | None]:
        """See ``StoreClient.get_many``."""
        return await self._call(self._client.get_many, keys)

    async def exists(self, key: str) -> bool:
        """See ``StoreClient.exists``."""
        return await self._call(self._client.exists, key)

    async def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """See ``StoreClient.exists_many``."""
        return await self._call(self._client.exists_many, keys)

    async def longest_prefix(self, keys: Sequence[str]) -> dict[str, int]:
        """See ``StoreClient.longest_prefix``."""
        return await self._call(self._client.longest_prefix, keys)

    async def size(self, key: str) -> int:
        """See ``StoreClient.size``."""
        return await self._call(self._client.size, key)

    async def info(self, key: str) -> ObjectInfo:
        """See ``StoreClient.info``."""
        return await self._call(self._client.info, key)

    async def list(self, prefix: str = "") -> AsyncIterator[str]:
        """See ``StoreClient.list``."""
        keys = self._client.list(prefix)
        while (key := await self._call(next, keys, None)) is not None:
            yield key

    async def stat(self) -> StoreStat:
        """See ``StoreClient.stat``."""
        return await self._call(self._client.stat)

    async def path_stat(self) -> tuple[PathStat, ...]:
        """See ``StoreClient.path_stat``."""
        return self._client.path_stat()

    async def remove(self, key: str) -> None:
        """See ``StoreClient.remove``."""
        await self._call(self._client.remove, key)

    async def pin(self, key: str, pin: PinName = "hard") -> None:
        """See ``StoreClient.pin``."""
        await self._call(self._client.pin, key, pin)

    async def unpin(self, key: str) -> None:
        """See ``StoreClient.unpin``."""
        await self._call(self._client.unpin, key)

    async def change_replica(
        self, key: str, *, count: int | None = None, node: str | None = None
    ) -> TransferStatus:
        """See ``StoreClient.change_replica``."""
        return await self._call(self._client.change_replica, key, count=count, node=node)

    async def transfer_status(self, transfer: str | TransferStatus) -> TransferStatus:
        """See ``StoreClient.transfer_status``."""
        return await self._call(self._client.transfer_status, transfer)

    async def _call(self, act: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(act, *arguments, **options))
