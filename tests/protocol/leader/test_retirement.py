"""Ranks leave a group: their evacuation, what waits meanwhile, and how it ends."""

import dataclasses

import numpy as np
import pytest

from evenkeel_moe.errors import Conflict, InfeasiblePlan, Reason, ShapeMismatch
from evenkeel_moe.model.hold import Hold, Retirement
from evenkeel_moe.model.ids import Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from tests.protocol.machines import (
    SHAPE,
    Operator,
    control_of,
    from_rank,
    hello_of,
    of_kind,
    only,
    plan_of,
    state_of,
)

RANK_1 = Retirement((EpRank(1),), 2)


def evacuation(**changes):
    return plan_of(1, "evacuate", kind=PlanKind.EVACUATION, **changes)


def active_of(control):
    assert control.records.active is not None
    return control.records.active


def test_the_evacuation_starts_and_the_retirement_is_stored():
    control = control_of()
    actions = Operator(control).retire(RANK_1, 0.0, evacuation())
    assert only(actions, ctl.PersistDocument).body["retiring"] == {"ranks": (1,), "num_ranks": 2}
    assert active_of(control).plan.plan_id == "evacuate"
    assert len(of_kind(actions, ctl.SendToRank)) == 2


@pytest.mark.parametrize("mode", Mode)
def test_meanwhile_only_evacuations_and_rollbacks_begin(mode):
    control = control_of(policy=DeploymentPolicy(mode=mode))
    operator = Operator(control)
    operator.retire(RANK_1, 0.0)
    assert only(control.handle(msg.Tick(), 10.0), ctl.RunCycle).closed_by is Reason.RESIZING
    with pytest.raises(Conflict, match=r"ranks \[1\] retire; `evenkeel resume") as refused:
        operator.submit(plan_of(), 10.0, approve=True)
    assert refused.value.reason is Reason.RESIZING
    control.require_free(PlanKind.ROLLBACK, 10.0)
    control.require_free(PlanKind.EVACUATION, 10.0)


def test_a_proposal_that_was_made_before_waits():
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(), 0.0)
    operator.retire(RANK_1, 0.0)
    with pytest.raises(Conflict, match="retire"):
        operator.approve(PlanId("p"), "me", 1.0)


def test_other_ranks_cannot_retire_at_the_same_time_and_the_same_may_be_asked_again():
    control = control_of()
    operator = Operator(control)
    operator.retire(RANK_1, 0.0)
    with pytest.raises(Conflict, match="retire already") as refused:
        operator.retire(Retirement((EpRank(0),), 2), 0.0)
    assert refused.value.reason is Reason.RESIZING
    operator.retire(RANK_1, 1.0, evacuation())
    assert active_of(control).plan.plan_id == "evacuate"


def test_an_evacuation_that_cannot_start_retires_nobody():
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(), 0.0, approve=True)
    with pytest.raises(Conflict, match="plan p is"):
        operator.retire(RANK_1, 0.0, evacuation())
    assert control.hold == Hold()
    operator.cancel(PlanId("p"), "me", 0.0)
    none_left = Placement(np.array([[0, 1, 3, 3, 1, 0]] * 2, np.int32), 2, 4)
    with pytest.raises(InfeasiblePlan):
        operator.retire(RANK_1, 0.0, evacuation(target=none_left))
    assert control.hold == Hold()


def test_resume_ends_it_and_stops_no_plan_that_has_begun():
    control = control_of()
    operator = Operator(control)
    operator.retire(RANK_1, 0.0, evacuation())
    assert "retiring" not in only(operator.resume(1.0), ctl.PersistDocument).body
    assert active_of(control).has_begun
    assert operator.resume(2.0) == []


def come_back(control, num_ranks, epoch, now=5.0):
    """All ranks of another group say hello and tell their state."""
    shape = dataclasses.replace(SHAPE, num_ranks=num_ranks, slots_per_rank=4)
    placement = Placement.initial(shape)
    for rank in range(2):
        control.handle(ctl.RankStopped(EpRank(rank), 10 + rank), now)
    actions = []
    for rank in range(num_ranks):
        hello = hello_of(
            rank,
            "g2",
            incarnation=2,
            shape=shape,
            epoch=Epoch(epoch),
            placement_digest=placement.digest,
            lineage=msg.Lineage(Generation("g1"), EpRank(rank) if rank < 2 else None),
        )
        actions += control.handle(from_rank(rank, hello, 2, 20 + rank), now)
    for rank in range(num_ranks):
        state = state_of(
            rank,
            control.as_leader.recovery.query,
            epoch,
            placement,
            identity=hello_of(rank, "g2", incarnation=2, shape=shape).identity,
        )
        actions += control.handle(from_rank(rank, state, 2, 20 + rank), now)
    return actions, placement


@pytest.mark.parametrize(("num_ranks", "ended"), [(1, True), (2, False), (3, True)])
def test_it_ends_when_the_group_has_another_size(num_ranks, ended):
    control = control_of()
    Operator(control).retire(RANK_1, 0.0)
    actions, _ = come_back(control, num_ranks, 1)
    assert (control.hold.retiring is None) == ended
    stored = [one for one in of_kind(actions, ctl.PersistDocument) if one.name == "control"]
    assert len(stored) == ended


def test_the_history_goes_on_and_no_rollback_leads_back_over_it():
    control = control_of()
    actions, placement = come_back(control, 3, 1)
    written = only(actions, ctl.PersistEpoch)
    assert (written.epoch, written.begins_history) == (1, False)
    assert set(control.history) == {0, 1} and control.placement == placement
    assert control.rollback_epoch() is None
    with pytest.raises(ShapeMismatch, match=r"epoch 0 is \(L, S, R, E\) = \(2, 6, 2, 4\)"):
        control.rollback_target(Epoch(0))
