"""The machine of a deployment whose two ranks answer its questions."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.plan import PlanKind, PlanLimits, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.query_round import GroupState
from evenkeel_moe.protocol.transitions import ControlState as S
from evenkeel_moe.protocol.transitions import CoordinatorState as C
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    Operator,
    abort_answers,
    ack,
    after_wave,
    answer_queries,
    both,
    control_of,
    find_armed,
    from_rank,
    hello_of,
    key_of,
    of_kind,
    only,
    phase_and_reason,
    plan_of,
    planning_loop_of,
    queries,
    query_of,
    record,
    restarts,
    state_in,
    state_of,
    stored_plan,
    vote,
    wave_state,
)

AUTO = DeploymentPolicy(mode=Mode.AUTO, cycle_s=30.0)
LARGER = ModelShape(2, 4, 4, 3, 1, 10)
NO_CHECKSUMS: dict[str, Any] = {"weights_version": 2, "checksums": ()}


def larger(control):
    """Rank 3 of a larger group says hello, under a certificate that names it."""
    hello = hello_of(3, "g9", shape=LARGER)
    control.handle(ctl.FromRank(EpRank(3), 1, 9, hello, certified=True), 0.0)


def decided(control, plan, now):
    """Let the planner answer the cycle that begins with a plan."""
    both(control, state_of, now)
    cycle = only(control.handle(msg.Tick(), now), ctl.RunCycle)
    return ctl.CycleDecided(cycle.cycle, Reason.BALANCE_BELOW_THRESHOLD, plan)


def automatic(plan_id="a", **changes):
    return replace(plan_of(2, plan_id), kind=PlanKind.AUTOMATIC, **changes)


# --- ranks of another group -----------------------------------------------------------------------


def test_a_rank_of_a_larger_group_does_not_count_in_the_registered_one():
    control = control_of()
    larger(control)
    membership = control.membership
    assert membership.quorum(0.0).detail == "all 2 ranks"
    assert membership.staging_bytes() == (100, 100)
    record, _ = Operator(control).submit(plan_of(), 0.0, approve=True)
    assert record.phase is PlanPhase.MIGRATING
    assert control.coordinator is not None and set(control.coordinator.peers.by_rank) == {0, 1}


def test_a_rank_of_a_larger_group_that_left_blocks_nothing():
    control = control_of()
    larger(control)
    control.handle(ctl.StreamClosed(EpRank(3), 9), 0.0)
    both(control, state_of, 4.0)
    control.handle(msg.Tick(), 4.0)
    assert control.membership.quorum(4.0).ok
    both(control, lambda rank: state_of(rank, weights_version=2), 4.0)
    assert state_in(control) is S.RECOVERING, "all ranks are asked again"
    answer_queries(control, 4.0, weights_version=2)
    assert state_in(control) is S.READY


def test_ranks_of_a_larger_group_hear_of_the_leader_while_it_gathers():
    control = control_of()
    larger(control)
    actions = control.handle(msg.Tick(), 2.0)
    assert [a.stream for a in of_kind(actions, ctl.SendToRank)] == [10, 11, 9]
    assert len(queries(actions)) == 3


def test_a_reload_that_left_no_checksums_ends_plans_and_not_the_controller():
    control = control_of(policy=AUTO)
    both(control, lambda rank: state_of(rank, **NO_CHECKSUMS), 29.0)
    answer_queries(control, 29.0, **NO_CHECKSUMS)
    cycle = only(control.handle(msg.Tick(), 30.0), ctl.RunCycle)
    plan = automatic(weights_version=2)
    control.handle(ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan), 30.0)
    ended = record(control, "a")
    assert (ended.phase, ended.reason) == (PlanPhase.REFUSED, Reason.OBSERVE_ONLY)
    control.handle(msg.Tick(), 31.0)


@pytest.mark.parametrize("version", [1, 2], ids=["since the start", "since a reload"])
def test_a_repeated_reload_that_left_checksums_is_asked_of_all_ranks_and_plans_begin(version):
    """R4."""
    control = control_of(S.RECOVERING)
    answer_queries(control, checksums=())
    failed: dict[str, Any] = {"weights_version": version, "checksums": ()}
    both(control, lambda rank: state_of(rank, **failed))
    answer_queries(control, **failed)
    assert state_in(control) is S.READY
    both(control, lambda rank: state_of(rank, query=query_of(control) + 1, **failed))
    assert state_in(control) is S.READY, "the answers to a heartbeat tell no reload"
    asked = queries(both(control, lambda rank: state_of(rank, weights_version=version)))
    assert [question.want_checksums for question in asked] == [True, True]
    answer_queries(control, weights_version=version)
    plan = replace(plan_of(), weights_version=version)
    found, _ = Operator(control).submit(plan, 0.0, approve=True)
    assert found.phase is PlanPhase.MIGRATING


def test_a_reload_that_is_repeated_while_the_ranks_are_asked_leaves_no_group_without_checksums():
    """R4: the first answer is from before it, and the version is the same."""
    control = control_of(S.RECOVERING)
    asked = query_of(control)
    control.handle(from_rank(0, state_of(0, query=asked, checksums=())), 0.0)
    for rank in (0, 1):
        told = replace(state_of(rank), placement=None, checksums=None)
        control.handle(from_rank(rank, told), 0.0)
    control.handle(from_rank(1, state_of(1, query=asked, checksums=None)), 0.0)
    assert state_in(control) is S.RECOVERING
    answer_queries(control)
    assert control.state is S.READY and control.group is not None
    assert control.group.checksums == (5,) * 8


def test_the_group_is_asked_at_once_when_a_rank_tells_new_weights_unasked():
    control = control_of()
    control.handle(from_rank(0, state_of(0, weights_version=2)), 0.0)
    assert state_in(control) is S.RECOVERING
    answer_queries(control, weights_version=2)
    answer_queries(control, weights_version=2)
    assert control.group is not None and control.group.weights_version == 2
    plan = replace(plan_of(), weights_version=2)
    found, _ = Operator(control).submit(plan, 0.0, approve=True)
    assert found.phase is PlanPhase.MIGRATING


# --- many plans -----------------------------------------------------------------------------------


def test_as_many_placements_are_remembered_as_the_store_keeps():
    control = control_of(policy=AUTO)
    executor = control.as_leader.executor
    for number in range(200):
        assert executor.group is not None
        record, _ = Operator(control).submit(
            plan_of(1, f"p{number}", base_epoch=number, base=executor.group.placement), 0.0
        )
        executor.coordinator = None
        control.records.change(record, "approved", 0.0, phase=PlanPhase.APPROVED)
        control.advance_plan(0.0)
        executor._record_commit(0.0)
        executor.coordinator = None
        done = control.records.get(record.plan.plan_id)
        control.records.complete(done, 0.0)
    assert sorted(executor.history) == list(range(137, 201))


def test_dry_runs_do_not_pile_up():
    control = control_of(policy=AUTO)
    for number in range(40):
        Operator(control).submit(plan_of(1, f"p{number}"), 0.0)
    records = control.records
    assert [record.plan.plan_id for record in records.open] == [
        f"p{number}" for number in range(8, 40)
    ]
    expired = records.get(PlanId("p7"))
    assert expired.reason is Reason.EXPIRED
    assert expired.error is not None and "newer proposals" in expired.error


@pytest.mark.parametrize(
    ("generation", "base", "to_epoch"), [("g1", BASE, 1), ("g0", BASE, 1), ("g0", AFTER_TWO, 2)]
)
def test_a_rollback_undoes_the_plan_that_led_here_also_of_an_earlier_life_of_the_group(
    generation, base, to_epoch
):
    """R16: after a warm restart the maps are those of the plan; after a cold one they are not."""
    control = control_of(policy=AUTO)
    records, executor = control.records, control.as_leader.executor
    plan = replace(plan_of(2, "last", 1, base=base), generation=Generation(generation))
    records.add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, 0.0)
    records.change(records.get(plan.plan_id), "wave_committed", 0.0, waves_committed=2)
    fleet = executor.group
    assert fleet is not None
    executor.group = GroupState(Epoch(3), AFTER_TWO, 1, fleet.checksums)
    executor.history = {Epoch(1): BASE, Epoch(2): AFTER_ONE, Epoch(3): AFTER_TWO}
    assert control.rollback_target(None)[0] == to_epoch


# --- settings that change -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        replace(AUTO, limits=PlanLimits(max_moves=1)),
        replace(AUTO, mode=Mode.PROPOSE),
        replace(AUTO, policy="eplb"),
        replace(AUTO, thresholds={"min_gain": 0.5}),
    ],
)
def test_a_plan_made_under_a_policy_that_was_changed_meanwhile_is_not_entered(policy):
    control = control_of(policy=AUTO)
    late = decided(control, automatic(), 30.0)
    Operator(control).set_policy(policy, {}, 30.0)
    row = only(control.handle(late, 30.5), ctl.PersistDecision).row
    assert (row["reason"], control.records.by_id) == (Reason.POLICY_CHANGED, {})
    control.handle(decided(control, automatic("b"), 60.0), 60.0)
    assert "b" in control.records.by_id


def test_a_shorter_cycle_counts_from_when_it_is_set():
    observe = replace(AUTO, mode=Mode.OBSERVE, cycle_s=86_400.0)
    control = control_of(policy=observe)
    assert not of_kind(control.handle(msg.Tick(), 100.0), ctl.RunCycle)
    Operator(control).set_policy(replace(observe, cycle_s=2.0), {}, 100.0)
    assert of_kind(control.handle(msg.Tick(), 101.0), ctl.RunCycle)


def test_a_plan_that_has_not_begun_waits_for_the_end_of_a_freeze():
    control = control_of()
    control.handle(from_rank(0, state_of(0)), 20.0)  # The lease of rank 1 has run out.
    found, _ = Operator(control).submit(plan_of(1, "w"), 20.0, approve=True)
    assert found.phase is PlanPhase.APPROVED
    Operator(control).freeze(3600, 20.0)
    for now in (20.0, 31.0):
        both(control, state_of, now)
        control.handle(msg.Tick(), now)
    assert phase_and_reason(control, "w") == (PlanPhase.STALLED, Reason.FROZEN)
    Operator(control).freeze(0, 31.0)
    control.handle(msg.Tick(), 31.1)
    assert record(control, "w").phase is PlanPhase.MIGRATING


# --- Times that people read are Unix seconds, however far the machine's own clock is from them ----


OFFSET = 1000.0
"""Unix seconds minus monotonic seconds."""


def times(control, plan_id="p"):
    """Return (event, time) of every row of a plan's story; its last change has the last time."""
    found = record(control, plan_id)
    assert found.updated_at == found.story[-1]["at"]
    return [(row["event"], row["at"]) for row in found.story]


def test_every_row_of_a_plan_has_its_unix_time():
    control = control_of(unix_offset_s=OFFSET)
    operator = Operator(control)
    operator.submit(plan_of(), 1.0)
    operator.approve(PlanId("p"), "me", 2.0)
    vote(control, now=3.0)
    ack(control, AFTER_ONE, 1, now=4.0)
    vote(control, 1, now=5.0)
    ack(control, AFTER_TWO, 2, 1, now=6.0)
    assert times(control) == [
        ("created", 1001.0),
        ("approved", 1002.0),
        ("wave_started", 1002.0),
        ("wave_agreed", 1003.0),
        ("wave_committed", 1004.0),
        ("wave_started", 1004.0),
        ("wave_agreed", 1005.0),
        ("wave_committed", 1006.0),
        ("ended", 1006.0),
    ]
    gained = DeliveredGain(1007.0, unknown_because="no rank reports seconds")
    control.handle(ctl.PlanMeasured(PlanId("p"), gained), 8.0)
    assert record(control).story[-1]["at"] == 1008.0


def test_a_plan_that_is_cancelled_or_stalls_says_when():
    control = control_of(unix_offset_s=OFFSET)
    operator = Operator(control)
    operator.submit(plan_of(), 0.0, approve=True)
    operator.cancel(PlanId("p"), "me", 1.0)
    control.handle(ctl.RankHeard(EpRank(0), 1, 10), 3.5)
    control.handle(msg.Tick(), 3.5)
    abort_answers(control, now=4.0)
    assert times(control)[2:] == [
        ("cancel_requested", 1001.0),
        ("stalled", 1003.5),
        ("ended", 1004.0),
    ]
    operator.submit(plan_of(plan_id="q"), 5.0)
    operator.cancel(PlanId("q"), "me", 6.0)
    assert times(control, "q")[1:] == [("cancel_requested", 1006.0), ("ended", 1006.0)]


def test_a_move_of_an_engine_that_takes_long_is_not_aborted_unless_a_rank_has_trouble():
    """R14: the commit point has passed, so an Abort would be false."""
    control = control_of(S.MIGRATING)
    vote(control)
    moving: dict[str, Any] = {"state": msg.ParticipantState.SWAPPING, "wave": key_of()}

    def move(seconds):
        for now in seconds:
            moving["step"] = 40 * now
            both(control, lambda rank: state_of(rank, 99, **moving), float(now))
            control.handle(msg.Tick(), float(now))
        return wave_state(control)

    assert move(range(1, 60)) is C.COMMITTING
    control.handle(ctl.RankTroubled(EpRank(1), 11, "no layer for 64 steps"), 60.0)
    assert move(range(60, 75)) is C.ABORTING
    control.handle(ctl.RankTroubled(EpRank(1), 11, ""), 75.0)
    move(range(75, 120))
    assert record(control).phase is PlanPhase.MIGRATING, "nor is it stalled"
    ack(control, AFTER_ONE, 1)
    assert record(control).waves_committed == 1


def test_a_plan_that_waits_for_ranks_or_ends_with_its_group_says_when():
    control = control_of(S.RECOVERING, stored_plan(), unix_offset_s=OFFSET)
    for t in range(1, 13):
        control.handle(msg.Tick(), float(t))
    assert times(control)[-1] == ("stalled", 1011.0)
    answer_queries(control, 13.0, **after_wave(0))
    assert times(control)[-2:] == [("recovered", 1013.0), ("wave_started", 1013.0)]
    restarts(control, now=14.0)
    assert times(control)[-1] == ("ended", 1014.0)


def test_a_wave_found_on_the_ranks_is_counted_with_its_unix_time():
    control = control_of(S.RECOVERING, stored_plan(), unix_offset_s=OFFSET)
    find_armed(control)
    ack(control, AFTER_ONE, 1, now=1.0)
    assert times(control)[-1] == ("wave_committed", 1001.0)


def test_a_proposal_expires_by_the_unix_clock():
    for approve_late in (False, True):
        control = control_of(unix_offset_s=OFFSET)
        Operator(control).submit(plan_of(expires_at=1002.0), 0.0)
        control.handle(msg.Tick(), 1.9)
        assert record(control).phase is PlanPhase.PROPOSED
        if approve_late:
            approved, _ = Operator(control).approve(PlanId("p"), "me", 1.9)
            assert approved.phase is PlanPhase.MIGRATING
            continue
        control.handle(msg.Tick(), 2.0)
        assert times(control)[-1] == ("ended", 1002.0)
        assert record(control).phase is PlanPhase.EXPIRED


def test_decisions_and_plans_of_cycles_have_the_unix_time():
    control = control_of(unix_offset_s=OFFSET, policy=DeploymentPolicy(mode=Mode.AUTO, cycle_s=2.0))
    cycle = only(control.handle(msg.Tick(), 2.0), ctl.RunCycle)
    plan = plan_of(kind=PlanKind.AUTOMATIC)
    decided = ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan)
    row = only(control.handle(decided, 2.5), ctl.PersistDecision).row
    assert (row["at"], times(control)[0]) == (1002.5, ("created", 1002.5))


def test_a_freeze_and_a_resume_count_by_the_unix_clock():
    control = control_of(unix_offset_s=OFFSET)
    Operator(control).freeze(50.0, 1.0)
    assert control.frozen_until == 1051.0
    assert planning_loop_of(control).closed(50.0, PlanKind.AUTOMATIC) is Reason.FROZEN
    assert planning_loop_of(control).closed(51.0, PlanKind.AUTOMATIC) is None
    loop = planning_loop_of(control)
    loop.hold = dataclasses.replace(loop.hold, because=Reason.GAINS_NOT_DELIVERED)
    document = only(Operator(control).resume(2.0), ctl.PersistDocument)
    assert document.body["judged_from"] == 1002.0


def test_after_the_clock_was_set_all_parts_use_the_new_time():
    control = control_of(unix_offset_s=OFFSET)
    control.handle(ctl.ClockStepped(2000.0), 1.0)
    Operator(control).freeze(50.0, 2.0)
    assert control.frozen_until == 2052.0
    assert planning_loop_of(control).closed(51.9, PlanKind.AUTOMATIC) is Reason.FROZEN
    assert planning_loop_of(control).closed(52.0, PlanKind.AUTOMATIC) is None
    follower = control_of(S.FOLLOWER, unix_offset_s=OFFSET)
    assert follower.handle(ctl.ClockStepped(2000.0), 1.0) == []
    follower.handle(ctl.LeaseAcquired(msg.Leader("a", 1), ctl.StoredRecords()), 1.0)
    assert of_kind(follower.handle(msg.Tick(), 31.0), ctl.PersistDecision)[0].row["at"] == 2031.0


def test_a_resume_ends_a_freeze_and_a_repeated_one_writes_nothing():
    control = control_of(unix_offset_s=OFFSET)
    Operator(control).freeze(50.0, 1.0)
    document = only(Operator(control).resume(2.0), ctl.PersistDocument)
    assert (document.body["frozen_until"], document.body["held"]) == (0.0, False)
    assert planning_loop_of(control).closed(3.0, PlanKind.AUTOMATIC) is None
    assert Operator(control).resume(4.0) == []
