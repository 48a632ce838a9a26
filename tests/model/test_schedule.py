from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.schedule import Schedule

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MONDAY = datetime(2024, 1, 1, tzinfo=UTC)


def at(day: str, time: str) -> float:
    hours, minutes = map(int, time.split(":"))
    return (MONDAY + timedelta(days=DAYS.index(day), hours=hours, minutes=minutes)).timestamp()


def test_no_schedule_is_always_open():
    assert Schedule().is_open(0.0)
    assert Schedule().opens_at(123.0) == 123.0


def test_a_window_is_open_from_its_first_minute_to_before_its_last():
    schedule = Schedule(windows=("sat 22:00 - sun 04:00",))
    assert [schedule.is_open(at("sat", "22:00") + s) for s in (-1, 0, 6 * 3600 - 1, 6 * 3600)] == [
        False,
        True,
        True,
        False,
    ]
    assert schedule.opens_at(at("mon", "00:00")) == at("sat", "22:00")
    assert schedule.opens_at(at("sun", "04:00")) == at("sat", "22:00") + 7 * 86400


@pytest.mark.parametrize(
    "text", ["sun 22:00 - mon 04:00", "sun 22:00 - 04:00", "daily 22:00 - 04:00"]
)
def test_a_span_may_cross_midnight_and_the_end_of_the_week(text):
    schedule = Schedule(windows=(text,))
    assert schedule.is_open(at("sun", "23:00"))
    assert schedule.is_open(at("mon", "03:59"))
    assert not schedule.is_open(at("mon", "04:00"))
    assert schedule.is_open(at("wed", "23:00")) == text.startswith("daily")


def test_a_blackout_overrides_a_window():
    schedule = Schedule(windows=("daily 01:00 - 05:00",), blackouts=("fri 00:00 - sun 24:00",))
    assert schedule.is_open(at("thu", "02:00"))
    assert not schedule.is_open(at("fri", "02:00"))
    assert not schedule.is_open(at("sun", "02:00"))
    assert schedule.opens_at(at("thu", "05:00")) == at("mon", "01:00") + 7 * 86400


def test_blackouts_alone_leave_the_rest_open():
    schedule = Schedule(blackouts=("daily 08:00 - 20:00",))
    assert schedule.is_open(at("tue", "07:59"))
    assert not schedule.is_open(at("tue", "08:00"))
    assert schedule.opens_at(at("tue", "08:30")) == at("tue", "20:00")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sat",
        "sat 22:00",
        "Sat 22:00 - sun 04:00",
        "sat 22:00-sun 04:00",
        "sat 25:00 - sun 04:00",
        "sat 22:60 - sun 04:00",
        "sat 24:01 - sun 04:00",
        "sat 22:00 - sat 22:00",
        "daily 22:00 - 22:00",
        "daily 22:00 - sat 23:00",
        "someday 22:00 - 23:00",
    ],
)
def test_an_invalid_span_is_refused(text):
    with pytest.raises(InvalidInput):
        Schedule(windows=(text,))


def test_a_schedule_that_never_opens_or_has_too_many_spans_is_refused():
    with pytest.raises(InvalidInput, match="no minute"):
        Schedule(blackouts=("daily 00:00 - 24:00",))
    with pytest.raises(InvalidInput, match="no minute"):
        Schedule(windows=("mon 01:00 - 02:00",), blackouts=("mon 00:00 - 03:00",))
    with pytest.raises(InvalidInput, match="at most 64"):
        Schedule(windows=("daily 01:00 - 02:00",) * 65)


times = st.builds(lambda h, m: f"{h:02}:{m:02}", st.integers(0, 23), st.integers(0, 59))
spans = st.builds(
    lambda day, start, end: f"{day} {start} - {end}",
    st.sampled_from(("daily", *DAYS)),
    times,
    times,
).filter(lambda text: text.split()[1] != text.split()[3])


@given(st.lists(spans, max_size=3), st.lists(spans, max_size=3), st.integers(0, 7 * 1440 - 1))
def test_it_opens_at_the_first_open_minute(windows, blackouts, minute):
    try:
        schedule = Schedule(tuple(windows), tuple(blackouts))
    except InvalidInput:
        return
    now = MONDAY.timestamp() + 60 * minute
    minutes = (now + 60 * later for later in range(7 * 1440 + 1))
    assert schedule.opens_at(now) == next(unix for unix in minutes if schedule.is_open(unix))
