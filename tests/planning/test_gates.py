import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.errors import InvalidInput, Reason
from evenkeel.model.placement import Placement
from evenkeel.model.plan import PlanLimits
from evenkeel.model.policy import Mode
from evenkeel.model.topology import ModelShape
from evenkeel.planning.gates import (
    AfterInputs,
    BeforeInputs,
    GateMemory,
    GateSettings,
    HeldOut,
    decide_after,
    decide_before,
    load_change,
)

SETTINGS = GateSettings()
POOR = BeforeInputs(
    now_unix=1000.0,
    mode=Mode.AUTO,
    ranks_expected=8,
    ranks_fresh=8,
    window_steps=200,
    newest_step_age_s=1.0,
    balancedness_mean=0.7,
    memory=GateMemory(windows_below=5, planning=True),
)


def test_poor_balance_for_long_enough_passes():
    decision = decide_before(POOR, SETTINGS)
    assert (decision.passed, decision.reason) == (True, Reason.BALANCE_BELOW_THRESHOLD)
    assert decision.numbers["balancedness_mean"] == 0.7


# Each row closes one gate and every gate after it; the first in the table must win.
CLOSED: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.PLAN_IN_PROGRESS, {"plan_in_progress": True}),
    (Reason.FROZEN, {"frozen_until_unix": 1000.1}),
    (Reason.HELD_AFTER_ROLLBACK, {"held": True}),
    (Reason.COOLDOWN, {"last_plan_ended_unix": 900.0}),
    (Reason.RANKS_MISSING, {"ranks_fresh": 7}),
    (Reason.INSUFFICIENT_DATA, {"window_steps": 63}),
    (Reason.STALE_DATA, {"newest_step_age_s": 31.0}),
    (Reason.BALANCE_ABOVE_THRESHOLD, {"balancedness_mean": 0.95}),
]


@pytest.mark.parametrize("index", range(len(CLOSED)))
def test_the_first_closed_gate_gives_the_reason(index):
    reason, change = CLOSED[index]
    assert decide_before(replace(POOR, **change), SETTINGS).reason is reason
    everything = {name: value for _, row in CLOSED[index:] for name, value in row.items()}
    decision = decide_before(replace(POOR, **everything), SETTINGS)
    assert (decision.passed, decision.reason) == (False, reason)


def test_gates_open_exactly_at_their_bounds():
    at_bounds = replace(
        POOR,
        frozen_until_unix=1000.0,
        last_plan_ended_unix=880.0,
        window_steps=64,
        newest_step_age_s=30.0,
        balancedness_mean=math.nextafter(0.93, 0),
    )
    assert decide_before(at_bounds, SETTINGS).passed


def test_unknown_closes_a_gate_and_is_never_zero():
    assert (
        decide_before(replace(POOR, balancedness_mean=math.nan), SETTINGS).reason is Reason.INSUFFICIENT_DATA
    )
    assert decide_before(replace(POOR, newest_step_age_s=math.nan), SETTINGS).reason is Reason.STALE_DATA
    unknown_change = replace(POOR, balancedness_mean=0.99, change=math.nan, balancedness_recent=0.2)
    assert decide_before(unknown_change, SETTINGS).reason is Reason.BALANCE_ABOVE_THRESHOLD


def run(values, settings=SETTINGS):
    """Reasons of consecutive cycles, memory handed on."""
    memory, reasons = GateMemory(), []
    for value in values:
        decision = decide_before(replace(POOR, balancedness_mean=value, memory=memory), settings)
        memory = decision.memory
        reasons.append(decision.reason)
    return reasons


def test_planning_starts_after_consecutive_windows_and_stops_with_hysteresis():
    wait, go, stop = (
        Reason.WAITING_CONSECUTIVE_WINDOWS,
        Reason.BALANCE_BELOW_THRESHOLD,
        Reason.BALANCE_ABOVE_THRESHOLD,
    )
    assert run([0.8, 0.8, 0.95, 0.8, 0.8, 0.8]) == [wait, wait, stop, wait, wait, go]
    # 0.92 is between the two thresholds: it goes on once started, and does not start by itself.
    assert run([0.8, 0.8, 0.8, 0.92, 0.94, 0.92]) == [wait, wait, go, go, stop, stop]


def test_a_gap_in_the_data_breaks_the_run_of_windows():
    memory = GateMemory(windows_below=2)
    gap = decide_before(replace(POOR, ranks_fresh=7, memory=memory), SETTINGS)
    assert gap.memory.windows_below == 0
    busy = decide_before(replace(POOR, plan_in_progress=True, memory=memory), SETTINGS)
    assert busy.memory == memory


def test_changed_load_is_a_reason_of_its_own_and_does_not_wait():
    changed = replace(POOR, balancedness_mean=0.95, balancedness_recent=0.6, change=4.0, memory=GateMemory())
    decision = decide_before(changed, SETTINGS)
    assert (decision.passed, decision.reason) == (True, Reason.LOAD_CHANGED)
    assert decision.numbers["change"] == 4.0
    harmless = replace(changed, balancedness_recent=0.97)
    assert decide_before(harmless, SETTINGS).reason is Reason.BALANCE_ABOVE_THRESHOLD


def test_a_manual_request_needs_data_and_no_freeze_but_nothing_else():
    asked = replace(POOR, manual=True, held=True, last_plan_ended_unix=999.0, balancedness_mean=0.99)
    assert decide_before(asked, SETTINGS).reason is Reason.MANUAL_REQUEST
    assert decide_before(replace(asked, frozen_until_unix=2000.0), SETTINGS).reason is Reason.FROZEN
    assert decide_before(replace(asked, window_steps=0), SETTINGS).reason is Reason.INSUFFICIENT_DATA
    assert decide_before(replace(asked, ranks_fresh=0), SETTINGS).reason is Reason.RANKS_MISSING


def test_hold_after_rollback_stops_only_automatic_plans():
    assert decide_before(replace(POOR, held=True), SETTINGS).reason is Reason.HELD_AFTER_ROLLBACK
    for mode in (Mode.OBSERVE, Mode.PROPOSE):
        assert decide_before(replace(POOR, held=True, mode=mode), SETTINGS).passed


SHAPE = ModelShape(2, 2, 2, 2, 1, 100)
GOOD = AfterInputs(
    mode=Mode.AUTO,
    shape=SHAPE,
    base=Placement(np.array([[0, -1, 1, -1]] * 2), 2, 2),
    target=Placement(np.array([[0, 1, 1, 0], [0, -1, 1, -1]]), 2, 2),
    held_out=HeldOut(gain=0.1, gain_lower=0.05, steps=50),
    saved_per_step=2.0,
    move_cost=1000.0,
)


@pytest.mark.parametrize(
    ("mode", "manual", "passed", "reason"),
    [
        (Mode.AUTO, False, True, Reason.PLAN_STARTED),
        (Mode.PROPOSE, False, True, Reason.PLAN_PROPOSED),
        (Mode.OBSERVE, False, False, Reason.OBSERVE_MODE),
        (Mode.OBSERVE, True, True, Reason.PLAN_PROPOSED),
        (Mode.AUTO, True, True, Reason.PLAN_STARTED),
    ],
)
def test_a_good_plan_goes_where_the_mode_sends_it(mode, manual, passed, reason):
    decision = decide_after(replace(GOOD, mode=mode, manual=manual), SETTINGS)
    assert (decision.passed, decision.reason) == (passed, reason)
    assert decision.numbers["copies"] == 2
    assert decision.numbers["bytes"] == 200
    assert decision.numbers["layers"] == 1
    assert decision.numbers["payback_steps"] == 500
    assert decision.numbers["gain"] == 0.1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": GOOD.base}, Reason.NO_CHANGE),
        ({"target": Placement(np.array([[0, -1, 0, -1]] * 2), 2, 2)}, Reason.EXPERT_WITHOUT_REPLICA),
        ({"target": Placement(np.array([[0, 0, 1, -1]] * 2), 2, 2)}, Reason.DUPLICATE_ON_RANK),
        ({"shape": replace(SHAPE, pool_slots_per_rank=2)}, Reason.POOL_EXCEEDED),
        ({"limits": PlanLimits(max_moves=1)}, Reason.LIMIT_EXCEEDED),
        ({"limits": PlanLimits(max_bytes=199)}, Reason.LIMIT_EXCEEDED),
        ({"limits": PlanLimits(max_layers=0)}, Reason.LIMIT_EXCEEDED),
        ({"held_out": None}, Reason.INSUFFICIENT_DATA),
        ({"held_out": HeldOut(0.1, 0.05, 15)}, Reason.INSUFFICIENT_DATA),
        ({"held_out": HeldOut(math.nan, math.nan, 50)}, Reason.INSUFFICIENT_DATA),
        ({"held_out": HeldOut(0.009, 0.005, 50)}, Reason.GAIN_TOO_SMALL),
        ({"held_out": HeldOut(-0.2, -0.3, 50)}, Reason.GAIN_TOO_SMALL),
        ({"held_out": HeldOut(0.1, 0.0, 50)}, Reason.GAIN_UNCERTAIN),
        ({"held_out": HeldOut(0.1, math.nan, 50)}, Reason.GAIN_UNCERTAIN),
        ({"move_cost": 40_001.0}, Reason.PAYBACK_TOO_LONG),
        ({"saved_per_step": 0.0}, Reason.PAYBACK_TOO_LONG),
        ({"saved_per_step": math.nan}, Reason.PAYBACK_TOO_LONG),
        ({"move_cost": math.nan}, Reason.PAYBACK_TOO_LONG),
    ],
)
def test_a_plan_that_is_unsound_or_not_worth_it_stops(change, reason):
    decision = decide_after(replace(GOOD, **change), SETTINGS)
    assert (decision.passed, decision.reason) == (False, reason)


def test_an_operator_may_pay_for_what_does_not_pay_but_never_break_an_invariant():
    manual = replace(GOOD, manual=True, held_out=None)
    assert decide_after(manual, SETTINGS).passed
    for change, reason in (
        ({"target": GOOD.base}, Reason.NO_CHANGE),
        ({"target": Placement(np.array([[0, -1, 0, -1]] * 2), 2, 2)}, Reason.EXPERT_WITHOUT_REPLICA),
        ({"limits": PlanLimits(max_moves=1)}, Reason.LIMIT_EXCEEDED),
    ):
        assert decide_after(replace(manual, **change), SETTINGS).reason is reason


def test_duplicates_pass_when_allowed():
    twice = replace(GOOD, target=Placement(np.array([[0, 0, 1, -1]] * 2), 2, 2), allow_duplicates=True)
    assert decide_after(twice, SETTINGS).reason is not Reason.DUPLICATE_ON_RANK


def test_settings_by_name():
    assert GateSettings.from_thresholds({"min_gain": 0.05, "cooldown_s": 7}).min_gain == 0.05
    with pytest.raises(InvalidInput, match="unknown gate settings min_gian; known: change_ratio"):
        GateSettings.from_thresholds({"min_gian": 0.05})
    with pytest.raises(InvalidInput, match="plan_below 0.95 <= stop_above 0.93"):
        GateSettings.from_thresholds({"plan_below": 0.95})
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(InvalidInput, match="must be finite and not negative"):
            GateSettings(cooldown_s=value)


def traffic(rng, popularity, steps):
    return np.stack([[rng.multinomial(4000, row) for row in popularity] for _ in range(steps)])


def test_change_is_near_one_on_stationary_traffic_and_large_after_a_shift():
    rng = np.random.default_rng(0)
    before, after = rng.dirichlet(np.ones(32), 4), rng.dirichlet(np.ones(32), 4)
    steady = traffic(rng, before, 96)
    assert 0.7 < load_change(steady, 16) < 1.4
    shifted = np.concatenate([steady[:80], traffic(rng, after, 16)])
    assert load_change(shifted, 16) > 5


@given(st.integers(0, 5), st.integers(1, 3))
def test_change_is_unknown_without_enough_blocks(steps, block):
    load = np.ones((steps, 2, 3))
    if steps // block < 4:
        assert math.isnan(load_change(load, block))
    else:
        assert load_change(load, block) == 1.0


def test_change_is_unknown_where_nothing_was_routed():
    assert math.isnan(load_change(np.zeros((8, 2, 3)), 2))
    silent_end = np.ones((8, 2, 3))
    silent_end[6:] = 0
    assert math.isnan(load_change(silent_end, 2))
    one_layer_silent = np.ones((8, 2, 3))
    one_layer_silent[:, 1] = 0
    assert load_change(one_layer_silent, 2) == 1.0
    moved = np.zeros((8, 1, 3))
    moved[:6, :, 0] = 1
    moved[6:, :, 1] = 1
    assert load_change(moved, 2) == math.inf
    with pytest.raises(InvalidInput, match="recent_steps is 0"):
        load_change(moved, 0)
