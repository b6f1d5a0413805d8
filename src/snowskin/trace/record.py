"""Record what a live system serves as a trace to simulate: lengths and sharing, no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from snowskin.terms.ids import BlockKey
from snowskin.trace.formats import header_line
from snowskin.trace.records import TraceRequest


class TraceRecorder:
    """Appends one line for each request to a file of our own format.

    Requests may be noted in any order: a reader puts them in order of arrival. Block names are
    63 bits of the block keys, so that nothing needs to be remembered and nothing can be read back.
    Used as a context manager, or closed by hand.

    Args:
        path: a new file is begun, an existing one replaced.
        started_s: the time, on the clock that ``note`` is told, from which arrivals are counted.
    """

    def __init__(self, path: Path, *, block_tokens: int, name: str, started_s: float) -> None:
        self._block_tokens = block_tokens
        self._started_s = started_s
        self._encoder = msgspec.json.Encoder()
        self._file = path.open("wb")
        self._file.write(header_line(block_tokens=block_tokens, name=name))
        self.count = 0
        """Requests noted so far."""

    def note(
        self,
        *,
        arrived_s: float,
        prompt_tokens: int,
        output_tokens: int,
        keys: Sequence[BlockKey],
    ) -> None:
        """Write one request that has ended. ``keys`` are those of the prompt's full blocks."""
        full = prompt_tokens // self._block_tokens
        assert len(keys) == full, f"{prompt_tokens} tokens hold {full} full blocks, not {len(keys)}"
        blocks = tuple([int.from_bytes(key[:8], "big") >> 1 for key in keys])
        arrival_s = max(0.0, arrived_s - self._started_s)
        line = TraceRequest(arrival_s, prompt_tokens, output_tokens, blocks)
        self._file.write(self._encoder.encode(line) + b"\n")
        self.count += 1

    def flush(self) -> None:
        """Let readers of the file see all that was noted."""
        self._file.flush()

    def close(self) -> None:
        """End the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
