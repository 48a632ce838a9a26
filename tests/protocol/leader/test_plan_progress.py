"""The progress of a plan at its edges: it waits, its wave is found, or its weights are gone."""

import dataclasses
from typing import Any

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch, EpRank, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanPhase, Transfer, Wave
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    AFTER_ONE,
    BASE,
    SHAPE,
    Operator,
    ack,
    answer_queries,
    both,
    control_of,
    from_rank,
    hello_of,
    key_of,
    of_kind,
    plan_of,
    record,
    sent,
    state_of,
    vote,
)

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
    active = control.active_plan
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
    assert (record(control).phase, record(control).reason) == (
        PlanPhase.STALLED,
        Reason.OBSERVE_ONLY,
    )
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
    assert control.as_leader.executor.staged == {0: (1, 10)}
    vote(control)
    ack(control, AFTER_ONE, 1)
    assert control.as_leader.executor.staged == {}


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
            assert len([m for m in sent(actions) if isinstance(m, msg.Prepare)]) == 2
        else:
            assert (record(control).reason, sent(actions)) == (reason, [])


def found(stored_changes, wave=None, **changes):
    """A new leader that finds wave 0 of its stored plan armed on both ranks."""
    stored = dataclasses.replace(record(control_of(S.MIGRATING)), **stored_changes)
    control = control_of(S.RECOVERING, ctl.StoredRecords(plans=(stored,), epochs={Epoch(0): BASE}))
    held = ARMED if wave is None else {**ARMED, "wave": wave}
    for query in (1, 2):
        both(control, lambda rank, query=query: state_of(rank, query=query, **held, **changes))
    return control, stored


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
    both(control, lambda rank: msg.Ack(key_of(index=index), Epoch(index + 1), AFTER_ONE.digest))
    assert control.coordinator is not None and control.coordinator.done
    assert record(control) == plan


def test_a_plan_whose_found_wave_was_aborted_ends():
    """The ranks have given the wave up for good: they would refuse it again."""
    stored = ctl.StoredRecords(plans=(record(control_of(S.MIGRATING)),), epochs={Epoch(0): BASE})
    control = control_of(S.RECOVERING, stored)
    both(control, lambda rank: state_of(rank, query=1, **(ARMED if rank else {})))
    both(control, lambda rank: state_of(rank, query=2, **(ARMED if rank else {})))
    gone = msg.AbortAnswer(key_of(), Epoch(0), msg.WaveOutcome.DROPPED, True)
    both(control, lambda rank: gone)
    actions = answer_queries(control)
    assert (record(control).phase, record(control).reason) == (
        PlanPhase.ABORTED,
        Reason.WAVE_DROPPED,
    )
    assert control.state is S.READY and not [m for m in sent(actions) if isinstance(m, msg.Prepare)]


def test_a_plan_whose_weights_changed_ends_after_a_wave_that_still_committed():
    """R4: Commit was sent before the reload was known."""
    control = control_of(S.MIGRATING)
    vote(control)
    control.handle(from_rank(0, state_of(0, weights_version=2)), 0.0)
    actions = ack(control, AFTER_ONE, 1)
    assert not [m for m in sent(actions) if isinstance(m, msg.Prepare)]
    assert (record(control).phase, record(control).reason, record(control).waves_committed) == (
        PlanPhase.ABORTED,
        Reason.WEIGHTS_VERSION_CHANGED,
        1,
    )
    assert not of_kind(actions, ctl.Alert)
