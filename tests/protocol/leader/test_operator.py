"""Requests of operators, and the reasons to refuse them."""

import dataclasses

import numpy as np
import pytest

from evenkeel_moe.errors import (
    Conflict,
    InfeasiblePlan,
    NotFound,
    Reason,
    ShapeMismatch,
    Unavailable,
)
from evenkeel_moe.model.hold import Hold, Retirement
from evenkeel_moe.model.ids import Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    DEPLOYMENT,
    SHAPE,
    Operator,
    abort_answers,
    ack,
    answer_queries,
    both,
    carry_out,
    control_of,
    from_rank,
    hello_of,
    of_kind,
    only,
    plan_of,
    progress,
    query_of,
    record,
    refused,
    sent,
    state_of,
    stored_plan,
    vote,
)

AUTO = DeploymentPolicy(mode=Mode.AUTO, cycle_s=10.0)
P, Q = PlanId("p"), PlanId("q")


def test_cancel_before_the_votes_aborts_the_wave():
    """R16."""
    control = control_of(S.MIGRATING)
    _, actions = Operator(control).cancel(P, "me", 0.0)
    assert {type(m) for m in sent(actions)} == {msg.Abort}
    abort_answers(control)
    assert (record(control).phase, control.state) == (PlanPhase.CANCELLED, S.READY)


def test_cancel_after_the_votes_takes_effect_at_the_next_wave():
    """R16."""
    control = control_of(S.MIGRATING)
    vote(control)
    _, actions = Operator(control).cancel(P, "me", 0.0)
    assert sent(actions) == []
    ack(control, AFTER_ONE, 1)
    assert progress(control) == (PlanPhase.CANCELLED, 1)
    assert control.epoch == 1
    assert refused(Conflict, lambda: Operator(control).cancel(P, "me", 0.0))


def test_a_repeated_cancel_writes_what_the_first_could_not():
    """The first request got a 503. If the second wrote nothing, it would report a false success."""
    control = control_of(S.MIGRATING)
    vote(control)
    _, actions = Operator(control).cancel(P, "me", 0.0)
    control.handle(ctl.PersistFailed(tuple(of_kind(actions, ctl.PersistPlan))), 0.0)
    _, again = Operator(control).cancel(P, "me", 0.1)
    assert of_kind(again, ctl.PersistPlan)
    assert Operator(control).cancel(P, "me", 0.2)[1] == []


def test_approve_after_the_epoch_moved_is_a_stale_base():
    """R16: approve after the epoch moved is 409 STALE_BASE."""
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(1, "late"), 0.0)
    operator.submit(plan_of(1), 0.0, approve=True)
    carry_out(control, 1)
    for _ in range(2):
        asked = refused(Conflict, lambda: operator.approve(PlanId("late"), "me", 0.0))
        assert asked[0] is Reason.STALE_BASE
        control.handle(msg.Tick(), 0.1)
    assert record(control, "late").phase is PlanPhase.REFUSED
    reason, words = refused(Conflict, lambda: operator.cancel(PlanId("late"), "me", 0.0))
    assert (reason, words) == (Reason.WRONG_PHASE, "plan late is superseded")


def test_proposal_expires():
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(expires_at=50.0), 0.0)
    assert refused(Conflict, lambda: operator.approve(P, "me", 50.0))[0] is Reason.EXPIRED
    control.handle(msg.Tick(), 50.0)
    assert record(control).phase is PlanPhase.EXPIRED


def test_same_id_and_body_is_the_same_plan_and_another_body_a_conflict():
    operator = Operator(control_of())
    first, _ = operator.submit(plan_of(), 0.0, request_digest="x")
    again, actions = operator.submit(plan_of(), 0.0, request_digest="x")
    assert (again, actions) == (first, [])
    asked = refused(Conflict, lambda: operator.submit(plan_of(), 0.0, request_digest="y"))
    assert asked[0] is Reason.ID_REUSED


LOCKED = DeploymentPolicy(mode=Mode.OBSERVE, observe_lock=True)


def ways_to_begin(operator):
    """Approve the plan `proposed`, or start a plan or a rollback at once."""
    return (
        lambda: operator.approve(PlanId("proposed"), "me", 0.0),
        lambda: operator.submit(plan_of(plan_id="now"), 0.0, approve=True),
        lambda: operator.submit(plan_of(plan_id="back", kind=PlanKind.ROLLBACK), 0.0, approve=True),
    )


def test_locked_observe_lets_nothing_move_weights():
    control = control_of()
    operator = Operator(control)
    operator.set_policy(LOCKED, {}, 0.0)
    operator.submit(plan_of(plan_id="proposed"), 0.0)
    for call in ways_to_begin(operator):
        assert refused(Conflict, call)[0] is Reason.OBSERVE_MODE
    assert (control.state, list(control.records.by_id)) == (S.READY, ["proposed"])
    operator.set_policy(dataclasses.replace(LOCKED, observe_lock=False), {}, 0.0)
    _, actions = operator.approve(PlanId("proposed"), "me", 0.0)
    assert sent(actions)


@pytest.mark.fault(
    "a vLLM whose ranks only observe",
    "the controller began a plan that the ranks refused",
)
def test_no_plan_begins_by_hand_on_ranks_that_only_observe():
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(plan_id="proposed"), 0.0)
    hello = hello_of(1, incarnation=2, capabilities=frozenset())
    control.handle(from_rank(1, hello, incarnation=2, stream=21), 0.0)
    control.handle(from_rank(1, state_of(1), incarnation=2, stream=21), 0.0)
    assert control.state_reason(0.0)[0] is Reason.OBSERVE_ONLY
    for call in ways_to_begin(operator):
        reason, words = refused(Conflict, call)
        assert reason is Reason.OBSERVE_ONLY and "ranks [1] only observe" in words
    assert (control.state, list(control.records.by_id)) == (S.READY, ["proposed"])


SEPARATE = DeploymentPolicy(mode=Mode.PROPOSE, separate_approval=True)


def test_the_maker_of_a_plan_may_not_approve_it():
    control = control_of()
    operator = Operator(control)
    operator.set_policy(SEPARATE, {}, 0.0)
    operator.submit(plan_of(plan_id="mine", kind=PlanKind.MANUAL), 0.0, by="ann")
    operator.submit(plan_of(plan_id="unknown", kind=PlanKind.MANUAL), 0.0)
    for call in (
        lambda: operator.approve(PlanId("mine"), "ann", 0.0),
        lambda: operator.approve(PlanId("unknown"), "ann", 0.0),
        lambda: operator.submit(
            plan_of(plan_id="now", kind=PlanKind.MANUAL), 0.0, approve=True, by="ann"
        ),
    ):
        assert refused(Conflict, call)[0] is Reason.SEPARATE_APPROVAL
    assert list(control.records.by_id) == ["mine", "unknown"]
    approved, actions = operator.approve(PlanId("mine"), "bob", 0.0)
    assert sent(actions) and (approved.made_by, approved.approved_by) == ("ann", "bob")


@pytest.mark.parametrize("kind", [PlanKind.AUTOMATIC, PlanKind.ROLLBACK])
def test_separate_approval_stops_neither_the_planners_plans_nor_a_rollback(kind):
    control = control_of()
    operator = Operator(control)
    operator.set_policy(SEPARATE, {}, 0.0)
    _, actions = operator.submit(plan_of(plan_id="p2", kind=kind), 0.0, approve=True, by="ann")
    assert sent(actions)


def test_a_plan_that_runs_is_cancelled_by_the_lock_of_observe():
    control = control_of(S.MIGRATING)
    actions = Operator(control).set_policy(LOCKED, {}, 0.0)
    assert {type(m) for m in sent(actions)} == {msg.Abort}
    abort_answers(control)
    assert (record(control).phase, control.state) == (PlanPhase.CANCELLED, S.READY)
    control = control_of(S.MIGRATING)
    assert not sent(
        Operator(control).set_policy(dataclasses.replace(LOCKED, mode=Mode.AUTO), {}, 0.0)
    )


def test_one_plan_at_a_time():
    control = control_of(S.MIGRATING)
    operator = Operator(control)
    operator.submit(plan_of(plan_id="q"), 0.0)
    for call in (
        lambda: operator.submit(plan_of(plan_id="r"), 0.0, approve=True),
        lambda: operator.approve(Q, "me", 0.0),
    ):
        advice = f"plan p is migrating: wait for it, or `evenkeel plan cancel p -d {DEPLOYMENT}`"
        assert refused(Conflict, call) == (Reason.PLAN_IN_PROGRESS, advice)


def test_invalid_plan_is_refused_before_prepare():
    """R17: a plan that breaks an invariant is refused before Prepare."""
    rows = BASE.phy2log.copy()
    rows[0, :] = 0
    target = dataclasses.replace(BASE, phy2log=rows)
    asked = refused(
        InfeasiblePlan, lambda: Operator(control_of()).submit(plan_of(target=target), 0.0)
    )
    assert asked[0] is Reason.EXPERT_WITHOUT_REPLICA


def test_rollback_undoes_the_whole_last_plan():
    """R16: a plan of two waves raised the epoch twice; nobody asked for the state between them."""
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(), 0.0, approve=True)
    carry_out(control)
    assert control.rollback_target(None) == (0, BASE)
    assert control.rollback_target(Epoch(1)) == (1, AFTER_ONE)
    del control.history[Epoch(0)]
    assert control.rollback_target(None) == (1, AFTER_ONE)


def test_rollback_leads_to_an_earlier_epochs_placement_and_holds_auto():
    """R16."""
    control = control_of(policy=AUTO)
    operator = Operator(control)
    operator.submit(plan_of(1), 0.0, approve=True)
    carry_out(control, 1)
    assert control.rollback_target(None) == (0, BASE)
    with pytest.raises(Conflict):
        control.rollback_target(Epoch(1))
    with pytest.raises(NotFound):
        control.rollback_target(Epoch(9))
    back = plan_of(1, "back", 1, base=AFTER_ONE, kind=PlanKind.ROLLBACK)
    _, actions = operator.submit(back, 0.0)
    hold, plan = of_kind(actions, ctl.PersistAction)
    assert isinstance(plan, ctl.PersistPlan), "stored last: automatic plans would undo a rollback"
    assert isinstance(hold, ctl.PersistDocument) and hold.body["held"] is True
    operator.cancel(PlanId("back"), "me", 0.0)
    actions = control.handle(msg.Tick(), 10.0)
    cycle = only(actions, ctl.RunCycle)
    assert cycle.closed_by is Reason.HELD_AFTER_ROLLBACK
    control.handle(ctl.CycleDecided(cycle.cycle, Reason.HELD_AFTER_ROLLBACK), 10.5)
    assert only(operator.resume(11.0), ctl.PersistDocument).body["held"] is False
    assert operator.resume(11.0) == []
    control.handle(ctl.PersistFailed((control.document(),)), 11.0)
    assert only(operator.resume(11.1), ctl.PersistDocument).body["held"] is False, (
        "asked again after a 503"
    )
    both(control, lambda rank: state_of(rank, epoch=1, placement=AFTER_ONE), 19.9)
    assert only(control.handle(msg.Tick(), 20.0), ctl.RunCycle).epoch == 1


def test_only_the_leader_takes_requests():
    control = control_of(S.FOLLOWER)
    operator = Operator(control)
    for ask in (
        lambda: operator.submit(plan_of(), 0.0),
        lambda: operator.approve(P, "me", 0.0),
        lambda: operator.cancel(P, "me", 0.0),
        lambda: control.rollback_target(None),
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
    control = control_of(state)
    operator = Operator(control)
    for ask in (
        lambda: operator.submit(plan_of(), 0.0),
        lambda: operator.approve(P, "me", 0.0),
        lambda: control.rollback_target(None),
    ):
        assert refused(Unavailable, ask)[0] is reason


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (plan_of(generation=Generation("g0")), Reason.GENERATION_CHANGED),
        (plan_of(base_epoch=1), Reason.STALE_BASE),
        (plan_of(1, base=AFTER_ONE, target=AFTER_ONE), Reason.STALE_BASE),
        (plan_of(weights_version=0), Reason.WEIGHTS_VERSION_CHANGED),
    ],
)
def test_a_plan_for_another_group_epoch_or_weights_is_refused_and_not_entered(plan, reason):
    control = control_of()
    assert refused(Conflict, lambda: Operator(control).submit(plan, 0.0))[0] is reason
    assert not control.records.by_id


def test_a_repeated_request_writes_what_the_first_could_not():
    control = control_of()
    operator = Operator(control)
    _, actions = operator.submit(plan_of(), 0.0, request_digest="body")
    control.handle(ctl.PersistFailed(tuple(of_kind(actions, ctl.PersistPlan))), 0.0)
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
    control = control_of(S.RECOVERING, stored_plan())
    found, actions = Operator(control).cancel(P, "me", 0.0)
    assert (found.phase, control.state) == (PlanPhase.MIGRATING, S.RECOVERING)
    assert found.story[-1]["event"] == "cancel_requested" and not sent(actions)
    answer_queries(control)
    assert record(control).phase is PlanPhase.CANCELLED


def test_a_rollback_leads_to_a_recorded_earlier_epoch():
    control = control_of()
    assert refused(Conflict, lambda: control.rollback_target(Epoch(0)))[0] is Reason.NO_CHANGE
    refused(NotFound, lambda: control.rollback_target(Epoch(1)))
    refused(NotFound, lambda: control.rollback_target(None))
    assert control.rollback_epoch() is None


def test_a_rollback_leads_to_the_newest_earlier_epoch_if_no_plan_led_to_the_current_one():
    """The engine has moved experts since the last plan."""
    control = control_of(S.MIGRATING)
    carry_out(control)
    assert control.rollback_target(None) == (0, BASE)
    control.handle(msg.Tick(), 1.0)
    moved = state_of(0, query=query_of(control), epoch=3, placement=AFTER_ONE)
    control.handle(from_rank(0, moved), 1.0)
    answer_queries(control, 1.0, epoch=3, placement=AFTER_ONE)
    assert (control.state, control.epoch) == (S.READY, 3)
    assert control.rollback_target(None) == (2, AFTER_TWO)
    assert control.rollback_epoch() == 2


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


def test_a_plan_between_two_waves_is_cancelled_at_once():
    control = control_of(S.MIGRATING)
    control.handle(ctl.RankTroubled(EpRank(1), 11, "its replicas differ"), 0.0)
    carry_out(control, 1)
    assert record(control).phase is PlanPhase.MIGRATING
    Operator(control).cancel(P, "me", 0.0)
    assert (record(control).phase, control.state) == (PlanPhase.CANCELLED, S.READY)


def test_a_cancelled_proposal_does_not_stop_the_plan_that_runs():
    control = control_of(S.MIGRATING)
    Operator(control).submit(plan_of(plan_id="q"), 0.0)
    _, actions = Operator(control).cancel(Q, "me", 0.0)
    assert record(control, "q").phase is PlanPhase.CANCELLED
    assert (record(control).phase, sent(actions)) == (PlanPhase.MIGRATING, [])


# --- Ranks leave a group: their evacuation, what waits meanwhile, and how it ends -----------------


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
    reason, words = refused(Conflict, lambda: operator.submit(plan_of(), 10.0, approve=True))
    assert reason is Reason.RESIZING and words.startswith("ranks [1] retire; `evenkeel resume")
    control.require_free(PlanKind.ROLLBACK, 10.0)
    control.require_free(PlanKind.EVACUATION, 10.0)


def test_a_proposal_that_was_made_before_waits():
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(), 0.0)
    operator.retire(RANK_1, 0.0)
    with pytest.raises(Conflict, match="retire"):
        operator.approve(P, "me", 1.0)


def test_other_ranks_cannot_retire_at_the_same_time_and_the_same_may_be_asked_again():
    control = control_of()
    operator = Operator(control)
    operator.retire(RANK_1, 0.0)
    other = Retirement((EpRank(0),), 2)
    reason, words = refused(Conflict, lambda: operator.retire(other, 0.0))
    assert reason is Reason.RESIZING and "retire already" in words
    operator.retire(RANK_1, 1.0, evacuation())
    assert active_of(control).plan.plan_id == "evacuate"


def test_an_evacuation_that_cannot_start_retires_nobody():
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(), 0.0, approve=True)
    with pytest.raises(Conflict, match="plan p is"):
        operator.retire(RANK_1, 0.0, evacuation())
    assert control.hold == Hold()
    operator.cancel(P, "me", 0.0)
    none_left = Placement(np.array([[0, 1, 3, 3, 1, 0]] * 2, np.int32), 2, 4)
    with pytest.raises(InfeasiblePlan):
        operator.retire(RANK_1, 0.0, evacuation(target=none_left))
    assert control.hold == Hold()


def test_ranks_without_an_evacuation_retire_only_where_one_could_start():
    control = control_of(policy=DeploymentPolicy(mode=Mode.OBSERVE, observe_lock=True))
    reason, _ = refused(Conflict, lambda: Operator(control).retire(RANK_1, 0.0))
    assert (reason, control.hold) == (Reason.OBSERVE_MODE, Hold())
    control = control_of(S.MIGRATING)
    reason, _ = refused(Conflict, lambda: Operator(control).retire(RANK_1, 0.0))
    assert (reason, control.hold) == (Reason.PLAN_IN_PROGRESS, Hold())


def test_ranks_retire_without_an_evacuation_only_from_the_placement_that_was_looked_at():
    """A plan may have left an expert on them alone since."""
    control = control_of()
    asked = refused(Conflict, lambda: Operator(control).retire(RANK_1, 0.0, base=AFTER_ONE))
    assert (asked[0], control.hold) == (Reason.STALE_BASE, Hold())


def test_ranks_of_a_group_that_came_back_with_another_number_do_not_retire():
    """Their retirement would end only when the group has yet another number of ranks."""
    control = control_of()
    come_back(control, 3, 1)
    reason, words = refused(Conflict, lambda: Operator(control).retire(RANK_1, 6.0))
    assert (reason, words) == (Reason.STALE_BASE, "the group has 3 ranks, not 2")
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
