"""Plans, waves and cycles as one replica carries them out."""

import dataclasses

import pytest

from evenkeel_moe.errors import Conflict, InfeasiblePlan, NotFound, Reason
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.operator import Operator
from evenkeel_moe.protocol.transitions import ControlState as S
from evenkeel_moe.protocol.transitions import CoordinatorState as C
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    abort_answers,
    ack,
    answer_queries,
    both,
    control_of,
    from_rank,
    hello_of,
    key_of,
    of_kind,
    only,
    plan_of,
    record,
    sent,
    state_of,
    vote,
)

AUTO = DeploymentPolicy(mode=Mode.AUTO, cycle_s=10.0)


# --- plans ------------------------------------------------------------------------------------------


def test_plan_runs_wave_after_wave_and_records_every_epoch():
    """R3: the epoch is one more for each committed wave."""
    control = control_of(S.MIGRATING)
    actions = vote(control)
    assert [type(m) for m in sent(actions)] == [msg.Commit, msg.Commit]
    actions = ack(control, AFTER_ONE, 1)
    assert only(actions, ctl.PersistEpoch).placement == AFTER_ONE
    prepares = [m for m in sent(actions) if isinstance(m, msg.Prepare)]
    assert {(m.wave, m.base_epoch) for m in prepares} == {(key_of(index=1), 1)}
    vote(control, 1)
    ack(control, AFTER_TWO, 2, 1)
    assert (control.state, control.epoch, control.placement) == (S.READY, 2, AFTER_TWO)
    assert (record(control).phase, record(control).waves_committed) == (PlanPhase.COMMITTED, 2)
    assert control.history == {0: BASE, 1: AFTER_ONE, 2: AFTER_TWO}


def test_next_prepare_waits_for_every_ack():
    """R7: the next Prepare needs it from all R."""
    control = control_of(S.MIGRATING)
    vote(control)
    actions = control.handle(from_rank(0, msg.Ack(key_of(), Epoch(1), AFTER_ONE.digest)), 0.0)
    assert control.epoch == 1 and [m for m in sent(actions) if isinstance(m, msg.Prepare)] == []
    actions = control.handle(from_rank(1, msg.Ack(key_of(), Epoch(1), AFTER_ONE.digest)), 0.0)
    assert len([m for m in sent(actions) if isinstance(m, msg.Prepare)]) == 2


def test_every_change_of_a_record_appends_a_row_to_its_story():
    control = control_of(S.MIGRATING)
    vote(control)
    ack(control, AFTER_ONE, 1)
    story = [row["event"] for row in record(control).story]
    assert story == ["created", "wave_started", "wave_committed", "wave_started"]


def test_persists_come_before_sends():
    control = control_of()
    _, actions = Operator(control).submit(plan_of(), 0.0, approve=True)
    kinds = [isinstance(action, ctl.PersistAction) for action in actions]
    assert kinds == sorted(kinds, reverse=True) and any(kinds) and not all(kinds)


def test_prepare_carries_the_checksums_registered_at_load():
    """R4: expected checksums are the ranks' own, not the sender's word."""
    control = control_of(S.RECOVERING)
    answer_queries(control, checksums=tuple(range(100, 108)))
    _, actions = Operator(control).submit(plan_of(), 0.0, approve=True)
    prepare = [m for m in sent(actions) if isinstance(m, msg.Prepare)][0]
    transfer = prepare.body.transfers[0]
    assert prepare.checksums == (100 + transfer.layer * 4 + transfer.logical_expert,)


def test_cancel_before_the_votes_aborts_the_wave():
    """R16."""
    control = control_of(S.MIGRATING)
    _, actions = Operator(control).cancel(PlanId("p"), "me", 0.0)
    assert {type(m) for m in sent(actions)} == {msg.Abort}
    abort_answers(control)
    assert (record(control).phase, control.state) == (PlanPhase.CANCELLED, S.READY)


def test_cancel_after_the_votes_takes_effect_at_the_next_wave():
    """R16."""
    control = control_of(S.MIGRATING)
    vote(control)
    _, actions = Operator(control).cancel(PlanId("p"), "me", 0.0)
    assert sent(actions) == []
    ack(control, AFTER_ONE, 1)
    assert (record(control).phase, record(control).waves_committed) == (PlanPhase.CANCELLED, 1)
    assert control.epoch == 1
    with pytest.raises(Conflict):
        Operator(control).cancel(PlanId("p"), "me", 0.0)


def test_a_cancel_asked_again_is_answered_when_the_store_has_the_first():
    """The caller of the first was told 503; a second that writes nothing would be told that all is well."""
    control = control_of(S.MIGRATING)
    vote(control)
    _, actions = Operator(control).cancel(PlanId("p"), "me", 0.0)
    control.handle(ctl.PersistFailed(tuple(of_kind(actions, ctl.PersistPlan))), 0.0)
    _, again = Operator(control).cancel(PlanId("p"), "me", 0.1)
    assert of_kind(again, ctl.PersistPlan)
    assert Operator(control).cancel(PlanId("p"), "me", 0.2)[1] == []


def test_approve_after_the_epoch_moved_is_a_stale_base():
    """R16: approve after the epoch moved is 409 STALE_BASE."""
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(1, "late"), 0.0)
    operator.submit(plan_of(1), 0.0, approve=True)
    vote(control)
    ack(control, AFTER_ONE, 1)
    for _ in range(2):
        with pytest.raises(Conflict) as caught:
            operator.approve(PlanId("late"), "me", 0.0)
        assert caught.value.reason is Reason.STALE_BASE
        control.handle(msg.Tick(), 0.1)
    assert record(control, "late").phase is PlanPhase.REFUSED


def test_proposal_expires():
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(expires_at=50.0), 0.0)
    with pytest.raises(Conflict) as caught:
        operator.approve(PlanId("p"), "me", 50.0)
    assert caught.value.reason is Reason.EXPIRED
    control.handle(msg.Tick(), 50.0)
    assert record(control).phase is PlanPhase.EXPIRED


def test_same_id_and_body_is_the_same_plan_and_another_body_a_conflict():
    operator = Operator(control_of())
    first, _ = operator.submit(plan_of(), 0.0, request_digest="x")
    again, actions = operator.submit(plan_of(), 0.0, request_digest="x")
    assert (again, actions) == (first, [])
    with pytest.raises(Conflict) as caught:
        operator.submit(plan_of(), 0.0, request_digest="y")
    assert caught.value.reason is Reason.ID_REUSED


def test_one_plan_at_a_time():
    control = control_of(S.MIGRATING)
    operator = Operator(control)
    operator.submit(plan_of(plan_id="q"), 0.0)
    for call in (
        lambda: operator.submit(plan_of(plan_id="r"), 0.0, approve=True),
        lambda: operator.approve(PlanId("q"), "me", 0.0),
    ):
        with pytest.raises(Conflict) as caught:
            call()
        assert caught.value.reason is Reason.PLAN_IN_PROGRESS


def test_unsound_plan_is_refused_before_prepare():
    """R17: a plan that breaks an invariant is refused before Prepare."""
    rows = BASE.phy2log.copy()
    rows[0, :] = 0
    target = dataclasses.replace(BASE, phy2log=rows)
    with pytest.raises(InfeasiblePlan) as caught:
        Operator(control_of()).submit(plan_of(target=target), 0.0)
    assert caught.value.reason is Reason.EXPERT_WITHOUT_REPLICA


def test_wave_too_large_for_a_ranks_staging_ends_the_plan():
    """R17: memory."""
    control = control_of(S.WAITING_FOR_RANKS)
    for rank in (0, 1):
        control.handle(from_rank(rank, hello_of(rank, staging_bytes=5)), 0.0)
    answer_queries(control)
    ended, actions = Operator(control).submit(plan_of(), 0.0, approve=True)
    assert (ended.phase, ended.reason) == (PlanPhase.REFUSED, Reason.STAGING_TOO_SMALL)
    assert sent(actions) == [] and control.state is S.READY


def test_rollback_undoes_the_whole_last_plan():
    """R16: a plan of two waves raised the epoch twice; between them its placement was whole, but nobody asked for it."""
    control = control_of()
    operator = Operator(control)
    operator.submit(plan_of(), 0.0, approve=True)
    vote(control)
    ack(control, AFTER_ONE, 1)
    vote(control, 1)
    ack(control, AFTER_TWO, 2, 1)
    assert operator.rollback_target(None) == (0, BASE)
    assert operator.rollback_target(Epoch(1)) == (1, AFTER_ONE)
    del control.history[Epoch(0)]
    assert operator.rollback_target(None) == (1, AFTER_ONE)


def test_rollback_leads_to_an_earlier_epochs_placement_and_holds_auto():
    """R16."""
    control = control_of(policy=AUTO)
    operator = Operator(control)
    operator.submit(plan_of(1), 0.0, approve=True)
    vote(control)
    ack(control, AFTER_ONE, 1)
    assert operator.rollback_target(None) == (0, BASE)
    with pytest.raises(Conflict):
        operator.rollback_target(Epoch(1))
    with pytest.raises(NotFound):
        operator.rollback_target(Epoch(9))
    back = plan_of(1, "back", 1, base=AFTER_ONE, kind=PlanKind.ROLLBACK)
    _, actions = operator.submit(back, 0.0)
    assert only(actions, ctl.PersistDocument).body["held"] is True
    operator.cancel(PlanId("back"), "me", 0.0)
    actions = control.handle(msg.Tick(), 10.0)
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.HELD_AFTER_ROLLBACK
    assert only(operator.resume(11.0), ctl.PersistDocument).body["held"] is False
    assert operator.resume(11.0) == []
    control.handle(ctl.PersistFailed((control.document(),)), 11.0)
    assert only(operator.resume(11.1), ctl.PersistDocument).body["held"] is False, (
        "asked again after a 503"
    )
    both(control, lambda rank: state_of(rank, epoch=1, placement=AFTER_ONE), 19.9)
    assert only(control.handle(msg.Tick(), 20.0), ctl.RunCycle).epoch == 1


def test_reload_ends_the_plan_and_is_asked_about():
    """R4: a reload ends plans of the old version as WEIGHTS_VERSION_CHANGED."""
    control = control_of(S.MIGRATING)
    control.handle(msg.Tick(), 1.0)
    actions = control.handle(
        from_rank(0, state_of(0, query=control.recovery.query, weights_version=2)), 1.0
    )
    assert {type(m) for m in sent(actions)} == {msg.Abort}
    abort_answers(control, now=1.0)
    assert (record(control).phase, record(control).reason) == (
        PlanPhase.ABORTED,
        Reason.WEIGHTS_VERSION_CHANGED,
    )
    control.handle(msg.Tick(), 2.5)
    control.handle(from_rank(0, state_of(0, query=control.recovery.query, weights_version=2)), 2.5)
    assert control.state is S.RECOVERING
    answer_queries(control, now=2.5, weights_version=2)
    assert control.state is S.READY and control.group.weights_version == 2


# --- stalls and the store -------------------------------------------------------------------------------


def test_plan_without_quorum_stalls_with_the_reason_and_goes_on():
    """R14."""
    control = control_of()
    control.handle(from_rank(1, hello_of(1), stream=40), 3.5)
    waiting, actions = Operator(control).submit(plan_of(), 3.5, approve=True)
    assert waiting.phase is PlanPhase.APPROVED and sent(actions) == []
    control.handle(msg.Tick(), 13.0)
    actions = control.handle(msg.Tick(), 14.0)
    assert only(actions, ctl.WaveHealth).reason is Reason.RANKS_MISSING
    assert (record(control).phase, record(control).reason) == (
        PlanPhase.STALLED,
        Reason.RANKS_MISSING,
    )
    for rank, stream in ((0, 10), (1, 40)):
        control.handle(from_rank(rank, state_of(rank), stream=stream), 14.0)
    actions = control.handle(msg.Tick(), 14.1)
    assert record(control).phase is PlanPhase.MIGRATING
    assert len([m for m in sent(actions) if isinstance(m, msg.Prepare)]) == 2


def test_failed_writes_are_kept_and_no_wave_begins_before_they_are_stored():
    """Store away: take no decision that needs durability."""
    control = control_of()
    operator = Operator(control)
    proposed, actions = operator.submit(plan_of(), 0.0)
    control.handle(ctl.PersistFailed(tuple(of_kind(actions, ctl.PersistPlan))), 0.0)
    control.records.change(proposed, "cancel_requested", 0.0)
    retried = control.handle(msg.Tick(), 0.1)
    again = [a for a in retried if isinstance(a, ctl.PersistPlan)]
    assert [a.record for a in again] == [proposed], "the version that failed"
    control.handle(ctl.PersistFailed(tuple(again)), 0.1)
    retried = control.handle(msg.Tick(), 0.2)
    newest = only([a for a in retried if isinstance(a, ctl.PersistPlan)], ctl.PersistPlan)
    assert newest.record is record(control), "the newest version in place of the one that failed"
    control.handle(ctl.PersistFailed((newest,)), 0.2)
    _, actions = operator.approve(PlanId("p"), "me", 0.2)
    assert [m for m in sent(actions) if isinstance(m, msg.Prepare)] == []


def test_store_away_while_committing_is_what_the_plan_says():
    """The leader asks on, so it hears the steps the fleet takes; Commit waits for its intent."""
    control = control_of(S.MIGRATING)
    unstored = of_kind(vote(control), ctl.PersistAction)
    assert only(unstored, ctl.PersistIntent)
    for t in range(1, 40):
        control.handle(ctl.PersistFailed(tuple(unstored)), float(t))
        actions = control.handle(msg.Tick(), float(t))
        unstored = of_kind(actions, ctl.PersistAction)
        for question in (a for a in of_kind(actions, ctl.SendToRank) if not a.needs_store):
            heard = state_of(question.rank, question.message.query, wave=key_of(), step=20 * t)
            control.handle(from_rank(question.rank, heard), float(t))
    assert control.coordinator.state is C.COMMITTING
    assert (record(control).phase, record(control).reason) == (
        PlanPhase.STALLED,
        Reason.STORE_UNAVAILABLE,
    )
    control.handle(msg.Tick(), 41.0)
    assert record(control).phase is PlanPhase.MIGRATING


def store_away(control, since, until):
    """Ticks in which no write is stored, with ranks that are heard; ends as they would if it came back. What was stored last."""
    t = since
    while t < until:
        t += 0.25
        for rank in (0, 1):
            control.handle(from_rank(rank, msg.StagingProgress(key_of(), 0, 0)), t)
        unstored = of_kind(control.handle(msg.Tick(), t), ctl.PersistAction)
        control.handle(ctl.PersistFailed(tuple(unstored)), t)
    return t


def test_store_away_as_a_wave_begins_is_what_the_plan_says():
    """R14: one batch stores how a wave ended and begins the next. No rank hears of that, so none can be late."""
    control = control_of(S.MIGRATING)
    vote(control)
    unstored = of_kind(ack(control, AFTER_ONE, 1), ctl.PersistAction)
    # The plan was written, what came after it was not: its Prepare is kept back all the same.
    control.handle(ctl.PersistFailed(tuple(unstored[2:])), 0.0)
    now = store_away(control, 0.0, 60.0)
    assert (record(control).phase, record(control).reason) == (
        PlanPhase.STALLED,
        Reason.STORE_UNAVAILABLE,
    )
    actions = control.handle(msg.Tick(), now + 0.25)
    assert [type(m) for m in sent(actions) if not isinstance(m, msg.QueryState)] == [
        msg.Prepare
    ] * 2
    control.handle(msg.Tick(), now + 0.5)
    assert (record(control).phase, record(control).reason) == (
        PlanPhase.MIGRATING,
        Reason.PLAN_STARTED,
    )
    vote(control, 1, now + 1.0)
    ack(control, AFTER_TWO, 2, 1, now + 1.0)
    assert record(control).phase is PlanPhase.COMMITTED


def test_store_away_as_a_plan_is_cancelled_is_what_the_plan_says():
    """The Abort waits for the record that it was asked for; no rank owes an answer to it yet."""
    control = control_of(S.MIGRATING)
    _, actions = Operator(control).cancel(PlanId("p"), "me", 0.0)
    assert [type(m) for m in sent(actions)] == [msg.Abort] * 2
    control.handle(ctl.PersistFailed(tuple(of_kind(actions, ctl.PersistAction))), 0.0)
    now = store_away(control, 0.0, 60.0)
    assert (record(control).phase, record(control).reason) == (
        PlanPhase.STALLED,
        Reason.STORE_UNAVAILABLE,
    )
    control.handle(msg.Tick(), now + 0.25)
    abort_answers(control, now=now + 0.5)
    assert record(control).phase is PlanPhase.CANCELLED


def test_a_plan_that_counts_a_wave_is_stored_before_the_waves_outcome():
    """Also when the plan went on before the store came back: it may be lost again after any write."""
    control = control_of()
    submitted, _ = Operator(control).submit(plan_of(), 0.0)
    counted = control.records.change(submitted, "wave_committed", 0.0, waves_committed=1)
    outcome = ctl.PersistOutcome(submitted.plan.key(0), True, Reason.COMMITTED)
    control.handle(ctl.PersistFailed((counted, outcome)), 0.0)
    control.handle(
        ctl.PersistFailed((control.records.change(counted.record, "resumed", 0.1),)), 0.1
    )
    retried = control.handle(msg.Tick(), 0.2)
    kept = [
        action for action in retried if isinstance(action, ctl.PersistPlan | ctl.PersistOutcome)
    ]
    assert kept == [ctl.PersistPlan(record(control)), outcome]
