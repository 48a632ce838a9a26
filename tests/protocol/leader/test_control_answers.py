"""What the leader makes of the answers to its regular questions, early, late and different."""

import dataclasses
from typing import Any

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.model.plan import PlanKind
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.operator import Operator
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    AFTER_ONE,
    abort_answers,
    ack,
    both,
    control_of,
    from_rank,
    key_of,
    of_kind,
    only,
    plan_of,
    query_of,
    record,
    sent,
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
    assert control.state is S.READY
    control.handle(msg.Tick(), 2.5)
    assert query_of(control) == asked_before + 1
    control.handle(from_rank(0, state_of(0, query=query_of(control))), 2.5)
    assert control.state is S.RECOVERING


def test_staged_bytes_of_the_running_wave_are_shown():
    control = control_of(S.MIGRATING)
    assert control.executor is not None
    control.handle(from_rank(0, msg.StagingProgress(key_of("other"), 1, 2)), 0.0)
    assert control.executor.staged == {}
    control.handle(from_rank(0, msg.StagingProgress(key_of(), 3, 10)), 0.0)
    assert control.executor.staged == {EpRank(0): (3, 10)}


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
    assert control.state is S.MIGRATING
    abort_answers(control)
    assert record(control).reason is Reason.WEIGHTS_VERSION_CHANGED
    _, actions = Operator(control).submit(plan_of(1, "next"), 0.0, approve=True)
    assert not [m for m in sent(actions) if isinstance(m, msg.Prepare)]
    both(control, lambda rank: state_of(rank, **reloaded))
    assert control.state is S.RECOVERING


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
