import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.finding import Finding, FindingCode, Severity
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision import gates
from evenkeel_moe.planning.decision.gates import (
    GateInputs,
    GateMemory,
    GateSettings,
    MeasuredWindow,
)
from evenkeel_moe.planning.decision.verdict import Call, Verdict
from evenkeel_moe.planning.decision.window_balance import WindowBalance
from evenkeel_moe.planning.problem.objective import Objective
from tests.planning.signals.test_live_findings import LOST

SETTINGS = GateSettings(cooldown_s=120, max_data_age_s=30, consecutive_windows=3)


@dataclass(frozen=True, kw_only=True)
class Case(GateInputs):
    """All that a decision depends on, in one flat value."""

    window_steps: int = 200
    balancedness_mean: float = 0.7
    balancedness_changed: float = math.nan
    balancedness_before: float = math.nan
    time_balance: float | None = None
    time_balance_changed: float = math.nan
    time_balance_before: float = math.nan
    change_strength: float = math.nan
    changed_steps: int = 0


def window_of(case):
    def balance(window, changed, before):
        return WindowBalance(window, math.nan, changed, before)

    tokens = balance(case.balancedness_mean, case.balancedness_changed, case.balancedness_before)
    time = None
    if case.time_balance is not None:
        time = balance(case.time_balance, case.time_balance_changed, case.time_balance_before)
    return MeasuredWindow(case.window_steps, tokens, time, case.change_strength, case.changed_steps)


def decide_before(case):
    return gates.decide_before(case, window_of(case))


POOR = Case(
    settings=SETTINGS,
    shape=ModelShape(1, 8, 8, 1, 1, 100),
    current=Placement(np.arange(8, dtype=np.int32)[None], 8, 8),
    now_unix=1000.0,
    mode=Mode.AUTO,
    ranks_fresh=8,
    newest_step_age_s=1.0,
    memory=GateMemory(windows_below=5, planning=True),
)


def test_poor_balance_for_long_enough_passes():
    decision = decide_before(POOR)
    assert (decision.passed, decision.reason) == (True, Reason.BALANCE_BELOW_THRESHOLD)


UNEVEN = Finding(FindingCode.UNEVEN_LAYERS, Severity.DOUBT, "layers disagree", share=0.25)
# Each row closes one gate and every gate after it; the first in the table must win.
CLOSED: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.PLAN_IN_PROGRESS, {"closed_by": Reason.PLAN_IN_PROGRESS}),
    (Reason.COOLDOWN, {"last_plan_ended_unix": 900.0}),
    (Reason.RANKS_MISSING, {"ranks_fresh": 7}),
    (Reason.IMPLAUSIBLE_COUNTS, {"findings": (UNEVEN,)}),
    (Reason.INSUFFICIENT_DATA, {"window_steps": 63}),
    (Reason.STALE_DATA, {"newest_step_age_s": 31.0}),
    (Reason.BALANCE_ABOVE_THRESHOLD, {"balancedness_mean": 0.95}),
]


@pytest.mark.parametrize("index", range(len(CLOSED)))
def test_the_first_closed_gate_gives_the_reason(index):
    reason, change = CLOSED[index]
    assert decide_before(replace(POOR, **change)).reason is reason
    everything = {name: value for _, row in CLOSED[index:] for name, value in row.items()}
    decision = decide_before(replace(POOR, **everything))
    assert (decision.passed, decision.reason) == (False, reason)


def test_gates_open_exactly_at_their_bounds():
    at_bounds = replace(
        POOR,
        last_plan_ended_unix=880.0,
        window_steps=64,
        newest_step_age_s=30.0,
        balancedness_mean=math.nextafter(0.93, 0),
    )
    assert decide_before(at_bounds).passed


def test_unknown_closes_a_gate_and_is_never_zero():
    assert (
        decide_before(replace(POOR, balancedness_mean=math.nan)).reason is Reason.INSUFFICIENT_DATA
    )
    assert decide_before(replace(POOR, newest_step_age_s=math.nan)).reason is Reason.STALE_DATA
    unknown_change = replace(
        POOR, balancedness_mean=0.99, changed_steps=40, balancedness_changed=math.nan
    )
    assert decide_before(unknown_change).reason is Reason.BALANCE_ABOVE_THRESHOLD


@LOST
@pytest.mark.parametrize("manual", [False, True])
def test_no_plan_is_made_on_counts_that_contradict_themselves(manual):
    doubtful = replace(POOR, findings=(UNEVEN,), manual=manual)
    decision = decide_before(doubtful)
    assert (decision.passed, decision.reason) == (False, Reason.IMPLAUSIBLE_COUNTS)
    thresholds = {"max_layer_deviation": 0.005, "max_idle_experts": 0}
    assert decision.numbers == thresholds | {"uneven_layers": 0.25}
    assert decision.memory.windows_below == 0
    noted = replace(doubtful, findings=(replace(UNEVEN, severity=Severity.NOTE),))
    assert decide_before(noted).passed


def run(values):
    """Return the reasons of consecutive cycles that hand on their memory."""
    memory, reasons = GateMemory(), []
    for value in values:
        decision = decide_before(replace(POOR, balancedness_mean=value, memory=memory))
        memory = decision.memory
        reasons.append(decision.reason)
    return reasons


def test_no_number_of_consecutive_windows_lets_a_balanced_load_be_planned():
    balanced = replace(
        POOR,
        balancedness_mean=0.95,
        memory=GateMemory(),
        settings=replace(SETTINGS, consecutive_windows=0),
    )
    assert decide_before(balanced).reason is Reason.BALANCE_ABOVE_THRESHOLD


def test_planning_starts_after_consecutive_windows_and_stops_with_hysteresis():
    wait, go, stop = (
        Reason.WAITING_CONSECUTIVE_WINDOWS,
        Reason.BALANCE_BELOW_THRESHOLD,
        Reason.BALANCE_ABOVE_THRESHOLD,
    )
    assert run([0.8, 0.8, 0.95, 0.8, 0.8, 0.8]) == [wait, wait, stop, wait, wait, go]
    # 0.92 is between the two thresholds: planning continues there, but does not start.
    assert run([0.8, 0.8, 0.8, 0.92, 0.94, 0.92]) == [wait, wait, go, go, stop, stop]


def test_a_gap_in_the_data_breaks_the_run_of_windows():
    memory = GateMemory(windows_below=2)
    gap = decide_before(replace(POOR, ranks_fresh=7, memory=memory))
    assert gap.memory.windows_below == 0
    busy = decide_before(replace(POOR, closed_by=Reason.FROZEN, memory=memory))
    assert busy.memory == memory


def test_time_balance_takes_the_place_of_token_balance():
    # A slow rank must get fewer tokens: balancedness then stays low under the best placement.
    answered = replace(POOR, balancedness_mean=0.7, time_balance=0.97)
    decision = decide_before(answered)
    assert (decision.passed, decision.reason) == (False, Reason.BALANCE_ABOVE_THRESHOLD)
    slow = decide_before(replace(POOR, balancedness_mean=0.98, time_balance=0.8))
    assert (slow.passed, slow.reason) == (True, Reason.BALANCE_BELOW_THRESHOLD)
    unknown = decide_before(replace(POOR, time_balance=math.nan))
    assert unknown.reason is Reason.INSUFFICIENT_DATA


def test_planning_starts_at_the_upper_threshold_where_noise_is_not_the_cause():
    start = replace(POOR, memory=GateMemory(windows_below=5))
    noise = replace(start, balancedness_mean=0.94, time_balance=0.915)
    assert decide_before(noise).reason is Reason.BALANCE_ABOVE_THRESHOLD
    cause = decide_before(replace(start, balancedness_mean=0.98, time_balance=0.915))
    assert (cause.passed, cause.numbers["starts_below"]) == (True, SETTINGS.stop_above)
    small = replace(start, balancedness_mean=0.98, time_balance=0.935)
    assert decide_before(small).reason is Reason.BALANCE_ABOVE_THRESHOLD


CHANGED = replace(
    POOR,
    balancedness_mean=0.95,
    change_strength=9.0,
    changed_steps=40,
    balancedness_changed=0.6,
    memory=GateMemory(),
)


def test_changed_load_is_a_reason_of_its_own_and_does_not_wait():
    decision = decide_before(CHANGED)
    assert (decision.passed, decision.reason) == (True, Reason.LOAD_CHANGED)
    assert decision.numbers["change_strength"] == 9.0
    assert decision.numbers["changed_steps"] == 40.0
    harmless = replace(CHANGED, balancedness_changed=0.97)
    assert decide_before(harmless).reason is Reason.BALANCE_ABOVE_THRESHOLD


def test_changed_load_is_judged_by_time_balance_where_it_is_known():
    harmless = replace(CHANGED, time_balance=0.97, time_balance_changed=0.96)
    assert decide_before(harmless).reason is Reason.BALANCE_ABOVE_THRESHOLD
    harmful = replace(harmless, balancedness_changed=0.97, time_balance_changed=0.8)
    decision = decide_before(harmful)
    assert (decision.passed, decision.reason) == (True, Reason.LOAD_CHANGED)
    assert decision.numbers["time_balance_changed"] == 0.8


def test_changed_load_wins_over_poor_balance_and_waits_for_the_cooldown():
    poor = replace(
        CHANGED, balancedness_mean=0.7, memory=GateMemory(windows_below=5, planning=True)
    )
    assert decide_before(poor).reason is Reason.LOAD_CHANGED
    early = decide_before(replace(poor, changed_steps=4))
    assert early.reason is Reason.LOAD_CHANGED
    assert early.memory.planning
    answered = decide_before(replace(poor, changed_steps=0, balancedness_changed=math.nan))
    assert answered.reason is Reason.BALANCE_BELOW_THRESHOLD
    cooling = replace(poor, last_plan_ended_unix=999.0)
    assert decide_before(cooling).reason is Reason.COOLDOWN


def test_a_change_that_cost_balance_ends_the_cooldown_but_not_the_wait_after_a_failure():
    cooling = replace(CHANGED, last_plan_ended_unix=999.0, balancedness_before=0.9)
    assert decide_before(cooling).reason is Reason.LOAD_CHANGED
    lost = SETTINGS.stop_above - SETTINGS.plan_below
    kept = replace(cooling, balancedness_before=0.6 + 0.99 * lost)
    assert decide_before(kept).reason is Reason.COOLDOWN
    assert decide_before(replace(cooling, failed_plans=1)).reason is Reason.COOLDOWN


def test_time_balance_decides_about_a_change_too_where_the_cost_model_knows_of_time():
    cooling = replace(
        CHANGED,
        last_plan_ended_unix=999.0,
        balancedness_before=0.9,
        time_balance=0.8,
        time_balance_changed=0.79,
        time_balance_before=0.8,
    )
    assert decide_before(cooling).reason is Reason.COOLDOWN
    slower = replace(cooling, time_balance_changed=0.7)
    assert decide_before(slower).reason is Reason.LOAD_CHANGED


def test_what_the_last_plan_knew_of_a_change_is_remembered():
    memory = GateMemory(change_steps=8)
    refined = replace(CHANGED, changed_steps=16, steps_since_move=4, memory=memory)
    decision = decide_before(refined)
    assert (decision.reason, decision.memory.change_steps) == (Reason.LOAD_CHANGED, 8)
    waiting = replace(refined, changed_steps=15, last_plan_ended_unix=999.0)
    assert decide_before(waiting).reason is Reason.COOLDOWN


def test_failed_plans_make_the_wait_double_up_to_a_cap():
    start = replace(POOR, settings=GateSettings(cooldown_s=10, retry_s=30, max_retry_s=100))
    for failed, wait_s in ((0, 10), (1, 30), (2, 60), (3, 100), (4, 100), (5000, 100)):
        failing = replace(start, failed_plans=failed, last_plan_ended_unix=1000.5 - wait_s)
        decision = decide_before(failing)
        assert (decision.passed, decision.reason) == (False, Reason.COOLDOWN)
        assert decision.numbers["cooldown_s"] == wait_s
        assert decision.numbers["since_plan_s"] == wait_s - 0.5
        assert decision.numbers.get("failed_plans", 0.0) == failed
        assert decide_before(replace(failing, last_plan_ended_unix=1000.0 - wait_s)).passed
        assert decide_before(replace(failing, manual=True)).passed


def test_a_long_cooldown_is_never_shortened_by_a_failure():
    settings = GateSettings(cooldown_s=600, retry_s=30, max_retry_s=100)
    failing = replace(POOR, failed_plans=3, last_plan_ended_unix=401.0, settings=settings)
    assert decide_before(failing).numbers["cooldown_s"] == 600


def test_a_manual_request_needs_data_and_nothing_else():
    asked = replace(
        POOR,
        manual=True,
        last_plan_ended_unix=999.0,
        balancedness_mean=0.99,
    )
    assert decide_before(asked).reason is Reason.MANUAL_REQUEST
    assert decide_before(replace(asked, window_steps=0)).reason is Reason.INSUFFICIENT_DATA
    assert decide_before(replace(asked, ranks_fresh=0)).reason is Reason.RANKS_MISSING


@dataclass(frozen=True, eq=False, kw_only=True)
class Planned(GateInputs):
    """A plan that was made, and what the gates look at besides."""

    target: Placement
    verdict: Verdict | None


def decide_after(plan):
    return gates.decide_after(plan, plan.target, plan.verdict)


SHAPE = ModelShape(2, 2, 2, 2, 1, 100)
GOOD = Planned(
    settings=SETTINGS,
    mode=Mode.AUTO,
    shape=SHAPE,
    now_unix=1000.0,
    ranks_fresh=2,
    newest_step_age_s=1.0,
    current=Placement(np.array([[0, -1, 1, -1]] * 2), 2, 2),
    target=Placement(np.array([[0, 1, 1, 0], [0, -1, 1, -1]]), 2, 2),
    verdict=Verdict(
        call=Call.RECOMMEND,
        steps=50,
        gain=0.1,
        gain_lower=0.05,
        gain_upper=0.15,
        saved_per_step=2.0,
        copy_cost=1000.0,
        lifetime_steps=1000,
        cost=0.03,
        payback_steps=500.0,
        payback_s=5.0,
    ),
)


def verdict(**changes) -> dict[str, Any]:
    assert GOOD.verdict is not None
    return {"verdict": replace(GOOD.verdict, **changes)}


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
    decision = decide_after(replace(GOOD, mode=mode, manual=manual))
    assert (decision.passed, decision.reason) == (passed, reason)
    assert decision.numbers["copies"] == 2
    assert decision.numbers["bytes"] == 200
    assert decision.numbers["layers"] == 1
    assert decision.numbers["payback_steps"] == 500
    assert decision.numbers["payback_s"] == 5.0
    assert decision.numbers["gain"] == 0.1
    assert decision.numbers["net_gain"] == pytest.approx(0.07)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": GOOD.current}, Reason.NO_CHANGE),
        ({"objective": Objective(limits=PlanLimits(max_moves=1))}, Reason.LIMIT_EXCEEDED),
        ({"objective": Objective(limits=PlanLimits(max_bytes=199))}, Reason.LIMIT_EXCEEDED),
        (
            {
                "objective": Objective(limits=PlanLimits(max_bytes=10**9)),
                "shape": replace(SHAPE, bytes_per_expert=0),
            },
            Reason.LIMIT_EXCEEDED,
        ),
        ({"objective": Objective(limits=PlanLimits(max_layers=0))}, Reason.LIMIT_EXCEEDED),
        ({"verdict": None}, Reason.INSUFFICIENT_DATA),
        (verdict(steps=15), Reason.INSUFFICIENT_DATA),
        (verdict(gain=math.nan), Reason.INSUFFICIENT_DATA),
        (verdict(gain=0.0019), Reason.GAIN_TOO_SMALL),
        (verdict(gain=-0.2), Reason.GAIN_TOO_SMALL),
        (verdict(gain_lower=0.0), Reason.GAIN_UNCERTAIN),
        (verdict(gain_lower=math.nan), Reason.GAIN_UNCERTAIN),
        (verdict(call=Call.INSUFFICIENT_EVIDENCE), Reason.GAIN_UNCERTAIN),
        (verdict(call=Call.NOT_NOW), Reason.PAYBACK_TOO_LONG),
        (verdict(payback_steps=20_001.0), Reason.PAYBACK_TOO_LONG),
        (verdict(payback_steps=math.inf), Reason.PAYBACK_TOO_LONG),
        (verdict(payback_steps=math.nan), Reason.PAYBACK_TOO_LONG),
    ],
)
def test_a_plan_that_is_too_large_or_not_worth_it_stops(change, reason):
    decision = decide_after(replace(GOOD, **change))
    assert (decision.passed, decision.reason) == (False, reason)


def test_an_operator_may_pay_for_what_does_not_pay_but_never_exceed_a_limit():
    manual = replace(GOOD, manual=True, verdict=None)
    assert decide_after(manual).passed
    for change, reason in (
        ({"target": GOOD.current}, Reason.NO_CHANGE),
        ({"objective": Objective(limits=PlanLimits(max_moves=1))}, Reason.LIMIT_EXCEEDED),
    ):
        assert decide_after(replace(manual, **change)).reason is reason


def test_settings_by_name():
    assert GateSettings.from_thresholds({"min_gain": 0.05, "cooldown_s": 7}).min_gain == 0.05
    with pytest.raises(InvalidInput, match="unknown gate settings min_gian; known: change_ratio"):
        GateSettings.from_thresholds({"min_gian": 0.05})
    with pytest.raises(InvalidInput, match="plan_below 0.95 <= stop_above 0.93"):
        GateSettings.from_thresholds({"plan_below": 0.95})
    for value in (-1.0, math.nan, math.inf):
        with pytest.raises(InvalidInput, match="must be finite and not negative"):
            GateSettings(cooldown_s=value)
