from __future__ import annotations

from pathlib import Path

import pytest

from snowskin.terms.keys import KeySpace, prompt_keys
from snowskin.trace.describe import describe
from snowskin.trace.formats import read_trace
from snowskin.trace.record import TraceRecorder

SPACE = KeySpace(model="m", revision="r", dtype="fp32", block_tokens=4)


def test_a_recording_reads_as_a_trace_with_the_sharing_that_there_was(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    prompts = [list(range(10)), [*range(8), 99, 98, 97, 96], list(range(50, 59))]
    with TraceRecorder(path, block_tokens=4, name="live", started_s=100.0) as recorder:
        # The second request ends before the first.
        for index in (1, 0, 2):
            recorder.note(
                arrived_s=100.0 + index,
                prompt_tokens=len(prompts[index]),
                output_tokens=7,
                keys=prompt_keys(SPACE, prompts[index]),
            )
        assert recorder.count == 3
    trace = read_trace(path)
    assert trace.name == "live"
    assert trace.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert trace.prompt_tokens.tolist() == [10, 12, 9]
    assert describe(trace).hit_ratio_blocks == pytest.approx(2 / 7)


def test_what_was_noted_can_be_read_while_recording_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    recorder = TraceRecorder(path, block_tokens=4, name="live", started_s=0.0)
    recorder.note(arrived_s=1.0, prompt_tokens=3, output_tokens=1, keys=())
    recorder.flush()
    assert len(read_trace(path)) == 1
    recorder.close()
    recorder.close()


def test_keys_that_do_not_cover_the_prompt_are_a_bug(tmp_path: Path) -> None:
    with (
        TraceRecorder(tmp_path / "t", block_tokens=4, name="t", started_s=0.0) as recorder,
        pytest.raises(AssertionError, match="full blocks"),
    ):
        recorder.note(arrived_s=1.0, prompt_tokens=9, output_tokens=1, keys=())
