"""``snowskin bench directory``: look-ups at the master, beside a bare echo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from snowskin.store.bench.lanes import Act, Lane, measure
from snowskin.store.bench.raw import RawServer, raw_get
from snowskin.store.bench.rows import check_counts
from snowskin.store.bench.servers import running_store
from snowskin.store.objects.client import StoreClient

ECHO_BYTES = 16
NODE_BYTES = 64 << 20


class DirectoryBenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: ``objects`` are held, and twice as many keys are asked for.

    Raises:
        InvalidInput: there would be nothing to do.
    """

    objects: int = 20_000
    batches: tuple[int, ...] = (16, 1024, 65_536)
    rounds: int = 5
    round_s: float = 0.4

    def __post_init__(self) -> None:
        check_counts(objects=self.objects, rounds=self.rounds)


class DirectoryRow(msgspec.Struct, frozen=True):
    """One line, for one client.

    Attributes:
        per_s: keys a second.
        limit_per_s: round trips of a bare echo a second, times the batch.
        ratio: of both.
    """

    op: str
    batch: int
    per_s: float
    limit_per_s: float
    ratio: float


def bench_directory(
    config: DirectoryBenchConfig, show: Callable[[DirectoryRow], object]
) -> Sequence[DirectoryRow]:
    """Measure everything; each row is shown as soon as it is there."""
    rows: list[DirectoryRow] = []
    raw = RawServer(1 << 20)
    try:
        with running_store(NODE_BYTES) as master, StoreClient(master) as client:
            for index in range(config.objects):
                client.put(_key(2 * index), b"")
            for op, batch in [("exists", 1), *(("exists_many", size) for size in config.batches)]:
                lanes = [
                    Lane("limit", partial(_echo, raw, batch)),
                    Lane("ours", partial(_ask, client, config, batch)),
                ]
                measured = measure(
                    lanes, clients=1, rounds=config.rounds, round_s=config.round_s, least_calls=1
                )
                per_s, limit = measured["ours"].units_per_s, measured["limit"].units_per_s
                row = DirectoryRow(op, batch, per_s, limit, per_s / limit)
                rows.append(row)
                show(row)
    finally:
        raw.stop()
    return rows


def _key(number: int) -> str:
    return f"bench/{number:010}"


def _echo(raw: RawServer, batch: int, client_number: int) -> Act:
    del client_number
    connection, buffer = raw.connect(unix=False), memoryview(bytearray(ECHO_BYTES))

    def act(index: int) -> int:
        del index
        raw_get(connection, 0, buffer)
        return batch

    return act


def _ask(client: StoreClient, config: DirectoryBenchConfig, batch: int, client_number: int) -> Act:
    del client_number
    keys = [_key(number % (2 * config.objects)) for number in range(max(batch, 4096))]

    def one(index: int) -> int:
        client.exists(keys[index % len(keys)])
        return 1

    def many(index: int) -> int:
        at = index * batch % (len(keys) - batch + 1)
        client.exists_many(keys[at : at + batch])
        return batch

    return one if batch == 1 else many
