"""Events of the leader's machine that come from telemetry, operators, clocks and the store."""

import pytest

from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    LEADER,
    Operator,
    control_of,
    plan_of,
    planning_loop_of,
    sent,
)


def test_telemetry_keeps_a_rank_fresh():
    """Its answers to questions may be late while a step takes long."""
    control = control_of()
    for t in range(1, 9):
        for rank in (EpRank(0), EpRank(1)):
            control.handle(ctl.RankHeard(rank, 1, 10 + rank), float(t))
        control.handle(msg.Tick(), float(t))
    assert control.membership.quorum(8.0).ok
    control.handle(ctl.RankHeard(EpRank(0), 1, 99), 12.0)
    assert not control.membership.fresh(EpRank(0), 12.0), "not its newest stream"


def test_no_wave_begins_while_a_rank_refuses_waves():
    """R9."""
    control = control_of()
    control.handle(ctl.RankTroubled(EpRank(1), 11, "its replicas differ"), 0.0)
    waiting, actions = Operator(control).submit(plan_of(), 0.0, approve=True)
    assert waiting.phase is PlanPhase.APPROVED and sent(actions) == []
    control.handle(ctl.RankTroubled(EpRank(1), 11, ""), 0.1)
    actions = control.handle(msg.Tick(), 0.2)
    assert len([m for m in sent(actions) if isinstance(m, msg.Prepare)]) == 2


def test_a_group_that_stops_as_planned_is_not_ready_and_not_lost():
    control = control_of()
    assert control.shown_state(0.0) == "ready"
    assert control.handle(ctl.RankStopped(EpRank(0), 10), 0.0) == []
    reason, detail = control.state_reason(0.0)
    assert (control.shown_state(0.0), reason) == ("waiting_for_ranks", Reason.RANKS_MISSING)
    assert detail == "ranks [0] stopped as planned"
    control.handle(ctl.RankStopped(EpRank(1), 11), 0.0)
    assert control.state_reason(0.0)[0] is Reason.GROUP_STOPPED
    control.handle(msg.Tick(), 0.1)
    assert control.shown_state(0.1) == "waiting_for_ranks"


def test_a_plan_is_measured_once_and_only_if_it_was_carried_out():
    control, gained = control_of(), DeliveredGain(9.0, unknown_because="no rank reports seconds")
    plan = plan_of()
    control.records.add(plan, PlanPhase.ABORTED, Reason.RANK_LOST, 0.0)
    event = ctl.PlanMeasured(plan.plan_id, gained)
    assert control.handle(event, 1.0) == []
    control.records.add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, 0.0)
    (write,) = control.handle(event, 1.0)
    assert isinstance(write, ctl.PersistPlan)
    assert write.record.delivered is gained
    assert control.handle(event, 2.0) == []


def test_policy_is_used_and_stored():
    control, policy = control_of(), DeploymentPolicy(mode=Mode.OBSERVE)
    (write,) = Operator(control).set_policy(policy, {"mode": "observe"}, 0.0)
    assert write == ctl.PersistDocument("policy", {"mode": "observe"})
    assert control.policy is planning_loop_of(control).policy is policy
    with pytest.raises(Unavailable):
        Operator(control_of(S.FOLLOWER)).set_policy(policy, {}, 0.0)


def test_a_freeze_ends_by_the_unix_clock_as_it_was_set():
    control = control_of()
    Operator(control).freeze(100.0, 0.0)
    assert planning_loop_of(control).closed(50.0) is Reason.FROZEN
    control.handle(ctl.ClockStepped(60.0), 50.0)
    assert planning_loop_of(control).closed(50.0) is None


def test_a_new_leader_uses_the_stored_policy_and_records_what_the_store_lost():
    control, policy = control_of(S.FOLLOWER), DeploymentPolicy(mode=Mode.OBSERVE)
    stored = ctl.StoredRecords(policy=policy, loss={"reason": "recovered"})
    (write,) = control.handle(ctl.LeaseAcquired(LEADER, stored), 0.0)
    assert write == ctl.PersistDecision({"reason": "recovered"})
    assert control.policy is planning_loop_of(control).policy is policy
