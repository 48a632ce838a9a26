"""A new leader: the wave that it finds on the ranks, and the plan of its predecessor."""

import dataclasses
from typing import Any

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.plan import PlanPhase, PlanRecord
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState as S
from evenkeel_moe.protocol.transitions import CoordinatorState as C
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    CONTROL_TIMING,
    Operator,
    ack,
    after_wave,
    answer_queries,
    both,
    control_of,
    from_rank,
    group_leaves,
    hello_of,
    key_of,
    of_kind,
    only,
    plan_of,
    query_of,
    record,
    sent,
    state_of,
    vote,
    wave_state,
)


def test_found_wave_is_ended_before_anything_else():
    """R12."""
    control = control_of(S.RECOVERING)
    for rank in (0, 1):
        held = state_of(rank, query=1, state=msg.ParticipantState.ARMED, wave=key_of())
        control.handle(from_rank(rank, held), 0.0)
    assert wave_state(control) is C.RECOVERING
    both(
        control,
        lambda rank: state_of(rank, query=2, state=msg.ParticipantState.ARMED, wave=key_of()),
    )
    assert wave_state(control) is C.COMMITTING
    ack(control, AFTER_ONE, 1)
    assert control.coordinator is not None
    assert (control.coordinator.done, control.state) == (True, S.RECOVERING)
    actions = answer_queries(control, epoch=1, placement=AFTER_ONE)
    assert control.state is S.READY and only(actions, ctl.PersistEpoch).epoch == 1


def test_a_late_answer_to_an_earlier_round_does_not_count():
    """R12: it tells of a time before the round, and the group may have moved on since."""
    control = control_of(S.RECOVERING)
    old = from_rank(0, state_of(0, query=query_of(control)))
    control.handle(old, 0.0)
    at_one: dict[str, Any] = {"epoch": 1, "placement": AFTER_ONE}
    control.handle(from_rank(1, state_of(1, query=query_of(control), **at_one)), 0.0)
    control.handle(msg.Tick(), CONTROL_TIMING.ask_again_s)
    control.handle(from_rank(1, state_of(1, query=query_of(control), **at_one)), 2.0)
    control.handle(old, 2.0)
    assert control.as_leader.recovery is not None and control.as_leader.recovery.round is not None
    assert (control.state, control.as_leader.recovery.round.missing) == (S.RECOVERING, (0,))
    control.handle(from_rank(0, state_of(0, query=query_of(control), **at_one)), 2.0)
    assert (control.state, control.epoch) == (S.READY, 1)


def stored_plan(**changes):
    control = control_of(S.MIGRATING)
    return ctl.StoredRecords(
        plans=(dataclasses.replace(record(control), **changes),), epochs={Epoch(0): BASE}
    )


def test_new_leader_keeps_a_freeze():
    control = control_of(S.READY, ctl.StoredRecords(frozen_until=100.0))
    assert control.frozen_until == 100.0
    assert only(control.handle(msg.Tick(), 30.0), ctl.PersistDecision).row["reason"] == "frozen"
    assert of_kind(control.handle(msg.Tick(), 100.0), ctl.RunCycle)


def test_new_leader_goes_on_with_a_plan_that_the_ranks_are_in_the_middle_of():
    control = control_of(S.RECOVERING, stored_plan())
    actions = answer_queries(control, **after_wave(0))
    assert control.state is S.MIGRATING and record(control).waves_committed == 1
    assert {m.wave for m in sent(actions) if isinstance(m, msg.Prepare)} == {key_of(index=1)}


def found_and_acked(stored):
    """A new leader found wave 0 armed on the ranks, ended it, and has not heard them again."""
    control = control_of(S.RECOVERING, stored)
    for query in (1, 2):
        both(
            control,
            lambda rank, query=query: state_of(
                rank, query=query, state=msg.ParticipantState.ARMED, wave=key_of()
            ),
        )
    return control, ack(control, AFTER_ONE, 1)


def test_wave_found_and_committed_is_counted_though_the_group_restarts_before_it_is_asked_again():
    control, actions = found_and_acked(stored_plan())
    kinds = [type(action) for action in actions]
    assert kinds.index(ctl.PersistPlan) < kinds.index(ctl.PersistOutcome), (
        "or a crash between them loses the wave"
    )
    group_leaves(control)
    for rank in (0, 1):
        control.handle(from_rank(rank, hello_of(rank, "g2", 5, epoch=1), 5, 30 + rank), 1.0)
    ended = record(control)
    assert (ended.phase, ended.reason, ended.waves_committed) == (
        PlanPhase.ABORTED,
        Reason.GENERATION_CHANGED,
        1,
    )


def test_found_wave_of_another_life_of_the_plan_id_is_not_counted():
    stored = stored_plan()
    moved = dataclasses.replace(stored.plans[0].plan, base_epoch=Epoch(7))
    control, _ = found_and_acked(stored_plan(plan=moved))
    assert record(control).waves_committed == 0


@pytest.mark.parametrize(
    ("state", "heard", "reason"),
    [
        (S.WAITING_FOR_RANKS, (0,), Reason.RANKS_MISSING),
        (S.RECOVERING, (0,), Reason.RANKS_MISSING),
        (S.RECOVERING, (0, 1), Reason.RECOVERY_DEADLINE),
    ],
)
def test_plan_that_a_new_leader_cannot_go_on_with_says_why(state, heard, reason):
    """R14: a rank that never comes back, that goes away, that hears no question."""
    control = control_of(state, stored_plan())
    for t in range(1, 15):
        for rank in heard:
            control.handle(from_rank(rank, hello_of(rank)), float(t))
            control.handle(ctl.RankHeard(rank, 1, 10 + rank), float(t))
        said = of_kind(control.handle(msg.Tick(), float(t)), ctl.WaveHealth)
        assert [health.reason for health in said] == ([reason] if t == 11 else [])
    assert (control.state, record(control).phase, record(control).reason) == (
        state,
        PlanPhase.STALLED,
        reason,
    )
    if state is S.WAITING_FOR_RANKS:
        control.handle(from_rank(1, hello_of(1)), 15.0)
    answer_queries(control, 15.0)
    assert (control.state, record(control).phase) == (S.MIGRATING, PlanPhase.MIGRATING)


def test_found_wave_that_stalls_is_what_its_plan_says():
    """R14, and it runs again when the rank is back."""
    held: dict[str, Any] = {"state": msg.ParticipantState.PREPARED, "wave": key_of()}
    control = control_of(S.RECOVERING, stored_plan())
    both(control, lambda rank: state_of(rank, query=1, **held))
    for t in range(1, 6):
        control.handle(from_rank(0, state_of(0, query=2, **held)), float(t))
        control.handle(msg.Tick(), float(t))
    assert wave_state(control) is C.RECOVERING
    assert (record(control).phase, record(control).reason) == (PlanPhase.STALLED, Reason.RANK_LOST)
    for t in range(6, 16):
        control.handle(from_rank(0, state_of(0, query=2, **held)), float(t))
        assert not of_kind(control.handle(msg.Tick(), float(t)), ctl.WaveHealth), "said once"
    control.handle(from_rank(1, state_of(1, query=2, **held)), 16.0)
    assert wave_state(control) is C.COMMITTING
    assert record(control).phase is PlanPhase.MIGRATING


def test_plan_that_waited_for_ranks_goes_on_with_its_found_wave():
    held: dict[str, Any] = {"state": msg.ParticipantState.PREPARED, "wave": key_of()}
    stalled = stored_plan(phase=PlanPhase.STALLED, reason=Reason.RANKS_MISSING)
    control = control_of(S.RECOVERING, stalled)
    both(control, lambda rank: state_of(rank, query=1, **held))
    assert record(control).phase is PlanPhase.MIGRATING


def test_new_leader_ends_a_plan_that_the_ranks_completed():
    control = control_of(S.RECOVERING, stored_plan())
    answer_queries(control, **after_wave(1))
    assert (control.state, record(control).phase, record(control).waves_committed) == (
        S.READY,
        "committed",
        2,
    )


def test_new_leader_ends_a_plan_whose_base_is_gone():
    control = control_of(S.RECOVERING, stored_plan())
    answer_queries(control, **{**after_wave(0), "placement": AFTER_TWO})
    assert (record(control).phase, record(control).reason) == (PlanPhase.ABORTED, Reason.STALE_BASE)


def test_new_leader_honours_a_cancel_its_predecessor_took():
    control = control_of(S.MIGRATING)
    vote(control)
    Operator(control).cancel(PlanId("p"), "me", 0.0)
    stored = ctl.StoredRecords(plans=(record(control),))
    control = control_of(S.RECOVERING, stored)
    answer_queries(control, **after_wave(0))
    assert record(control).phase is PlanPhase.CANCELLED


def test_of_two_plans_that_run_by_the_records_the_newest_goes_on():
    """R12: a lost write may leave an older one."""
    records = tuple(
        PlanRecord(plan_of(2, name), PlanPhase.MIGRATING, Reason.PLAN_STARTED, 0, 0.0)
        for name in ("old", "p")
    )
    control = control_of(S.RECOVERING, ctl.StoredRecords(records))
    answer_queries(control)
    assert (record(control, "old").phase, record(control, "old").reason) == (
        PlanPhase.ABORTED,
        Reason.STALE_BASE,
    )
    assert (record(control).phase, control.state) == (PlanPhase.MIGRATING, S.MIGRATING)
