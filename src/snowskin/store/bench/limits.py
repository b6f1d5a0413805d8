"""The limits that gets, puts and pulls stand beside: a bare socket, or a bare copy."""

from __future__ import annotations

import numpy as np

from snowskin.store.bench.lanes import Act, Lane
from snowskin.store.bench.raw import RawServer, raw_get, raw_put


class Limits:
    """Of one size; the raw ways go round as many bytes as ours do."""

    def __init__(self, raw: RawServer, *, size_bytes: int, count: int) -> None:
        self._raw = raw
        self._size = size_bytes
        self._room = count * size_bytes
        self._region = np.ones(max(self._room, 1), dtype=np.uint8)

    def by_socket(self, *, put: bool = False) -> Lane:
        """Bytes through a bare TCP socket, from or to another process's memory."""

        def open_lane(number: int) -> Act:
            connection = self._raw.connect(unix=False)
            buffer, size = memoryview(bytearray(self._size)), self._size
            move = raw_put if put else raw_get

            def act(index: int) -> int:
                move(connection, (index + number) * size % self._room, buffer)
                return size

            return act

        return Lane("limit", open_lane)

    def by_memory(self, *, put: bool = False) -> Lane:
        """A copy within this process, and one round trip through a unix socket."""

        def open_lane(number: int) -> Act:
            connection = self._raw.connect(unix=True)
            buffer, size = memoryview(bytearray(self._size)), self._size
            ours, theirs = np.frombuffer(buffer, dtype=np.uint8), self._region

            def act(index: int) -> int:
                raw_get(connection, 0, buffer[:1])
                at = (index + number) * size % self._room
                if put:
                    theirs[at : at + size] = ours
                else:
                    ours[:] = theirs[at : at + size]
                return size

            return act

        return Lane("limit", open_lane)
