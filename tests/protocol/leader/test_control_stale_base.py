"""The leader and two real rank machines, whose engine moved experts by itself."""

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState
from tests.protocol.machines import (
    BASE,
    Operator,
    control_of,
    from_controller,
    from_rank,
    key_of,
    participant_of,
    plan_of,
    record,
    sent,
    wave_of,
)

MOVED = BASE.with_rows((1,), wave_of(layer=1).rows)
"""The map of the ranks after the move."""


def deliver(control, ranks, actions):
    """Carry every message to its machine, until none is left."""
    queue = list(actions)
    while queue:
        action = queue.pop(0)
        if not isinstance(action, ctl.SendToRank):
            continue
        for answer in sent(ranks[action.rank].handle(from_controller(action.message), 0.0)):
            queue += control.handle(from_rank(action.rank, answer), 0.0)


@pytest.fixture
def group():
    """A leader that recorded epoch 0, and two ranks that have moved to epoch 1 since."""
    ranks = [participant_of(rank) for rank in (0, 1)]
    for rank in ranks:
        rank.handle(msg.EngineRebalanced(MOVED), 0.0)
    return control_of(), ranks


def submit(group, plan):
    control, ranks = group
    _, actions = Operator(control).submit(plan, 0.0, approve=True)
    deliver(control, ranks, actions)


def test_a_wave_refused_as_stale_makes_the_leader_query_the_ranks(group):
    """R15: without it, plans that follow each other closely would all end as stale_base."""
    control, ranks = group
    submit(group, plan_of())
    assert (record(control).phase, record(control).reason) == (
        PlanPhase.ABORTED,
        Reason.STALE_BASE,
    )
    assert (control.state, control.epoch, control.placement) == (
        ControlState.READY,
        Epoch(1),
        MOVED,
    )
    target = MOVED.with_rows((0,), wave_of().rows)
    submit(group, plan_of(1, "next", base_epoch=1, base=MOVED, target=target))
    assert control.state is ControlState.MIGRATING
    assert {rank.state for rank in ranks} == {msg.ParticipantState.STAGING}


def test_a_wave_that_ends_for_another_reason_does_not(group):
    control, ranks = group
    for rank in ranks:
        rank.observe_only = True
    submit(group, plan_of())
    assert record(control).reason is Reason.OBSERVE_ONLY
    assert (control.state, control.epoch) == (ControlState.READY, Epoch(0))


def test_while_the_ranks_are_queried_no_plan_begins(group):
    control, ranks = group
    _, actions = Operator(control).submit(plan_of(), 0.0, approve=True)
    stale = [
        m for rank in ranks for m in sent(rank.handle(from_controller(sent(actions)[-1]), 0.0))
    ]
    for rank, answer in enumerate(stale):
        control.handle(from_rank(rank, answer), 0.0)
    for number in (0, 1):
        gone = msg.AbortAnswer(key_of(), Epoch(1), msg.WaveOutcome.REFUSED, True)
        control.handle(from_rank(number, gone), 0.0)
    assert (record(control).reason, control.state) == (Reason.STALE_BASE, ControlState.RECOVERING)
