"""Requests of operators are refused with a reason, also while the leader cannot act."""

import pytest

from evenkeel_moe.errors import Conflict, NotFound, Reason, Unavailable
from evenkeel_moe.model.ids import Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.schedule import Schedule
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.operator import Operator
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    DEPLOYMENT,
    ack,
    answer_queries,
    control_of,
    from_rank,
    of_kind,
    plan_of,
    query_of,
    record,
    sent,
    state_of,
    vote,
)

P, Q = PlanId("p"), PlanId("q")


def refused(error, ask):
    with pytest.raises(error) as caught:
        ask()
    return caught.value.reason, str(caught.value)


def test_only_the_leader_takes_requests():
    operator = Operator(control_of(S.FOLLOWER))
    for ask in (
        lambda: operator.submit(plan_of(), 0.0),
        lambda: operator.approve(P, "me", 0.0),
        lambda: operator.cancel(P, "me", 0.0),
        lambda: operator.rollback_target(None),
        lambda: operator.resume(0.0),
        lambda: operator.freeze(1.0, 0.0),
        lambda: operator.set_policy(DeploymentPolicy(), {}, 0.0),
    ):
        assert refused(Unavailable, ask)[0] is Reason.NOT_LEADER


@pytest.mark.parametrize(
    ("state", "reason"),
    [(S.WAITING_FOR_RANKS, Reason.RANKS_MISSING), (S.RECOVERING, Reason.RECOVERING)],
)
def test_plans_wait_until_all_ranks_have_answered(state, reason):
    operator = Operator(control_of(state))
    for ask in (
        lambda: operator.submit(plan_of(), 0.0),
        lambda: operator.approve(P, "me", 0.0),
        lambda: operator.rollback_target(None),
    ):
        assert refused(Unavailable, ask)[0] is reason


def test_a_plan_for_another_group_or_epoch_is_refused_and_not_entered():
    control = control_of()
    operator = Operator(control)
    other, late = plan_of(generation=Generation("g0")), plan_of(base_epoch=1)
    assert refused(Conflict, lambda: operator.submit(other, 0.0))[0] is Reason.GENERATION_CHANGED
    moved = plan_of(1, base=AFTER_ONE, target=AFTER_ONE)
    for stale in (late, moved):
        assert (
            refused(Conflict, lambda plan=stale: operator.submit(plan, 0.0))[0] is Reason.STALE_BASE
        )
    assert not control.records.by_id


def test_a_repeated_request_writes_what_the_first_could_not():
    control = control_of()
    operator = Operator(control)
    _, actions = operator.submit(plan_of(), 0.0, request_digest="body")
    control.handle(ctl.PersistFailed(tuple(of_kind(actions, ctl.PersistPlan))), 0.0)
    assert operator.repeat(Q, "body") == (None, [])
    found, writes = operator.repeat(P, "body")
    assert (found, writes) == (record(control), [ctl.PersistPlan(record(control))])
    assert operator.repeat(P, "body") == (found, [])


def test_a_plan_that_is_no_proposal_cannot_be_approved():
    control = control_of(S.MIGRATING)
    operator = Operator(control)
    assert refused(Conflict, lambda: operator.approve(P, "me", 0.0)) == (
        Reason.WRONG_PHASE,
        "plan p is migrating",
    )
    operator.submit(plan_of(plan_id="q"), 0.0)
    operator.cancel(Q, "me", 0.0)
    assert refused(Conflict, lambda: operator.approve(Q, "me", 0.0)) == (
        Reason.WRONG_PHASE,
        "plan q is cancelled",
    )


def test_a_proposal_is_cancelled_at_once_even_while_the_ranks_are_queried():
    control = control_of()
    Operator(control).submit(plan_of(), 0.0)
    control.handle(msg.Tick(), 1.0)
    control.handle(from_rank(0, state_of(0, query=query_of(control), epoch=4)), 1.0)
    assert control.state is S.RECOVERING
    Operator(control).cancel(P, "me", 1.0)
    assert record(control).phase is PlanPhase.CANCELLED


def test_an_accepted_plan_that_waits_is_cancelled_at_once_but_not_before_the_ranks_have_answered():
    """R12: some rank may still hold its wave."""
    control = control_of()
    control.handle(ctl.RankTroubled(EpRank(1), 11, "its replicas differ"), 0.0)
    Operator(control).submit(plan_of(), 0.0, approve=True)
    assert (control.state, record(control).phase) == (S.MIGRATING, PlanPhase.APPROVED)
    Operator(control).cancel(P, "me", 0.0)
    assert (control.state, record(control).phase) == (S.READY, PlanPhase.CANCELLED)
    stored = ctl.StoredRecords(plans=(record(control_of(S.MIGRATING)),), epochs={Epoch(0): BASE})
    control = control_of(S.RECOVERING, stored)
    found, actions = Operator(control).cancel(P, "me", 0.0)
    assert (found.phase, control.state) == (PlanPhase.MIGRATING, S.RECOVERING)
    assert found.story[-1]["event"] == "cancel_requested" and not sent(actions)
    answer_queries(control)
    assert record(control).phase is PlanPhase.CANCELLED


def test_a_rollback_leads_to_a_recorded_earlier_epoch():
    operator = Operator(control_of())
    assert refused(Conflict, lambda: operator.rollback_target(Epoch(0)))[0] is Reason.NO_CHANGE
    refused(NotFound, lambda: operator.rollback_target(Epoch(1)))
    refused(NotFound, lambda: operator.rollback_target(None))
    assert operator.rollback_epoch() is None


def test_a_rollback_leads_to_the_newest_earlier_epoch_if_no_plan_led_to_the_current_one():
    """The engine has moved experts since the last plan."""
    control = control_of(S.MIGRATING)
    for index, after in enumerate((AFTER_ONE, AFTER_TWO)):
        vote(control, index)
        ack(control, after, index + 1, index)
    assert Operator(control).rollback_target(None) == (0, BASE)
    control.handle(msg.Tick(), 1.0)
    moved = state_of(0, query=query_of(control), epoch=3, placement=AFTER_ONE)
    control.handle(from_rank(0, moved), 1.0)
    answer_queries(control, 1.0, epoch=3, placement=AFTER_ONE)
    assert (control.state, control.epoch) == (S.READY, 3)
    assert Operator(control).rollback_target(None) == (2, AFTER_TWO)
    assert Operator(control).rollback_epoch() == 2


def test_a_freeze_lasts_for_its_seconds_and_zero_ends_it():
    control = control_of()
    operator = Operator(control)
    for seconds, until in ((1.0, 6.0), (50.0, 55.0), (0.0, 0.0)):
        operator.freeze(seconds, 5.0)
        assert control.frozen_until == until
    operator.freeze(50.0, 5.0)
    asked = refused(Conflict, lambda: operator.submit(plan_of(), 15.0, approve=True))
    assert asked == (
        Reason.FROZEN,
        f"paused for another 40 s; `evenkeel resume -d {DEPLOYMENT}` ends that",
    )
    assert operator.submit(plan_of(), 55.0, approve=True)[0].phase is PlanPhase.APPROVED


def test_a_closed_schedule_says_when_it_opens():
    closed = DeploymentPolicy(schedule=Schedule(windows=("daily 02:00 - 04:00",)))
    operator = Operator(control_of(policy=closed))
    asked = refused(Conflict, lambda: operator.submit(plan_of(), 3600.0, approve=True))
    assert asked == (Reason.OUTSIDE_SCHEDULE, "the schedule opens in 60 min")


def test_a_plan_between_two_waves_is_cancelled_at_once():
    control = control_of(S.MIGRATING)
    control.handle(ctl.RankTroubled(EpRank(1), 11, "its replicas differ"), 0.0)
    vote(control)
    ack(control, AFTER_ONE, 1)
    assert record(control).phase is PlanPhase.MIGRATING
    Operator(control).cancel(P, "me", 0.0)
    assert (record(control).phase, control.state) == (PlanPhase.CANCELLED, S.READY)


def test_a_cancelled_proposal_does_not_stop_the_plan_that_runs():
    control = control_of(S.MIGRATING)
    Operator(control).submit(plan_of(plan_id="q"), 0.0)
    _, actions = Operator(control).cancel(Q, "me", 0.0)
    assert record(control, "q").phase is PlanPhase.CANCELLED
    assert (record(control).phase, sent(actions)) == (PlanPhase.MIGRATING, [])
