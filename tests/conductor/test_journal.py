import io

import msgspec
import pytest

from snowskin.conductor.config import ConductorConfig
from snowskin.conductor.journal import (
    JournalEntry,
    JournalHeader,
    RecordedConductor,
    read_journal,
    replay,
)
from snowskin.terms.errors import InvalidInput
from snowskin.terms.events import NodeLost, PrefillFinished, PrefillStarted
from snowskin.terms.ids import RequestId

from .cluster import BLOCK, D0, D1, P0, P1, P2, PROFILE, arrival, held, joined

HEADER = JournalHeader(ConductorConfig(block_tokens=BLOCK, admission="early"), PROFILE, seed=5)


def recorded() -> io.BytesIO:
    stream = io.BytesIO()
    conductor = RecordedConductor(HEADER, stream.write)
    events = [*map(joined, (P0, P1, P2, D0, D1)), held(D0, "tale", 10)]
    events += [arrival(f"r{index}", 1050, story="tale") for index in range(20)]
    events += [PrefillStarted(RequestId("r0"), P0, 0), PrefillFinished(RequestId("r0"), P0, 0.3)]
    events += [NodeLost(P1), arrival("last", 95_000), arrival("lost", 200_000)]
    for index, event in enumerate(events):
        conductor.handle(event, now_s=index / 10)
    stream.seek(0)
    return stream


def test_a_journal_replays_into_a_fresh_conductor_with_the_same_commands():
    header, entries = read_journal(recorded())
    kept = list(entries)
    assert header == HEADER
    assert len(kept) == 31
    assert sum(len(entry.commands) for entry in kept) > 20
    assert replay(header, kept) is None


def test_a_replay_names_the_first_entry_that_went_otherwise():
    header, entries = read_journal(recorded())
    kept = list(entries)
    kept[10] = msgspec.structs.replace(kept[10], commands=())
    divergence = replay(header, kept)
    assert divergence is not None
    assert divergence.index == 10
    assert divergence.replayed != ()


def test_another_seed_is_another_run():
    header, entries = read_journal(recorded())
    assert replay(msgspec.structs.replace(header, seed=6), entries) is not None


def test_a_recorded_conductor_says_when_it_wants_to_be_woken():
    conductor = RecordedConductor(HEADER, lambda _: None)
    for event in (joined(P0), joined(D0), held(D0, "tale", 10)):
        conductor.handle(event, now_s=0.0)
    assert conductor.next_wakeup_s() is None
    conductor.handle(arrival("r", 1050, story="tale"), now_s=1.0)
    assert conductor.next_wakeup_s() == 1.0 + HEADER.config.lease_s


@pytest.mark.parametrize("cut_bytes", [1, 5, 100])
def test_a_record_that_a_crash_cut_short_is_left_out(cut_bytes: int):
    whole = recorded().getvalue()
    header, entries = read_journal(io.BytesIO(whole[:-cut_bytes]))
    kept = list(entries)
    assert len(kept) == 30
    assert replay(header, kept) is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the journal is empty"),
        (b"\x03\x00\x00\x00abc", "broken record"),
        (b"\xff\xff\xff\xff", "no record of ours"),
    ],
)
def test_what_is_no_journal_is_refused(content: bytes, complaint: str):
    with pytest.raises(InvalidInput, match=complaint):
        read_journal(io.BytesIO(content))


def test_every_event_and_command_survives_the_journal():
    _, entries = read_journal(recorded())
    for entry in entries:
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=JournalEntry)
        assert again == entry
