"""The plan executor, driven through the whole machine of one deployment."""

import dataclasses
from typing import Any

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanPhase, Transfer, Wave
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.wave_durations import MOST_RANKS, WaveDurations
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.protocol.transitions import ControlState as S
from evenkeel_moe.protocol.transitions import CoordinatorState as C
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    CONTROL_TIMING,
    SHAPE,
    Operator,
    abort_answers,
    ack,
    answer_queries,
    both,
    carry_out,
    control_of,
    find_armed,
    from_rank,
    hello_of,
    key_of,
    of_kind,
    only,
    phase_and_reason,
    plan_of,
    prepares,
    progress,
    query_of,
    record,
    restarts,
    sent,
    state_of,
    stored_plan,
    vote,
    wave_state,
)

AUTO = DeploymentPolicy(mode=Mode.AUTO, cycle_s=10.0)


# --- waves ----------------------------------------------------------------------------------------


def test_plan_runs_wave_after_wave_and_records_every_epoch():
    """R3: the epoch is one more for each committed wave."""
    control = control_of(S.MIGRATING)
    actions = vote(control)
    assert [type(m) for m in sent(actions)] == [msg.Commit, msg.Commit]
    actions = ack(control, AFTER_ONE, 1)
    assert only(actions, ctl.PersistEpoch).placement == AFTER_ONE
    assert {(m.wave, m.base_epoch) for m in prepares(actions)} == {(key_of(index=1), 1)}
    vote(control, 1)
    ack(control, AFTER_TWO, 2, 1)
    assert (control.state, control.epoch, control.placement) == (S.READY, 2, AFTER_TWO)
    assert progress(control) == (PlanPhase.COMMITTED, 2)
    assert control.history == {0: BASE, 1: AFTER_ONE, 2: AFTER_TWO}


def test_next_prepare_waits_for_every_ack():
    """R7: the next Prepare needs it from all R."""
    control = control_of(S.MIGRATING)
    vote(control)
    actions = control.handle(from_rank(0, msg.Ack(key_of(), Epoch(1), AFTER_ONE.digest)), 0.0)
    assert control.epoch == 1 and prepares(actions) == []
    actions = control.handle(from_rank(1, msg.Ack(key_of(), Epoch(1), AFTER_ONE.digest)), 0.0)
    assert len(prepares(actions)) == 2


def test_the_story_keeps_what_each_rank_took_for_a_wave():
    control = control_of(S.MIGRATING)
    row = record(control).story[1]
    assert row["event"] == "wave_started" and "ranks" not in row
    for rank, at in ((0, 1.0), (1, 2.5)):
        control.handle(from_rank(rank, msg.Vote(key_of(), True)), at)
    for rank, at, stall in ((1, 3.0, 0.02), (0, 4.0, 0.0), (0, 9.0, 0.5)):
        answer = msg.Ack(key_of(), Epoch(1), AFTER_ONE.digest, stall)
        control.handle(from_rank(rank, answer), at)
    told = record(control).story[1]
    assert told["num_ranks"] == 2
    assert told["ranks"] == [
        {"rank": 0, "voted_s": 1.0, "swapped_s": 4.0, "stall_s": None},
        {"rank": 1, "voted_s": 2.5, "swapped_s": 3.0, "stall_s": 0.02},
    ]
    assert {name: told[name] for name in row} == row
    vote(control, 1)
    actions = ack(control, AFTER_TWO, 2, 1)
    stored = of_kind(actions, ctl.PersistPlan)[-1].record
    waves = [row for row in stored.story if row["event"] == "wave_started"]
    assert [len(row["ranks"]) for row in waves] == [2, 2]


def test_the_story_sums_what_moved_experts_answer_once_every_rank_has_told_it():
    control = control_of(S.MIGRATING)
    carry_out(control, 1)
    first, second = msg.MovedAnswers(key_of(), 5, 3, 1, 2), msg.MovedAnswers(key_of(), 1, 1, 0, 0)
    of_no_plan = msg.MovedAnswers(key_of("other"), 1, 1, 0, 0)
    for rank, told in ((0, first), (0, first), (0, of_no_plan), (1, of_no_plan)):
        assert control.handle(from_rank(rank, told), 5.0) == []
    change = only(control.handle(from_rank(1, second), 6.0), ctl.PersistPlan)
    row = change.record.story[-1]
    assert (row["event"], row["wave"]) == ("answered", 0)
    assert (row["moved"], row["same"], row["different"], row["blind"]) == (6, 4, 1, 2)
    # Ranks tell it again on each new stream.
    for rank, told in ((0, first), (1, second)):
        assert control.handle(from_rank(rank, told), 7.0) == []
    assert record(control).story[-1] == row


def test_the_story_of_an_aborted_wave_says_which_rank_did_not_vote():
    control = control_of(S.MIGRATING)
    control.handle(from_rank(0, msg.Vote(key_of(), True)), 1.0)
    Operator(control).cancel(PlanId("p"), "me", 2.0)
    abort_answers(control)
    assert record(control).phase is PlanPhase.CANCELLED
    assert [row["voted_s"] for row in record(control).story[1]["ranks"]] == [1.0, None]


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
    prepare = prepares(actions)[0]
    transfer = prepare.body.transfers[0]
    assert prepare.checksums == (100 + transfer.layer * 4 + transfer.logical_expert,)
    assert only(actions, ctl.WaveBegins).prepare is prepare


def test_a_wave_begins_once_however_often_its_prepare_is_sent():
    control = control_of(S.MIGRATING)
    again = control.handle(msg.Tick(), 1.0)
    assert prepares(again)
    assert of_kind(again, ctl.WaveBegins) == []


def test_wave_too_large_for_a_ranks_staging_ends_the_plan():
    """R17: memory."""
    control = control_of(S.WAITING_FOR_RANKS)
    for rank in (0, 1):
        control.handle(from_rank(rank, hello_of(rank, staging_bytes=5)), 0.0)
    answer_queries(control)
    ended, actions = Operator(control).submit(plan_of(), 0.0, approve=True)
    assert (ended.phase, ended.reason) == (PlanPhase.REFUSED, Reason.STAGING_TOO_SMALL)
    assert sent(actions) == [] and control.state is S.READY


def test_reload_ends_the_plan_and_all_ranks_are_asked():
    """R4: a reload ends plans of the old version as WEIGHTS_VERSION_CHANGED."""
    control = control_of(S.MIGRATING)
    control.handle(msg.Tick(), 1.0)
    actions = control.handle(
        from_rank(0, state_of(0, query=query_of(control), weights_version=2)), 1.0
    )
    assert {type(m) for m in sent(actions)} == {msg.Abort}
    abort_answers(control, now=1.0)
    assert phase_and_reason(control) == (PlanPhase.ABORTED, Reason.WEIGHTS_VERSION_CHANGED)
    control.handle(msg.Tick(), 2.5)
    control.handle(from_rank(0, state_of(0, query=query_of(control), weights_version=2)), 2.5)
    assert (control.state, record(control).phase) == (S.RECOVERING, PlanPhase.ABORTED)
    answer_queries(control, now=2.5, weights_version=2)
    assert control.state is S.READY
    assert control.group is not None and control.group.weights_version == 2


# --- stalls and the store -------------------------------------------------------------------------


def test_plan_without_quorum_stalls_with_the_reason_and_goes_on():
    """R14."""
    control = control_of()
    control.handle(from_rank(1, hello_of(1), stream=40), 3.5)
    waiting, actions = Operator(control).submit(plan_of(), 3.5, approve=True)
    assert waiting.phase is PlanPhase.APPROVED and sent(actions) == []
    control.handle(msg.Tick(), 13.0)
    actions = control.handle(msg.Tick(), 14.0)
    assert only(actions, ctl.WaveHealth).reason is Reason.RANKS_MISSING
    assert phase_and_reason(control) == (PlanPhase.STALLED, Reason.RANKS_MISSING)
    for rank, stream in ((0, 10), (1, 40)):
        control.handle(from_rank(rank, state_of(rank), stream=stream), 14.0)
    actions = control.handle(msg.Tick(), 14.1)
    assert record(control).phase is PlanPhase.MIGRATING
    assert len(prepares(actions)) == 2


def test_ranks_that_come_and_go_do_not_fill_the_story_of_a_plan_that_waits():
    """R14: each set of missing ranks would be a further write of the whole record."""
    control = control_of()
    control.handle(from_rank(1, hello_of(1), stream=40), 3.5)
    Operator(control).submit(plan_of(), 3.5, approve=True)
    for now in (14.0, 15.0, 16.0):
        control.handle(ctl.RankHeard(EpRank(1), 1, 40), now)
        control.handle(msg.Tick(), now)
    control.handle(msg.Tick(), 30.0)
    control.handle(ctl.RankHeard(EpRank(1), 1, 40), 31.0)
    control.handle(msg.Tick(), 31.0)
    details = [row["detail"] for row in record(control).story if row["event"] == "stalled"]
    assert details == [f"ranks [0] not heard for {CONTROL_TIMING.rank_lease_s:g} s"]


def test_plan_that_ends_while_it_waits_to_begin_is_refused_and_not_aborted():
    """However long it has waited: no wave of it was ever sent out."""
    control = control_of()
    control.handle(from_rank(1, hello_of(1), stream=40), 3.5)
    Operator(control).submit(plan_of(), 3.5, approve=True)
    for now in (13.0, 14.0):
        control.handle(msg.Tick(), now)
    assert record(control).phase is PlanPhase.STALLED and not record(control).has_begun
    restarts(control, now=15.0)
    assert phase_and_reason(control) == (PlanPhase.REFUSED, Reason.GENERATION_CHANGED)
    assert record(control).phase_text == "superseded"


def test_plan_whose_stalled_wave_ends_aborted_ends_without_being_resumed():
    """R14: only the log says that the wave is no longer stalled; its plan has ended."""
    control = control_of(S.MIGRATING)
    control.handle(from_rank(0, msg.Vote(key_of(), False, Reason.TRANSFER_TIMEOUT)), 0.0)
    control.handle(ctl.RankHeard(EpRank(0), 1, 10), 3.5)
    stalled = only(control.handle(msg.Tick(), 3.5), ctl.WaveHealth)
    assert (stalled.reason, record(control).phase) == (Reason.RANK_LOST, PlanPhase.STALLED)
    actions = abort_answers(control, now=4.0)
    assert only(actions, ctl.WaveHealth) == ctl.WaveHealth(key_of(), False, None)
    ended = record(control)
    assert (ended.phase, ended.reason) == (PlanPhase.ABORTED, Reason.TRANSFER_TIMEOUT)
    assert [row["event"] for row in ended.story][-2:] == ["stalled", "ended"]


def test_failed_writes_are_kept_and_no_wave_begins_before_they_are_stored():
    """Store away: take no decision that needs durability."""
    control = control_of()
    operator = Operator(control)
    proposed, actions = operator.submit(plan_of(), 0.0)
    control.handle(ctl.PersistFailed(tuple(of_kind(actions, ctl.PersistPlan))), 0.0)
    control.records.change(proposed, "cancel_requested", 0.0, cancel_requested=True)
    retried = control.handle(msg.Tick(), 0.1)
    again = of_kind(retried, ctl.PersistPlan)
    assert [a.record for a in again] == [proposed], "the version that failed"
    control.handle(ctl.PersistFailed(tuple(again)), 0.1)
    retried = control.handle(msg.Tick(), 0.2)
    newest = only(retried, ctl.PersistPlan)
    assert newest.record is record(control), "the newest version in place of the one that failed"
    control.handle(ctl.PersistFailed((newest,)), 0.2)
    _, actions = operator.approve(PlanId("p"), "me", 0.2)
    assert prepares(actions) == []


def test_plan_names_the_store_if_commit_waits_for_it():
    """The leader still asks, so it learns of the group's steps; Commit waits for its record."""
    control = control_of(S.MIGRATING)
    unstored = of_kind(vote(control), ctl.PersistAction)
    assert only(unstored, ctl.PersistPlan).record.wave_agreed
    for t in range(1, 40):
        control.handle(ctl.PersistFailed(tuple(unstored)), float(t))
        actions = control.handle(msg.Tick(), float(t))
        unstored = of_kind(actions, ctl.PersistAction)
        for question in (a for a in of_kind(actions, ctl.SendToRank) if not a.needs_store):
            heard = state_of(question.rank, question.message.query, wave=key_of(), step=20 * t)
            control.handle(from_rank(question.rank, heard), float(t))
    assert wave_state(control) is C.COMMITTING
    assert phase_and_reason(control) == (PlanPhase.STALLED, Reason.STORE_UNAVAILABLE)
    control.handle(msg.Tick(), 41.0)
    assert record(control).phase is PlanPhase.MIGRATING


def store_away(control, since, until):
    """Tick while no write is stored and all ranks are heard; return the time of the last tick."""
    t = since
    while t < until:
        t += 0.25
        for rank in (0, 1):
            control.handle(from_rank(rank, msg.StagingProgress(key_of(), 0, 0)), t)
        unstored = of_kind(control.handle(msg.Tick(), t), ctl.PersistAction)
        control.handle(ctl.PersistFailed(tuple(unstored)), t)
    return t


def test_plan_names_the_store_if_its_next_wave_waits_for_it():
    """R14: one batch stores the end of a wave and begins the next; no rank was asked yet."""
    control = control_of(S.MIGRATING)
    vote(control)
    unstored = of_kind(ack(control, AFTER_ONE, 1), ctl.PersistAction)
    # The epoch was written and the plan was not: its Prepare is held back.
    control.handle(ctl.PersistFailed(tuple(unstored[1:])), 0.0)
    now = store_away(control, 0.0, 60.0)
    assert phase_and_reason(control) == (PlanPhase.STALLED, Reason.STORE_UNAVAILABLE)
    actions = control.handle(msg.Tick(), now + 0.25)
    assert [type(m) for m in sent(actions) if not isinstance(m, msg.QueryState)] == [
        msg.Prepare
    ] * 2
    control.handle(msg.Tick(), now + 0.5)
    assert phase_and_reason(control) == (PlanPhase.MIGRATING, Reason.PLAN_STARTED)
    vote(control, 1, now + 1.0)
    ack(control, AFTER_TWO, 2, 1, now + 1.0)
    assert record(control).phase is PlanPhase.COMMITTED


def test_plan_names_the_store_if_its_cancellation_waits_for_it():
    """The Abort waits for the record that it was asked for; no rank owes an answer to it yet."""
    control = control_of(S.MIGRATING)
    _, actions = Operator(control).cancel(PlanId("p"), "me", 0.0)
    assert [type(m) for m in sent(actions)] == [msg.Abort] * 2
    control.handle(ctl.PersistFailed(tuple(of_kind(actions, ctl.PersistAction))), 0.0)
    now = store_away(control, 0.0, 60.0)
    assert phase_and_reason(control) == (PlanPhase.STALLED, Reason.STORE_UNAVAILABLE)
    control.handle(msg.Tick(), now + 0.25)
    abort_answers(control, now=now + 0.5)
    assert record(control).phase is PlanPhase.CANCELLED


TROUBLED = ctl.RankTroubled(EpRank(1), 11, "its replicas differ")
WELL = ctl.RankTroubled(EpRank(1), 11, "")
ARMED: dict[str, Any] = {"state": msg.ParticipantState.ARMED, "wave": key_of()}


def hear_all(control, now):
    for rank in (0, 1):
        control.handle(ctl.RankHeard(EpRank(rank), 1, 10 + rank), now)


def waits_until(control, now):
    """Tick at a time; return the plan's phase."""
    hear_all(control, now)
    control.handle(msg.Tick(), now)
    active = control.records.active
    assert active is not None
    return active.phase


def test_the_time_to_stall_begins_again_with_each_wait():
    control = control_of()
    control.handle(TROUBLED, 0.0)
    Operator(control).submit(plan_of(), 0.0, approve=True)
    assert waits_until(control, 9.0) is PlanPhase.APPROVED
    control.handle(WELL, 9.0)
    assert waits_until(control, 9.1) is PlanPhase.MIGRATING
    control.handle(TROUBLED, 9.2)
    vote(control, now=9.2)
    ack(control, AFTER_ONE, 1, now=9.3)
    assert waits_until(control, 19.2) is PlanPhase.MIGRATING
    control.handle(ctl.RankHeard(EpRank(0), 1, 10), 19.3)
    control.handle(ctl.RankHeard(EpRank(1), 1, 11), 19.3)
    (health,) = of_kind(control.handle(msg.Tick(), 19.3), ctl.WaveHealth)
    assert (health.wave, health.stalled) == (key_of(index=1), True)
    assert phase_and_reason(control) == (PlanPhase.STALLED, Reason.OBSERVE_ONLY)
    control.handle(ctl.RankStopped(EpRank(1), 11), 19.4)
    (health,) = of_kind(control.handle(msg.Tick(), 19.5), ctl.WaveHealth)
    assert health.reason is record(control).reason is Reason.RANKS_MISSING


def test_the_time_to_stall_is_each_plans_own():
    control = control_of()
    control.handle(TROUBLED, 0.0)
    Operator(control).submit(plan_of(), 0.0, approve=True)
    assert waits_until(control, 9.0) is PlanPhase.APPROVED
    Operator(control).cancel(PlanId("p"), "me", 9.0)
    Operator(control).submit(plan_of(plan_id="q"), 9.0, approve=True)
    assert waits_until(control, 18.9) is PlanPhase.APPROVED
    assert waits_until(control, 19.0) is PlanPhase.STALLED


def test_staged_bytes_are_those_of_the_running_wave():
    control = control_of()
    control.handle(TROUBLED, 0.0)
    Operator(control).submit(plan_of(), 0.0, approve=True)
    early = from_rank(0, msg.StagingProgress(key_of(), 1, 10))
    assert control.handle(early, 0.0) == [], "no wave has begun"
    control.handle(WELL, 0.0)
    control.handle(msg.Tick(), 0.1)
    control.handle(early, 0.1)
    control.handle(from_rank(0, msg.StagingProgress(key_of("other"), 2, 10)), 0.1)
    assert control.as_leader.executor.staged == {0: (1, 10)}
    carry_out(control, 1)
    assert control.as_leader.executor.staged == {}
    control.handle(from_rank(0, msg.StagingProgress(key_of(index=1), 3, 10)), 0.2)
    vote(control, 1)
    control.handle(TROUBLED, 0.2)
    ack(control, AFTER_TWO, 2, 1)
    assert control.as_leader.executor.staged == {}, "the plan has ended"


def test_what_a_group_staged_that_restarted_is_not_staged_any_more():
    control = control_of(S.MIGRATING)
    control.handle(from_rank(0, msg.StagingProgress(key_of(), 1, 10)), 0.1)
    assert control.staged == {0: (1, 10)}
    restarts(control)
    assert control.staged == {}


def test_nothing_is_staged_between_two_waves():
    control = control_of()
    Operator(control).submit(plan_of(), 0.0, approve=True)
    vote(control)
    control.handle(TROUBLED, 0.2)
    ack(control, AFTER_ONE, 1)
    assert control.state is ControlState.MIGRATING
    control.handle(from_rank(0, msg.StagingProgress(key_of(), 9, 10)), 0.3)
    assert control.as_leader.executor.staged == {}, "it comes late"


def test_a_wave_on_a_stale_base_or_without_free_buffers_is_not_sent():
    """R16, R11."""
    free = BASE.phy2log.copy()
    free[:, 2] = free[:, 5] = -1
    base = Placement(free, 2, 4)
    rows = free[[0]].copy()
    rows[0, 3], rows[0, 5] = -1, 2
    wave = Wave(0, (0,), rows, ((Transfer(0, 2, 3, 5, 10),),))
    target = base.with_rows((0,), rows)
    plan = dataclasses.replace(plan_of(1), base=base, target=target, waves=(wave,))
    for buffers, group_epoch, reason in (
        (5, 0, None),
        (4, 0, Reason.POOL_EXCEEDED),
        (5, 1, Reason.STALE_BASE),
    ):
        control = control_of(S.WAITING_FOR_RANKS)
        pooled = dataclasses.replace(SHAPE, pool_slots_per_rank=buffers)
        for rank in (0, 1):
            control.handle(from_rank(rank, hello_of(rank, shape=pooled)), 0.0)
        answer_queries(control, placement=base, epoch=group_epoch)
        executor = control.as_leader.executor
        assert executor is not None
        control.records.add(plan, PlanPhase.APPROVED, Reason.MANUAL_REQUEST, 0.0)
        actions = executor.begin_wave(record(control), 0.0, may_persist=True)
        if reason is None:
            assert len(prepares(actions)) == 2
        else:
            assert (record(control).reason, sent(actions)) == (reason, [])


def found(stored_changes, wave):
    """A new leader that finds wave 0 of its stored plan armed on both ranks."""
    stored = stored_plan(**stored_changes)
    control = control_of(S.RECOVERING, stored)
    find_armed(control, wave)
    return control, stored.plans[0]


@pytest.mark.parametrize(
    ("stored", "index"),
    [
        ({"phase": PlanPhase.ABORTED, "reason": Reason.RANK_LOST}, 0),
        ({"waves_committed": 1}, 0),
        ({}, 2),
    ],
    ids=["the plan has ended", "counted before", "no wave of the plan"],
)
def test_a_found_wave_is_counted_only_for_a_plan_that_waits_for_it(stored, index):
    control, plan = found(stored, key_of(index=index))
    ack = msg.Ack(key_of(index=index), Epoch(index + 1), AFTER_ONE.digest)
    actions = both(control, lambda rank: ack)
    assert control.coordinator is not None and control.coordinator.done
    assert record(control) == plan and not only(actions, ctl.WaveEnded).newly_counted


@pytest.mark.parametrize("stored", [{}, {"phase": PlanPhase.APPROVED, "wave_sent": False}])
def test_a_plan_whose_found_wave_was_aborted_ends(stored):
    """The ranks have given the wave up for good: they would refuse it again.

    Also if the store has lost the record that the wave was sent out.
    """
    control = control_of(S.RECOVERING, stored_plan(**stored))
    both(control, lambda rank: state_of(rank, query=1, **(ARMED if rank else {})))
    both(control, lambda rank: state_of(rank, query=2, **(ARMED if rank else {})))
    gone = msg.AbortAnswer(key_of(), Epoch(0), msg.WaveOutcome.DROPPED, True)
    both(control, lambda rank: gone)
    actions = answer_queries(control)
    assert phase_and_reason(control) == (PlanPhase.ABORTED, Reason.WAVE_DROPPED)
    assert control.state is S.READY and not prepares(actions)


def test_a_plan_whose_weights_changed_ends_after_a_wave_that_still_committed():
    """R4: Commit was sent before the reload was known."""
    control = control_of(S.MIGRATING)
    vote(control)
    control.handle(from_rank(0, state_of(0, weights_version=2)), 0.0)
    actions = ack(control, AFTER_ONE, 1)
    assert not prepares(actions)
    assert progress(control) == (PlanPhase.ABORTED, 1)
    assert record(control).reason is Reason.WEIGHTS_VERSION_CHANGED
    assert not of_kind(actions, ctl.Alert)


def voted(rank):
    return from_rank(rank, msg.Vote(key_of(), True))


def swapped(rank, stall_s=0.0):
    return from_rank(rank, msg.Ack(key_of(), Epoch(1), AFTER_ONE.digest, stall_s))


def durations_of(count, began):
    return WaveDurations([EpRank(rank) for rank in range(count)], began)


def test_the_first_message_of_a_kind_is_measured_from_the_start_of_the_wave():
    durations = durations_of(1, 10.0)
    for at in (11.1234567, 19.0):
        durations.note(voted(0), at)
    durations.note(swapped(0, 0.25), 12.5)
    durations.note(swapped(0, 7.0), 20.0)
    row = {"rank": 0, "voted_s": 1.123457, "swapped_s": 2.5, "stall_s": 0.25}
    assert durations.row() == {"num_ranks": 1, "ranks": [row]}


def kept(durations):
    return [row["rank"] for row in durations.row()["ranks"]]


def test_the_slowest_ranks_of_a_large_group_are_kept_in_their_order():
    durations = durations_of(MOST_RANKS + 8, 0.0)
    assert kept(durations) == list(range(MOST_RANKS)), "nobody voted"
    for rank in range(1, MOST_RANKS + 8):
        durations.note(voted(rank), float(rank))
    assert durations.row()["num_ranks"] == MOST_RANKS + 8
    assert kept(durations) == [0, *range(9, MOST_RANKS + 8)], "rank 0 did not vote"
    durations.note(voted(0), 0.0)
    assert kept(durations) == list(range(8, MOST_RANKS + 8)), "rank 0 voted at once"


def test_of_ranks_that_voted_together_those_that_swapped_last_are_kept():
    durations = durations_of(MOST_RANKS + 3, 0.0)
    for rank in range(MOST_RANKS + 3):
        durations.note(voted(rank), 1.0)
        if rank:
            durations.note(swapped(rank), 9.0 - 0.1 * rank)
    assert kept(durations) == list(range(MOST_RANKS)), "rank 0 did not swap"
