from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snowskin.cost.costs import DecodeCost
from snowskin.sim.calendar import Calendar, Rank
from snowskin.sim.decode import DecodeBatch, Sequence
from tests.sim.stepped_decode import Arrival, play_by_steps

COST = DecodeCost(base_s=0.0261, sequence_s=0.000211, context_token_s=34.5e-9)


class Played:
    """The analytic batch, driven as the simulator drives it."""

    def __init__(self, arrivals: list[Arrival], cost: DecodeCost, **limits: int) -> None:
        self.batch: DecodeBatch[int] = DecodeBatch(cost, **limits)
        self.calendar = Calendar()
        self.sequences = [
            Sequence(
                index,
                prompt_tokens=arrival.prompt_tokens,
                step_count=arrival.step_count,
                reserved_tokens=arrival.reserved_tokens,
            )
            for index, arrival in enumerate(arrivals)
        ]
        self.turn = 0
        for index, arrival in enumerate(arrivals):
            self.calendar.at(arrival.at_s, Rank.TRANSFER, self._add, index)
        self.events = self.calendar.run()

    def _add(self, index: int) -> None:
        self.batch.add(self.sequences[index])
        self._expect()

    def _expect(self) -> None:
        self.turn += 1
        due_s = self.batch.next_s(self.calendar.now_s)
        if due_s is not None:
            self.calendar.at(due_s, Rank.COMPUTE, self._change, self.turn)

    def _change(self, turn: int) -> None:
        if turn == self.turn:
            self.batch.advance(self.calendar.now_s)
            self._expect()


def arrival_lists() -> st.SearchStrategy[list[Arrival]]:
    one = st.builds(
        Arrival,
        at_s=st.floats(0.0, 20.0),
        prompt_tokens=st.integers(1, 130_000),
        step_count=st.integers(1, 400),
        reserved_tokens=st.just(0),
    )
    return st.lists(one, min_size=1, max_size=14).map(
        lambda many: [
            Arrival(a.at_s, a.prompt_tokens, a.step_count, a.prompt_tokens + a.step_count + 1)
            for a in sorted(many, key=lambda a: a.at_s)
        ]
    )


@settings(max_examples=200, deadline=None)
@given(
    arrivals=arrival_lists(),
    sequence_limit=st.integers(1, 8),
    token_limit=st.integers(140_000, 600_000),
    context_token_s=st.sampled_from([0.0, 34.5e-9, 5e-6]),
)
def test_the_closed_form_agrees_with_stepping_within_a_microsecond(
    arrivals: list[Arrival], sequence_limit: int, token_limit: int, context_token_s: float
) -> None:
    cost = DecodeCost(base_s=0.0261, sequence_s=0.000211, context_token_s=context_token_s)
    limits = {"sequence_limit": sequence_limit, "token_limit": token_limit}
    stays = play_by_steps(arrivals, cost, **limits)
    played = Played(arrivals, cost, **limits)
    durations = played.batch.step_durations()
    for sequence, stay in zip(played.sequences, stays, strict=True):
        assert sequence.joined_s == pytest.approx(stay.joined_s, abs=1e-6)
        assert sequence.finished_s == pytest.approx(stay.finished_s, abs=1e-6)
        own = durations[sequence.first_step : sequence.end_step]
        assert own == pytest.approx(stay.intervals_s, abs=1e-9)
    assert played.batch.context_tokens == played.batch.reserved_tokens == 0


def test_one_sequence_takes_the_sum_of_its_growing_steps() -> None:
    arrivals = [Arrival(1.0, 999, 100, 2_000)]
    played = Played(arrivals, COST, sequence_limit=4, token_limit=10_000)
    expected_s = 1.0 + sum(COST.step_s(1, 1_000 + step) for step in range(100))
    assert played.sequences[0].finished_s == pytest.approx(expected_s, abs=1e-9)
    assert played.batch.busy_s == pytest.approx(expected_s - 1.0, abs=1e-9)


def test_whoever_comes_in_mid_step_joins_at_its_end() -> None:
    arrivals = [Arrival(0.0, 100, 50, 200), Arrival(0.001, 100, 50, 200)]
    played = Played(arrivals, COST, sequence_limit=4, token_limit=10_000)
    assert played.sequences[1].joined_s == pytest.approx(COST.step_s(1, 101), abs=1e-12)


def test_without_room_the_line_waits_for_the_first_to_leave() -> None:
    arrivals = [Arrival(0.0, 100, 5, 600), Arrival(0.0, 100, 5, 600)]
    played = Played(arrivals, COST, sequence_limit=4, token_limit=1_000)
    first, second = played.sequences
    assert second.joined_s == first.finished_s


def test_steps_are_skipped_not_played() -> None:
    arrivals = [Arrival(0.0, 100, 100_000, 200_000)]
    assert Played(arrivals, COST, sequence_limit=1, token_limit=200_000).events <= 4
