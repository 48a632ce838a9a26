"""Health names the worst that is known, by the thresholds of the delivered alerts."""

from dataclasses import replace

import pytest

from deploy.chart_values import alert_thresholds
from evenkeel_moe.api.words.health import Health, Level, health_of
from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.model.finding import Finding, FindingCode, Severity
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.ports.status import HealthBounds
from tests.api.fakes import NOW, make_plan, make_rank, make_status

FIRST, SECOND = make_rank(0), make_rank(1)
LOST = (FIRST, make_rank(1, fresh=False))


def decided(reason, ago_s=1.0):
    return {"last_decision": {"at": NOW - ago_s, "reason": reason, "numbers": {}}}


def health(**changes):
    values = {"time_balance": None, "balancedness_mean": 0.95, **decided("balance_above_threshold")}
    return health_of(make_status(**{**values, **changes}), HealthBounds())


def with_rank(**changes):
    return {"ranks": (FIRST, replace(SECOND, **changes))}


def running(phase, ago_s):
    return {"state": "migrating", "active_plan": make_plan(phase=phase, updated_at=NOW - ago_s)}


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({}, "good", "Balance is good enough: nothing has to move."),
        ({"ranks": LOST, "proposals": (make_plan(),)}, "bad", "1 rank of 2 not connected."),
        ({"proposals": (make_plan(),)}, "attention", "1 proposal waits for approval."),
        (with_rank(trouble="no room"), "bad", "1 rank takes no more waves."),
        (
            {
                **with_rank(fresh=False, stopped=True),
                "state": "waiting_for_ranks",
                "reason": "ranks_missing",
            },
            "attention",
            "1 rank stopped as planned.",
        ),
        *(
            ({"reason": reason, "mode": "auto", **decided(reason)}, "attention", sentence(reason))
            for reason in ("observe_only", "weights_version_changed", "gate_layout_disagrees")
        ),
        (
            {"reason": "observe_only", "mode": "observe", **decided("observe_only")},
            "good",
            sentence("observe_only"),
        ),
        (
            {"held": True, "held_because": "held_after_rollback"},
            "attention",
            sentence("held_after_rollback"),
        ),
        ({"balancedness_mean": None}, "unknown", "The load is not known yet."),
        ({"last_decision": None}, "unknown", "No cycle has ended yet."),
        (decided("planner_failed"), "attention", sentence("planner_failed")),
        (decided("plan_in_progress"), "good", "A plan has just ended."),
        (
            with_rank(epoch=None),
            "unknown",
            "1 rank has no connection at present, and may be dead.",
        ),
        (
            decided("ranks_missing"),
            "unknown",
            "All ranks are connected again, and no cycle has ended since.",
        ),
        (decided("insufficient_data"), "unknown", sentence("insufficient_data")),
        (
            {**decided("plan_in_progress"), "state": "migrating"},
            "good",
            "A plan is being carried out.",
        ),
        ({"reason": "group_stopped", "ranks": ()}, "unknown", "The engine stopped as planned."),
        ({"state": "follower", "leader": "b"}, "unknown", "Replica b leads it; ask that replica."),
    ],
)
def test_health_names_the_worst_that_is_known(changes, level, text):
    assert health(**changes) == Health(level, text)


def test_a_deployment_that_nobody_leads_is_in_trouble():
    assert health(state="follower", leader="").level == "bad"


def test_counts_that_contradict_each_other_are_told_and_notes_are_not():
    doubt = Finding(FindingCode.IDLE_EXPERTS, Severity.DOUBT, "no expert counts", "rank 1")
    note = Finding(FindingCode.UNEVEN_LAYERS, Severity.NOTE, "layers disagree")
    told = Health(Level.ATTENTION, "The counts are in doubt: no expert counts: rank 1")
    assert health(findings=(note, doubt)) == told
    for findings in ((note,), (), None):
        assert health(findings=findings).level == "good"


@pytest.mark.parametrize(
    ("alert", "quiet"),
    [
        [{"balancedness_by_phase": {Phase.DECODE: x}} for x in (0.749, 0.75)],
        (
            {"balancedness_by_phase": {Phase.DECODE: 0.9, Phase.PREFILL: 0.7, Phase.MIXED: None}},
            {"balancedness_by_phase": {Phase.DECODE: 0.9, Phase.PREFILL: None}},
        ),
        [{"time_balance": x} for x in (0.749, 0.75)],
        [with_rank(slowness=x) for x in (1.31, 1.3)],
        [{"newest_step_unix": NOW - x} for x in (121, 120)],
        [{"plan_aborted_unix": NOW - x} for x in (899, 900)],
        [{"plans_lost_time": x} for x in (2, 1)],
        [running(PlanPhase.MIGRATING, x) for x in (601, 600)],
        [running(phase, 601) for phase in (PlanPhase.MIGRATING, PlanPhase.PAUSED)],
        [decided("no_change", x) for x in (300, 299)],
        [{"frozen_until_unix": x} for x in (NOW + 1, None)],
        [{**with_rank(epoch=4), **running(PlanPhase.MIGRATING, x)} for x in (121, 120)],
        [with_rank(epoch=x) for x in (4, FIRST.epoch)],
        [{"active_plan": make_plan(phase=x)} for x in (PlanPhase.STALLED, PlanPhase.MIGRATING)],
        [decided(x) for x in ("store_unavailable", "no_change")],
        [decided(x) for x in ("stale_data", "no_change")],
        [{"dispatch_warning": x} for x in ("two dispatchers", "")],
    ],
)
def test_health_is_not_good_where_an_alert_looks_and_good_just_within(alert, quiet):
    assert health(**alert).level in ("attention", "bad")
    assert health(**quiet).level == "good"


def test_balance_and_slowness_are_told_with_their_numbers():
    phases = {Phase.DECODE: 0.9, Phase.PREFILL: 0.7}
    told = health(balancedness_by_phase=phases).text
    assert told == "Balancedness of prefill is 0.700, below 0.75."
    slow = health(**with_rank(slowness=1.31)).text
    assert slow.startswith("Rank 1 takes 1.31 times as long as the median rank")
    assert health(plan_aborted_unix=NOW - 600).text == "A plan was aborted 10 min ago."


def test_the_bounds_are_those_of_the_delivered_alerts():
    alerts = alert_thresholds()
    assert HealthBounds() == HealthBounds(
        alerts["balancednessMin"],
        alerts["timeBalanceMin"],
        alerts["dataStaleSeconds"],
        alerts["slowRankRatio"],
        alerts["planStuckSeconds"],
        alerts["planFailedSeconds"],
        alerts["plansLostTime"],
        alerts["noDecisionsSeconds"],
        60 * float(alerts["epochMismatchFor"].removesuffix("m")),
    )
