import pytest
from hypothesis import given
from hypothesis import strategies as st

from snowskin.conductor.forecast import Forecast, PoolLoad

starts = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 1000), st.booleans()), max_size=30)


@given(starts, st.floats(0, 100), st.floats(0, 50), st.floats(0.1, 50))
def test_the_load_is_what_has_started_and_not_yet_run_its_time(
    entries, now_s: float, ahead_s: float, decode_s: float
):
    forecast = Forecast()
    for number, (start_s, tokens, _) in enumerate(entries):
        forecast.add(number, start_s, tokens, 2 * tokens)
    for number, (start_s, _, gone) in enumerate(entries):
        if gone:
            forecast.remove(number, start_s)
    at_s = now_s + ahead_s

    def is_loading(start_s: float) -> bool:
        is_overdue = start_s <= now_s - decode_s
        return at_s < now_s + decode_s if is_overdue else at_s - decode_s < start_s <= at_s

    loaded = [tokens for start_s, tokens, gone in entries if not gone and is_loading(start_s)]
    load = forecast.load_at(at_s, now_s=now_s, decode_s=decode_s)
    assert load == PoolLoad(len(loaded), sum(loaded), 3 * sum(loaded))


def test_the_forecast_for_now_is_everyone_who_has_started():
    forecast = Forecast()
    for number, start_s in enumerate([1.0, 50.0, 99.0, 101.0]):
        forecast.add(number, start_s, 10, 5)
    assert forecast.load_at(100.0, now_s=100.0, decode_s=5.0) == PoolLoad(3, 30, 45)


def test_the_next_leaves_when_its_time_is_over():
    forecast = Forecast()
    assert forecast.next_leave_s(5.0, 10.0) == 10.0
    forecast.add(0, 1.0, 10, 5)
    forecast.add(1, 4.0, 10, 5)
    assert forecast.next_leave_s(5.0, 10.0) == 6.0
    assert forecast.next_leave_s(12.0, 10.0) == 2.0


def test_the_wait_for_room_ends_when_enough_have_left():
    forecast = Forecast()
    for number in range(4):
        forecast.add(number, float(number), 10, 5)
    wait_s = forecast.seconds_until(
        lambda load: load.sequences < 2, from_s=5.0, now_s=5.0, decode_s=10.0
    )
    assert wait_s == pytest.approx(7.0, abs=0.1)
    assert Forecast().seconds_until(lambda load: False, from_s=0.0, now_s=0.0, decode_s=1.0) == 0.0


def test_what_was_never_added_cannot_be_removed():
    with pytest.raises(AssertionError, match="request number 3 is not in the forecast"):
        Forecast().remove(3, 1.0)
