"""The same store from asyncio."""

import asyncio

import pytest

from snowskin.store import AsyncStoreClient, KeyConflict, KeyMissing

from .running import content


def test_many_puts_and_gets_at_once_from_one_loop(store):
    store.node()

    async def work():
        async with AsyncStoreClient(store.address, calls=8) as client:
            values = {f"key-{index}": content(10_000 * index, seed=index) for index in range(20)}
            results = await client.put_many(values)
            assert {result.status for result in results.values()} == {"stored"}
            got = await asyncio.gather(*(client.get(key) for key in values))
            assert [bytes(value) for value in got] == list(values.values())
            assert [key async for key in client.list("key-1")] == sorted(
                key for key in values if key.startswith("key-1")
            )
            assert await client.exists_many(["key-3", "absent"]) == [True, False]
            with pytest.raises(KeyConflict):
                await client.put("key-1", b"other")
            await client.remove("key-1")
            with pytest.raises(KeyMissing):
                await client.get("key-1")
            buffer = bytearray(20_000)
            assert await client.get_into("key-2", buffer) == 20_000
            assert bytes(await client.get_range("key-2", 5, 5)) == values["key-2"][5:10]
            assert await client.size("key-2") == 20_000
            assert (await client.stat()).objects == 19
            assert await client.path_stat() == ()

    asyncio.run(work())
