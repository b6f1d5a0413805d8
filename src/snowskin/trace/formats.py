"""Read and write traces: Mooncake's JSONL, Azure's CSV and our own JSONL with a header line."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import msgspec
import numpy as np

from snowskin.terms.errors import InvalidInput
from snowskin.trace.records import Trace, TraceBuilder, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
"""The released traces name one hash for every 512 tokens (FAST '25 artifact)."""
FORMAT_NAME = "snowskin-trace"
BATCH_BYTES = 8 << 20
TOKEN_LIMIT = 2**24
"""Most tokens of a prompt or an answer. Our choice: beyond every model's context, and a bound on
the memory that one line can cost."""
_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
"""What JSON takes for white space."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Time = Annotated[float, msgspec.Meta(ge=0)]
_Prompt = Annotated[int, msgspec.Meta(ge=1, le=TOKEN_LIMIT)]
_Output = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_LIMIT)]


class _OwnLine(msgspec.Struct, frozen=True, gc=False):
    arrival_s: _Time
    prompt_tokens: _Prompt
    output_tokens: _Output
    blocks: list[_BlockId]


_MOONCAKE_NAMES = {
    "arrival_s": "timestamp",
    "prompt_tokens": "input_length",
    "output_tokens": "output_length",
    "blocks": "hash_ids",
}


class _MooncakeLine(msgspec.Struct, frozen=True, gc=False, rename=_MOONCAKE_NAMES):
    """The same four facts under the released traces' names; the time is in milliseconds."""

    arrival_s: _Time
    prompt_tokens: _Prompt
    output_tokens: _Output
    blocks: list[_BlockId]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    name: str = ""


def read_trace(path: Path) -> Trace:
    """The trace in ``path``; its format is told by its first line that is not blank.

    Raises:
        InvalidInput: the file is missing or a line is wrong; names the line and the value.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            blank_lines, begin = 0, file.tell()
            while (first := file.readline()) and not first.strip(_BLANKS):
                blank_lines, begin = blank_lines + 1, file.tell()
            if first.startswith(_AZURE_COLUMNS[0].encode()):
                return _read_azure(path, blank_lines)
            # A line of Mooncake's may have a field of that name as well.
            if b'"format"' in first and b'"hash_ids"' not in first:
                return _read_own(path, file, first, blank_lines)
            file.seek(begin)
            builder = TraceBuilder(path.stem, block_tokens=MOONCAKE_BLOCK_TOKENS)
            return _read_lines(path, file, _MooncakeLine, builder, line_count=blank_lines)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", parameter="trace") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text: {error}", parameter="trace") from error


def _refuse(path: Path, line: int, problem: str, value: object) -> NoReturn:
    shown = str(value)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    raise InvalidInput(f"{path}, line {line}: {problem}; got {shown}", parameter="trace")


def _decode_lines(
    path: Path, lines: list[bytes], first_line: int, kind: type[Any]
) -> tuple[list[Any], list[int]]:
    """A record for each line that is not blank, and the lines' numbers."""
    decode = msgspec.json.Decoder(kind).decode
    rows: list[Any] = []
    numbers: list[int] = []
    for number, line in enumerate(lines, first_line):
        if line.strip(_BLANKS):
            try:
                rows.append(decode(line))
            except _UNREADABLE as error:
                _refuse(path, number, str(error), line.decode("utf-8", "replace").strip())
            numbers.append(number)
    return rows, numbers


def _read_lines(
    path: Path,
    file: BinaryIO,
    kind: type[_OwnLine] | type[_MooncakeLine],
    builder: TraceBuilder,
    *,
    line_count: int,
) -> Trace:
    """All further lines of ``file``, of which ``line_count`` are read already."""
    mooncake = kind is _MooncakeLine
    block_tokens = builder.block_tokens
    while lines := file.readlines(BATCH_BYTES):
        rows, numbers = _decode_lines(path, lines, line_count + 1, kind)
        prompt = np.array([row.prompt_tokens for row in rows], dtype=np.int64)
        counts = np.array([len(row.blocks) for row in rows], dtype=np.int64)
        full = prompt // block_tokens
        most = full + (prompt % block_tokens > 0) if mooncake else full
        wrong = (counts < full) | (counts > most)
        if wrong.any():
            row = int(np.argmax(wrong))
            field = "hash_ids" if mooncake else "blocks"
            problem = f"{prompt[row]} tokens in blocks of {block_tokens} need {most[row]} {field}"
            _refuse(path, numbers[row], problem, counts[row])
        arrival = np.array([row.arrival_s for row in rows], dtype=np.float64)
        builder.add_batch(
            arrival / 1000.0 if mooncake else arrival,
            prompt,
            np.array([row.output_tokens for row in rows], dtype=np.int64),
            counts,
            np.fromiter(
                chain.from_iterable(row.blocks for row in rows), np.int64, int(counts.sum())
            ),
        )
        line_count += len(lines)
    return builder.build()


def _read_own(path: Path, file: BinaryIO, first: bytes, blank_lines: int) -> Trace:
    line = blank_lines + 1
    try:
        header = msgspec.json.decode(first, type=_Header)
    except _UNREADABLE as error:
        _refuse(path, line, f"not a header: {error}", first.decode("utf-8", "replace").strip())
    if header.format != FORMAT_NAME or header.version != 1:
        _refuse(
            path, line, f"expected {FORMAT_NAME} version 1", f"{header.format} {header.version}"
        )
    builder = TraceBuilder(header.name or path.stem, block_tokens=header.block_tokens)
    return _read_lines(path, file, _OwnLine, builder, line_count=line)


def _azure_time(path: Path, line: int, row: dict[str, str | None]) -> float:
    text = row.get("TIMESTAMP") or ""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        _refuse(path, line, "TIMESTAMP is not a date and time", repr(text))
    return (moment - datetime(2000, 1, 1, tzinfo=moment.tzinfo)).total_seconds()


def _azure_number(path: Path, line: int, row: dict[str, str | None], column: str) -> int:
    text = row.get(column) or ""
    least = 1 if column == "ContextTokens" else 0
    # Python itself refuses to read thousands of digits, in words of its own.
    if not (text.isdecimal() and len(text) < 20 and least <= int(text) <= TOKEN_LIMIT):
        problem = f"{column} must be a whole number from {least} to {TOKEN_LIMIT}"
        _refuse(path, line, problem, repr(text))
    return int(text)


def _read_azure(path: Path, blank_lines: int) -> Trace:
    """Azure's public LLM traces (2023, 2024). They do not tell which prefixes are shared."""
    seconds: list[float] = []
    prompt: list[int] = []
    output: list[int] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for _ in range(blank_lines):
            file.readline()
        reader = csv.DictReader(file)
        missing = [name for name in _AZURE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            _refuse(path, blank_lines + 1, f"missing columns {missing}", reader.fieldnames)
        try:
            for row in reader:
                line = blank_lines + reader.line_num
                seconds.append(_azure_time(path, line, row))
                prompt.append(_azure_number(path, line, row, "ContextTokens"))
                output.append(_azure_number(path, line, row, "GeneratedTokens"))
        except csv.Error as error:
            line = blank_lines + reader.reader.line_num
            raise InvalidInput(f"{path}, line {line}: {error}", parameter="trace") from error
    tokens = np.array(prompt, dtype=np.int64)
    builder = TraceBuilder(path.stem, block_tokens=MOONCAKE_BLOCK_TOKENS, sharing_known=False)
    builder.add_batch(
        np.array(seconds, dtype=np.float64),
        tokens,
        np.array(output, dtype=np.int64),
        tokens // MOONCAKE_BLOCK_TOKENS,
        np.empty(0, dtype=np.int64),
    )
    return builder.build()


def header_line(*, block_tokens: int, name: str) -> bytes:
    """The first line of a file of our own format."""
    return msgspec.json.encode(_Header(FORMAT_NAME, 1, block_tokens, name)) + b"\n"


def write_trace(
    path: Path, requests: Iterable[TraceRequest], *, block_tokens: int, name: str
) -> int:
    """Write our own format while the requests come; gives their count.

    Only full blocks are written, because only full blocks are shared.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    with path.open("wb") as file:
        file.write(header_line(block_tokens=block_tokens, name=name))
        for request in requests:
            full = request.prompt_tokens // block_tokens
            line = msgspec.structs.replace(request, blocks=request.blocks[:full])
            file.write(encoder.encode(line) + b"\n")
            count += 1
    return count


def write_mooncake(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write the released traces' format (blocks of 512 tokens); gives the count of requests."""
    encoder = msgspec.json.Encoder()
    count = 0
    with path.open("wb") as file:
        for request in requests:
            line = {
                "timestamp": round(request.arrival_s * 1000),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks,
            }
            file.write(encoder.encode(line) + b"\n")
            count += 1
    return count
