"""The planning loop in each mode; every cycle ends in a recorded decision."""

import dataclasses

import pytest

from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.ids import EpRank, Generation
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.schedule import Schedule
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    BASE,
    CONTROL_TIMING,
    Operator,
    answer_queries,
    both,
    control_of,
    from_rank,
    hello_of,
    key_of,
    of_kind,
    only,
    plan_of,
    planning_loop_of,
    record,
    state_of,
)

AUTO = DeploymentPolicy(mode=Mode.AUTO, cycle_s=10.0)


def decide(control, plan, now=10.0, reason=Reason.PLAN_STARTED):
    cycle = only(control.handle(msg.Tick(), now), ctl.RunCycle)
    hear(control, now)
    return control.handle(ctl.CycleDecided(cycle.cycle, reason, plan, {"gain": 0.2}), now)


def hear(control, now):
    for rank in (0, 1):
        control.handle(from_rank(rank, state_of(rank)), now)


def closed_row(control, now=10.0):
    """Return the decision of a cycle in which no plan may begin, and which measures the balance."""
    cycle = only(control.handle(msg.Tick(), now), ctl.RunCycle)
    assert cycle.closed_by is not None
    decided = ctl.CycleDecided(cycle.cycle, cycle.closed_by, numbers={"time_balance": 0.7})
    return only(control.handle(decided, now + 0.5), ctl.PersistDecision).row


def fresh(policy, now=9.9, **changes):
    control = control_of(policy=policy, **changes)
    hear(control, now)
    return control


def test_auto_mode_begins_the_plan_of_a_cycle():
    control = fresh(AUTO)
    actions = decide(control, plan_of(kind=PlanKind.AUTOMATIC))
    row = only(actions, ctl.PersistDecision).row
    assert (row["reason"], row["plan_id"], row["numbers"]) == (
        Reason.PLAN_STARTED,
        "p",
        {"gain": 0.2},
    )
    assert control.state is S.MIGRATING


def test_propose_mode_waits_for_a_person_and_makes_one_proposal_at_a_time():
    control = fresh(dataclasses.replace(AUTO, mode=Mode.PROPOSE))
    actions = decide(control, plan_of(kind=PlanKind.AUTOMATIC))
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.PLAN_PROPOSED
    assert (record(control).phase, control.state) == (PlanPhase.PROPOSED, S.READY)
    row = closed_row(control, 20.0)
    assert (row["reason"], row["plan_id"], row["numbers"]) == (
        Reason.PLAN_PROPOSED,
        "p",
        {"time_balance": 0.7},
    )


def test_a_cycle_that_waits_for_approval_says_until_when():
    control = fresh(dataclasses.replace(AUTO, mode=Mode.PROPOSE))
    decide(control, plan_of(kind=PlanKind.AUTOMATIC, expires_at=620.0 + control.unix_offset_s))
    row = closed_row(control, 20.0)
    assert row["numbers"] == {"time_balance": 0.7, "expires_in_s": 599.5}


def test_a_proposal_that_was_approved_during_a_cycle_is_not_waited_for():
    control = fresh(dataclasses.replace(AUTO, mode=Mode.PROPOSE))
    decide(control, plan_of(kind=PlanKind.AUTOMATIC))
    cycle = only(control.handle(msg.Tick(), 20.0), ctl.RunCycle)
    hear(control, 20.0)
    Operator(control).approve(record(control).plan.plan_id, "me", 20.0)
    late = control.handle(ctl.CycleDecided(cycle.cycle, Reason.PLAN_PROPOSED), 20.5)
    assert only(late, ctl.PersistDecision).row["plan_id"] is None


def test_observe_mode_moves_nothing():
    control = fresh(dataclasses.replace(AUTO, mode=Mode.OBSERVE))
    actions = decide(control, plan_of(kind=PlanKind.AUTOMATIC))
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.OBSERVE_MODE
    assert control.records.by_id == {}


def test_cycle_without_a_plan_is_recorded_with_its_reason():
    control = fresh(AUTO)
    actions = decide(control, None, reason=Reason.GAIN_TOO_SMALL)
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.GAIN_TOO_SMALL


def test_invalid_plan_of_a_cycle_is_recorded_as_refused():
    """R17."""
    control = fresh(AUTO)
    plan = plan_of(kind=PlanKind.AUTOMATIC, waves=1)
    actions = decide(control, dataclasses.replace(plan, target=BASE))
    assert record(control).phase is PlanPhase.REFUSED and record(control).error
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.INVALID_INPUT
    assert control.state is S.READY


def test_plan_that_was_overtaken_is_not_begun():
    control = fresh(AUTO)
    cycle = only(control.handle(msg.Tick(), 10.0), ctl.RunCycle)
    Operator(control).freeze(60.0, 10.0)
    actions = control.handle(ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan_of()), 10.5)
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.FROZEN
    late = control.handle(ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan_of()), 10.6)
    assert late == [], "a cycle is answered once"


def test_plan_of_a_cycle_of_an_earlier_term_is_not_begun():
    """It was made under an earlier policy, and the new term's cycle waits for its own answer."""
    control = fresh(AUTO)
    late = only(control.handle(msg.Tick(), 10.0), ctl.RunCycle)
    control.handle(ctl.LeaseLost(), 10.1)
    control.handle(ctl.LeaseAcquired(msg.Leader("a", 2)), 10.2)
    both(control, hello_of, 10.3)
    answer_queries(control, 10.4)
    both(control, lambda rank: state_of(rank), 20.0)
    asked = only(control.handle(msg.Tick(), 20.3), ctl.RunCycle)
    assert control.handle(ctl.CycleDecided(late.cycle, Reason.PLAN_STARTED, plan_of()), 20.4) == []
    answered = control.handle(ctl.CycleDecided(asked.cycle, Reason.PLAN_STARTED, plan_of()), 20.5)
    assert only(answered, ctl.PersistDecision).row["reason"] == Reason.PLAN_STARTED


def only_from(unix: float, minutes: int = 60) -> Schedule:
    """Return a schedule that opens every day at the minute of a Unix time."""
    first = int(unix // 60) % 1440
    begins, ends = divmod(first, 60), divmod((first + minutes) % 1440, 60)
    return Schedule(windows=(f"daily {begins[0]:02}:{begins[1]:02} - {ends[0]:02}:{ends[1]:02}",))


def test_outside_its_schedule_no_plan_begins_and_none_by_hand():
    unix = control_of(S.READY).unix_offset_s + 10.0
    control = fresh(dataclasses.replace(AUTO, schedule=only_from(unix + 7200)))
    assert closed_row(control)["reason"] == Reason.OUTSIDE_SCHEDULE
    with pytest.raises(Conflict, match="the schedule opens in 120 min") as caught:
        Operator(control).submit(plan_of(), 10.0, approve=True)
    assert caught.value.reason is Reason.OUTSIDE_SCHEDULE
    waiting, _ = Operator(control).submit(plan_of(), 10.0)
    with pytest.raises(Conflict) as caught:
        Operator(control).approve(waiting.plan.plan_id, "me", 10.0)
    assert caught.value.reason is Reason.OUTSIDE_SCHEDULE
    assert record(control).phase is PlanPhase.PROPOSED
    Operator(control).set_policy(dataclasses.replace(AUTO, schedule=only_from(unix - 60)), {}, 10.0)
    started, _ = Operator(control).approve(waiting.plan.plan_id, "me", 10.0)
    assert (started.phase, control.state) == (PlanPhase.MIGRATING, S.MIGRATING)


def test_a_plan_of_a_cycle_that_ends_after_closing_time_is_not_begun():
    unix = control_of(S.READY).unix_offset_s + 10.0
    control = fresh(dataclasses.replace(AUTO, schedule=only_from(unix - 60)))
    cycle = only(control.handle(msg.Tick(), 10.0), ctl.RunCycle)
    Operator(control).set_policy(
        dataclasses.replace(AUTO, schedule=only_from(unix + 7200)), {}, 10.0
    )
    actions = control.handle(ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan_of()), 10.5)
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.OUTSIDE_SCHEDULE


def test_a_rollback_may_begin_at_any_time():
    control = fresh(AUTO)
    closed = only_from(control.unix_offset_s + 7200)
    Operator(control).set_policy(dataclasses.replace(AUTO, schedule=closed), {}, 10.0)
    back, _ = Operator(control).submit(plan_of(kind=PlanKind.ROLLBACK), 10.0, approve=True)
    assert not back.phase.terminal and back.phase is not PlanPhase.PROPOSED


@pytest.mark.parametrize("waits", ["", "stalled", "paused"])
def test_while_a_plan_runs_or_waits_every_cycle_measures_the_balance(waits):
    control = control_of(S.MIGRATING, policy=AUTO)
    if waits:
        health = ctl.WaveHealth(key_of(), waits == "stalled", Reason.NO_STEPS)
        control.as_leader.executor._note_health(health, 9.0)
        assert record(control).phase == waits
    row = closed_row(control)
    assert (row["reason"], row["numbers"]) == (Reason.PLAN_IN_PROGRESS, {"time_balance": 0.7})
    assert of_kind(control.handle(msg.Tick(), 10.6), ctl.RunCycle) == []


@pytest.mark.parametrize(
    ("state", "reason"),
    [(S.WAITING_FOR_RANKS, Reason.RANKS_MISSING), (S.RECOVERING, Reason.RECOVERING)],
)
def test_a_cycle_ends_at_once_while_the_placement_is_not_known(state, reason):
    control = control_of(state, policy=AUTO)
    rows = of_kind(control.handle(msg.Tick(), 10.0), ctl.PersistDecision)
    assert [row.row["reason"] for row in rows] == [reason]
    assert of_kind(control.handle(msg.Tick(), 10.1), ctl.PersistDecision) == []


def test_planner_that_never_answers_is_counted_as_failed():
    control = fresh(AUTO)
    control.handle(msg.Tick(), 10.0)
    for rank in (0, 1):
        control.handle(from_rank(rank, state_of(rank)), 309.0)
    assert of_kind(control.handle(msg.Tick(), 309.0), ctl.PersistDecision) == []
    row = only(control.handle(msg.Tick(), 310.0), ctl.PersistDecision).row
    assert row["reason"] == Reason.PLANNER_FAILED


def test_follower_answers_that_it_does_not_lead():
    with pytest.raises(Unavailable) as caught:
        Operator(control_of(S.FOLLOWER)).submit(plan_of(), 0.0)
    assert caught.value.reason is Reason.NOT_LEADER


def cycle_or_reason(control, now=10.0):
    """Return the reason of the decision at a tick; None if a cycle begins that may plan."""
    actions = control.handle(msg.Tick(), now)
    if cycles := of_kind(actions, ctl.RunCycle):
        assert not of_kind(actions, ctl.PersistDecision)
        return cycles[0].closed_by
    return only(actions, ctl.PersistDecision).row["reason"]


@pytest.mark.parametrize(
    ("mode", "held", "proposed", "troubled"),
    [
        (Mode.AUTO, Reason.HELD_AFTER_ROLLBACK, None, Reason.OBSERVE_ONLY),
        (Mode.PROPOSE, None, Reason.PLAN_PROPOSED, Reason.OBSERVE_ONLY),
        (Mode.OBSERVE, None, None, None),
    ],
)
def test_what_stops_a_cycle_depends_on_the_mode(mode, held, proposed, troubled):
    policy = dataclasses.replace(AUTO, mode=mode)
    control = fresh(policy)
    planning_loop_of(control).hold = Hold(Reason.HELD_AFTER_ROLLBACK)
    assert cycle_or_reason(control) == held
    control = fresh(policy)
    control.records.add(
        plan_of(kind=PlanKind.AUTOMATIC), PlanPhase.PROPOSED, Reason.LOAD_CHANGED, 0.0
    )
    assert cycle_or_reason(control) == proposed
    control = fresh(policy)
    control.handle(ctl.RankTroubled(EpRank(1), 11, "its replicas differ"), 9.9)
    assert cycle_or_reason(control) == troubled


def test_a_planner_that_failed_is_said_once_and_asked_again():
    control = fresh(AUTO)
    assert cycle_or_reason(control) is None
    deadline = 10.0 + CONTROL_TIMING.cycle_deadline_s
    assert cycle_or_reason(control, deadline) == Reason.PLANNER_FAILED
    for rank in (0, 1):
        control.handle(from_rank(rank, state_of(rank)), deadline)
    assert cycle_or_reason(control, deadline + 0.1) is None


@pytest.mark.parametrize("changes", [{"base_epoch": 1}, {"generation": Generation("g0")}])
def test_a_plan_of_a_cycle_for_another_epoch_or_group_is_not_entered(changes):
    control = fresh(AUTO)
    actions = decide(control, plan_of(kind=PlanKind.AUTOMATIC, **changes))
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.STALE_BASE
    assert not control.records.by_id


@pytest.mark.parametrize(("mode", "by"), [(Mode.AUTO, "auto"), (Mode.PROPOSE, None)])
def test_a_plan_of_a_cycle_says_if_nobody_had_to_approve_it(mode, by):
    control = fresh(dataclasses.replace(AUTO, mode=mode))
    decide(control, plan_of(kind=PlanKind.AUTOMATIC))
    assert record(control).story[0].get("by") == by
