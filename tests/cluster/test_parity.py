"""What a live Conductor decided, a fresh one decides again from the record."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from snowskin.conductor.journal import read_journal, replay
from snowskin.terms.commands import GrantLease, StartPrefill
from snowskin.terms.events import FetchFinished, NodeReported
from tests.cluster.live import live_cluster
from tests.engine import tiny

torch.set_num_threads(1)


def test_a_recorded_live_run_replays_to_the_same_commands(tmp_path: Path) -> None:
    record = tmp_path / "journal"
    model_dir = tiny.build("llama", tmp_path)
    with live_cluster(model_dir, prefill_nodes=2, journal=str(record)) as live:
        history = tiny.prompt_tokens(60, seed=1)
        for turn in range(3):
            answers = live.ask_all([history, tiny.prompt_tokens(50, seed=turn)], output_tokens=30)
            history = [*history, *answers[0].tokens, *tiny.prompt_tokens(5, seed=9)]
    with record.open("rb") as stream:
        header, entries = read_journal(stream)
        told = list(entries)
    assert replay(header, told) is None
    commands = [command for entry in told for command in entry.commands]
    assert sum(isinstance(command, StartPrefill) for command in commands) == 6
    assert any(isinstance(command, GrantLease) for command in commands)
    assert any(isinstance(entry.event, FetchFinished) for entry in told)


def test_the_conductor_is_told_how_fast_links_are(tmp_path: Path) -> None:
    record = tmp_path / "journal"
    model_dir = tiny.build("llama", tmp_path)

    def measured() -> set[tuple[str, str]]:
        with record.open("rb") as stream:
            _, entries = read_journal(stream)
            reports = [entry.event for entry in entries if isinstance(entry.event, NodeReported)]
        return {
            (link.peer, report.node)
            for report in reports
            for link in report.incoming
            if link.bytes_per_s
        }

    with live_cluster(model_dir, journal=str(record)) as live:
        # Rates are taken of transfers that are large enough.
        live.ask(tiny.prompt_tokens(1000, seed=1), output_tokens=3)
        deadline_s = time.monotonic() + 30
        while not measured() and time.monotonic() < deadline_s:
            time.sleep(0.1)
    assert measured() == {("prefill-0", "decode-0")}


def test_a_journal_without_room_ends_and_the_requests_go_on(tmp_path: Path) -> None:
    model_dir = tiny.build("llama", tmp_path)
    with live_cluster(model_dir, journal="/dev/full") as live:
        for seed in range(40):  # More than any buffer before the disk holds.
            answer = live.ask(tiny.prompt_tokens(200, seed=seed), output_tokens=3, stop_tokens=())
            assert len(answer.tokens) == 3
