"""The key of a wave, and what a wave, a plan and its record refuse."""

import dataclasses
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.cost import CostBasis, CostSource
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanPhase, PlanRecord, WaveKey
from evenkeel_moe.model.schedule import Schedule
from tests.protocol.machines import BASE, plan_of, wave_of


def test_fingerprint_differs_by_every_member_and_fits_a_signed_word():
    generation, plan = Generation("g"), PlanId("p")
    keys = [
        WaveKey(generation, plan, 0, 1),
        WaveKey(Generation("h"), plan, 0, 1),
        WaveKey(generation, PlanId("q"), 0, 1),
        WaveKey(generation, plan, 1, 1),
        WaveKey(generation, plan, 0, 2),
        WaveKey(generation, plan, 0, 1, Epoch(1)),
    ]
    prints = {key.fingerprint for key in keys}
    assert len(prints) == len(keys)
    assert all(0 < value < 2**62 for value in prints)


WAVE = wave_of()
(COPY,) = WAVE.transfers


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()},
        {"layers": (0, 0)},
        {"layers": (-1,)},
        {"layers": (1,)},
        {"rows": WAVE.rows[0]},
        {"rows": WAVE.rows[:0]},
        {"rows": WAVE.rows - 2},
        {"rows": WAVE.rows.astype(float)},
        *(
            {"batches": ((dataclasses.replace(COPY, **changes),),)}
            for changes in (
                {"layer": 1},
                {"src_slot": -1},
                {"dst_slot": -1},
                {"src_slot": 6},
                {"dst_slot": 6},
            )
        ),
    ],
)
def test_a_wave_whose_parts_do_not_fit_is_refused(changes):
    with pytest.raises(InvalidInput, match="wave 0"):
        dataclasses.replace(WAVE, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"waves": plan_of().waves[::-1]},
        {"waves": (wave_of(index=1),)},
        {"waves": (dataclasses.replace(WAVE, layers=(2,), batches=()),)},
        {"waves": (dataclasses.replace(WAVE, rows=WAVE.rows[:, :5]),)},
        {"waves": (dataclasses.replace(WAVE, rows=WAVE.rows + 1),)},
        {"target": Placement(BASE.phy2log, 2, 5)},
        {"created_at": math.inf},
        {"expires_at": math.nan},
        {"weights_version": -1},
        {"base_epoch": -1},
    ],
)
def test_a_plan_whose_parts_do_not_fit_is_refused(changes):
    with pytest.raises(InvalidInput):
        dataclasses.replace(plan_of(), **changes)


@pytest.mark.parametrize(("waves", "updated_at"), [(-1, 0.0), (3, 0.0), (0, math.nan)])
def test_a_record_with_impossible_progress_is_refused(waves, updated_at):
    plan = plan_of()
    with pytest.raises(InvalidInput, match=f"{waves} of 2 waves"):
        PlanRecord(plan, PlanPhase.MIGRATING, Reason.PLAN_STARTED, waves, updated_at)


# --- A measured gain has an interval around it, or a reason why it is unknown ---------------------


KNOWN: dict[str, Any] = {"gain": 0.1, "error": 0.01, "lower": 0.08, "upper": 0.12}


@pytest.mark.parametrize(
    "changes",
    [
        {"gain": None},
        {"error": None},
        {"error": -0.1},
        {"lower": 0.11},
        {"upper": 0.09},
        {"upper": 1.1},
        {"gain": math.nan},
        {"lower": -math.inf},
        {"modelled": math.inf},
        {"modelled": 1.5},
        {"at": math.nan},
        {"steps": -1},
    ],
)
def test_impossible_values_are_refused(changes):
    with pytest.raises(InvalidInput, match="gain"):
        DeliveredGain(**{"at": 1.0, **KNOWN, "steps": 64} | changes)


def test_what_is_unknown_has_a_reason():
    assert DeliveredGain(1.0, unknown_because="no rank reports seconds").gain is None
    with pytest.raises(InvalidInput):
        DeliveredGain(1.0)


@given(st.none() | st.floats(-1, 1))
def test_only_a_promise_can_be_kept(promised):
    kept = DeliveredGain(1.0, **KNOWN).over(promised)
    assert kept == (0.1 / promised if promised is not None and promised > 0 else None)
    assert DeliveredGain(1.0, unknown_because="why").over(promised) is None


# --- cost basis -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("basis", "words"),
    [
        (CostBasis(), "by tokens, because nothing is known of time"),
        (CostBasis(detail="no rank told its device"), "by tokens (no rank told its device)"),
        (
            CostBasis(CostSource.DERIVED, "fp8 on H100", "s"),
            "derived, not measured (fp8 on H100)",
        ),
        (
            CostBasis(CostSource.PROFILED, "curves of 8 ranks", "s", 0.021),
            "profiled on the ranks (curves of 8 ranks, mean error 2.1%)",
        ),
        (CostBasis(CostSource.MEASURED, "", "s"), "measured while the ranks served"),
    ],
)
def test_a_basis_is_told_in_words(basis, words):
    assert basis.words == words


# --- schedule -------------------------------------------------------------------------------------


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
