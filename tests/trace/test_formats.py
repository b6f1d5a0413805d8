from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from snowskin.terms.errors import InvalidInput
from snowskin.trace.formats import read_trace, write_mooncake, write_trace
from snowskin.trace.records import TraceRequest, trace_of

REQUESTS = [
    TraceRequest(0.0, 700, 5, (1, 2)),
    TraceRequest(1.5, 1024, 0, (1, 3)),
    TraceRequest(1.5, 100, 7, ()),
]


def mooncake_line(**changes: object) -> str:
    line: dict[str, object] = {
        "timestamp": 0,
        "input_length": 600,
        "output_length": 3,
        "hash_ids": [0, 1],
    }
    return json.dumps(line | changes)


def written(tmp_path: Path, *lines: str, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_our_own_format_comes_back_as_it_was_but_for_partial_blocks(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    assert write_trace(path, REQUESTS, block_tokens=512, name="mine") == 3
    trace = read_trace(path)
    assert (trace.name, trace.block_tokens, trace.sharing_known) == ("mine", 512, True)
    assert list(trace) == [TraceRequest(0.0, 700, 5, (1,)), *REQUESTS[1:]]


def test_the_mooncake_format_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    write_mooncake(path, REQUESTS)
    assert list(read_trace(path)) == REQUESTS


def test_azure_requests_share_nothing_and_begin_at_zero(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,1024,44",
        "2023-11-16 18:15:48.1805900,374,0",
        name="azure.csv",
    )
    trace = read_trace(path)
    assert not trace.sharing_known
    assert list(trace) == [TraceRequest(0.0, 1024, 44, (0, 1)), TraceRequest(1.5, 374, 0, ())]


def test_requests_out_of_order_are_put_in_order_of_arrival(tmp_path: Path) -> None:
    lines = [mooncake_line(timestamp=2000, hash_ids=[5, 6]), mooncake_line(timestamp=500)]
    trace = read_trace(written(tmp_path, *lines))
    assert [(row.arrival_s, row.blocks) for row in trace] == [(0.0, (0, 1)), (1.5, (5, 6))]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (mooncake_line(input_length=-4), "-4"),
        (mooncake_line(input_length=0), "`int` >= 1"),
        (mooncake_line(timestamp="noon"), "noon"),
        (mooncake_line(hash_ids=[1, 2, 3]), "need 2 hash_ids; got 3"),
        (mooncake_line(hash_ids=[]), "need 2 hash_ids; got 0"),
        (mooncake_line(hash_ids=[1, -2]), "hash_ids"),
        ('{"timestamp": 3', "truncated"),
        ("[]", "array"),
        ('{"timestamp": 3}', "input_length"),
        (mooncake_line() + mooncake_line() + "\n\n", "trailing characters"),
        ('{"timestamp": 3,\n"input_length": 3}', "truncated"),
        ("\x0c", "invalid character"),
        (mooncake_line(output_length=2**24 + 1), "`int` <= 16777216"),
        (
            mooncake_line(more="[" * 50_000 + "]" * 50_000).replace('"[', "[").replace(']"', "]"),
            "recursion depth",
        ),
    ],
    ids=count(),
)
def test_a_bad_line_is_named_with_its_number_and_value(tmp_path: Path, bad: str, told: str) -> None:
    path = written(tmp_path, mooncake_line(), mooncake_line(), bad, mooncake_line())
    with pytest.raises(InvalidInput) as caught:
        read_trace(path)
    assert "line 3" in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("yesterday,10,1", "'yesterday'"),
        ("2023-11-16 18:15:46,ten,1", "'ten'"),
        ("2023-11-16 18:15:46,0,1", "from 1 to 16777216"),
        (f"2023-11-16 18:15:46,{'9' * 5000},1", "from 1 to 16777216"),
        (f"2023-11-16 18:15:46,{'9' * 140_000},1", "field limit"),
        ("2023-11-16 18:15:46,5", "GeneratedTokens"),
    ],
)
def test_a_bad_azure_row_is_named_with_its_number_and_value(
    tmp_path: Path, row: str, told: str
) -> None:
    path = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", row, name="a.csv")
    with pytest.raises(InvalidInput) as caught:
        read_trace(path)
    assert "line 2" in str(caught.value)
    assert told in str(caught.value)


def test_lines_are_counted_with_blank_ones_and_over_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snowskin.trace.formats.BATCH_BYTES", 100)
    lines = ["", *[mooncake_line(), "", " \t\r"] * 20, mooncake_line(hash_ids=[])]
    with pytest.raises(InvalidInput, match=r"line 62: 600 tokens .* need 2 hash_ids; got 0"):
        read_trace(written(tmp_path, *lines))
    assert len(read_trace(written(tmp_path, *lines[:-1]))) == 20


def test_what_stands_before_the_first_line_is_let_pass(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    write_trace(path, REQUESTS, block_tokens=512, name="mine")
    path.write_bytes(b"\xef\xbb\xbf\n \r\n" + path.read_bytes())
    assert len(read_trace(path)) == 3
    path.write_bytes(b"\xef\xbb\xbf" + mooncake_line(format="x").encode())
    assert len(read_trace(path)) == 1
    row = "2023-11-16 18:15:46," + "9" * 140_000
    path.write_text(f"\n\nTIMESTAMP,ContextTokens,GeneratedTokens\n{row},1\n")
    with pytest.raises(InvalidInput, match="line 4: field larger"):
        read_trace(path)
    rows = "\n\nTIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,none"
    path.write_text(rows)
    with pytest.raises(InvalidInput, match="line 4: GeneratedTokens"):
        read_trace(path)


def test_a_wrong_header_is_refused(tmp_path: Path) -> None:
    for header in ('{"format": "other", "version": 1, "block_tokens": 4}', '{"format": "x"}'):
        with pytest.raises(InvalidInput, match="line 1"):
            read_trace(written(tmp_path, header))


def test_missing_empty_and_binary_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.jsonl"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(InvalidInput, match="no request"):
        read_trace(written(tmp_path, ""))
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)))
    with pytest.raises(InvalidInput, match="line 1"):
        read_trace(binary)


def test_speed_divides_gaps_and_head_takes_the_first() -> None:
    trace = trace_of("t", REQUESTS, block_tokens=512)
    assert trace.sped_up(2.0).arrival_s.tolist() == [0.0, 0.75, 0.75]
    assert list(trace.head(2)) == REQUESTS[:2]
    with pytest.raises(InvalidInput):
        trace.sped_up(0.0)
