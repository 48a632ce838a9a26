"""The leader acts on the answers to its regular questions, early, late and different."""

import dataclasses
from typing import Any

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.model.plan import PlanKind
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    AFTER_ONE,
    Operator,
    abort_answers,
    ack,
    both,
    control_of,
    from_rank,
    group_leaves,
    hello_of,
    identity_of,
    key_of,
    of_kind,
    only,
    plan_of,
    query_of,
    record,
    sent,
    state_in,
    state_of,
    vote,
)


@pytest.mark.parametrize(
    ("difference", "state"),
    [
        ({}, S.READY),
        ({"epoch": 1}, S.RECOVERING),
        ({"placement_digest": AFTER_ONE.digest}, S.RECOVERING),
        ({"wave": key_of("q"), "state": msg.ParticipantState.PREPARED}, S.RECOVERING),
        ({"weights_version": 2}, S.RECOVERING),
    ],
)
def test_any_difference_from_the_records_makes_the_leader_query_all_ranks(difference, state):
    control = control_of()
    control.handle(msg.Tick(), 1.0)
    answer = state_of(0, query=query_of(control))
    control.handle(from_rank(0, dataclasses.replace(answer, **difference)), 1.0)
    assert control.state is state


def test_an_answer_from_before_the_end_of_the_last_wave_is_no_difference():
    """It tells the map from before the wave."""
    control = control_of(S.READY)
    Operator(control).submit(plan_of(1), 0.0, approve=True)
    control.handle(msg.Tick(), 1.0)
    asked_before = query_of(control)
    vote(control)
    ack(control, AFTER_ONE, 1)
    assert (control.state, control.epoch) == (S.READY, 1)
    control.handle(from_rank(0, state_of(0, query=asked_before)), 1.0)
    assert state_in(control) is S.READY
    control.handle(msg.Tick(), 2.5)
    assert query_of(control) == asked_before + 1
    control.handle(from_rank(0, state_of(0, query=query_of(control))), 2.5)
    assert state_in(control) is S.RECOVERING


def test_staged_bytes_of_the_running_wave_are_shown():
    control = control_of(S.MIGRATING)
    control.handle(from_rank(0, msg.StagingProgress(key_of("other"), 1, 2)), 0.0)
    assert control.as_leader.executor.staged == {}
    control.handle(from_rank(0, msg.StagingProgress(key_of(), 3, 10)), 0.0)
    assert control.as_leader.executor.staged == {EpRank(0): (3, 10)}


def test_a_rank_that_dropped_a_committed_wave_raises_an_alert_after_its_end_too():
    control = control_of()
    Operator(control).submit(plan_of(1), 0.0, approve=True)
    vote(control)
    ack(control, AFTER_ONE, 1)
    dropped = msg.AbortAnswer(key_of(), Epoch(0), msg.WaveOutcome.DROPPED, True)
    alert = only(control.handle(from_rank(1, dropped), 0.0), ctl.Alert)
    assert alert.reason is Reason.EPOCH_DISAGREES


def test_no_plan_begins_between_a_reload_and_the_answers_of_all_ranks():
    """R4: its wave would be for the old weights."""
    control = control_of(S.MIGRATING)
    reloaded: dict[str, Any] = {"weights_version": 2}
    both(control, lambda rank: state_of(rank, **reloaded))
    assert state_in(control) is S.MIGRATING
    abort_answers(control)
    assert record(control).reason is Reason.WEIGHTS_VERSION_CHANGED
    _, actions = Operator(control).submit(plan_of(1, "next"), 0.0, approve=True)
    assert not [m for m in sent(actions) if isinstance(m, msg.Prepare)]
    both(control, lambda rank: state_of(rank, **reloaded))
    assert state_in(control) is S.RECOVERING


def test_a_freeze_stops_neither_a_rollback_nor_a_plan_that_has_begun():
    control = control_of(S.MIGRATING)
    Operator(control).freeze(1000.0, 0.0)
    vote(control)
    actions = ack(control, AFTER_ONE, 1)
    assert {m.wave for m in sent(actions) if isinstance(m, msg.Prepare)} == {key_of(index=1)}
    control = control_of()
    Operator(control).freeze(1000.0, 0.0)
    rollback = plan_of(1, kind=PlanKind.ROLLBACK)
    _, actions = Operator(control).submit(rollback, 0.0, approve=True)
    assert len([m for m in sent(actions) if isinstance(m, msg.Prepare)]) == 2
    assert not of_kind(control.handle(msg.Tick(), 30.0), ctl.RunCycle)


def test_an_answer_of_a_process_of_another_generation_starts_nothing():
    """Its group has not gathered yet."""
    control = control_of()
    group_leaves(control)
    control.handle(from_rank(1, hello_of(1, "g2", 5), 5, 31), 0.1)
    answer = dataclasses.replace(state_of(1, query=9, epoch=4), identity=identity_of(1, "g2", 5))
    assert control.handle(from_rank(1, answer, 5, 31), 0.1) == []
    assert control.state is S.READY


def aborts(actions):
    return [a.rank for a in of_kind(actions, ctl.SendToRank) if isinstance(a.message, msg.Abort)]


def test_a_lost_rank_that_says_hello_is_asked_once():
    control = control_of(S.MIGRATING)
    control.handle(ctl.RankHeard(EpRank(0), 1, 10), 3.0)
    assert aborts(control.handle(msg.Tick(), 3.0)) == [0, 1]
    assert aborts(control.handle(from_rank(1, hello_of(1), stream=21), 3.1)) == [1]
    assert aborts(control.handle(msg.Tick(), 3.2)) == []


def test_a_rank_of_a_new_generation_that_stops_at_once_is_lost_to_its_wave():
    control = control_of()
    control.handle(msg.Tick(), 10.0)
    for rank in (0, 1):
        control.handle(from_rank(rank, hello_of(rank, "g2", 5), 5, 30 + rank), 10.1)
    held: dict[str, Any] = {
        "state": msg.ParticipantState.ARMED,
        "wave": key_of(generation="g2"),
    }
    for rank in (0, 1):
        answer = state_of(rank, query=query_of(control))
        answer = dataclasses.replace(answer, identity=identity_of(rank, "g2", 5), **held)
        control.handle(from_rank(rank, answer, 5, 30 + rank), 10.1)
    control.handle(ctl.RankStopped(EpRank(1), 31), 10.1)
    health = only(control.handle(msg.Tick(), 10.2), ctl.WaveHealth)
    assert (health.stalled, health.reason) == (True, Reason.RANK_LOST)
