"""Times that people read are Unix seconds, however far the machine's own clock is from them."""

import dataclasses

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import Epoch, EpRank, PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.transitions import ControlState as S
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
    from_rank,
    group_leaves,
    hello_of,
    key_of,
    of_kind,
    only,
    plan_of,
    planning_loop_of,
    record,
    state_of,
    vote,
)

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


def test_a_plan_that_waits_for_ranks_or_ends_with_its_group_says_when():
    stored = ctl.StoredRecords(plans=(record(control_of(S.MIGRATING)),), epochs={Epoch(0): BASE})
    control = control_of(S.RECOVERING, stored, unix_offset_s=OFFSET)
    for t in range(1, 13):
        control.handle(msg.Tick(), float(t))
    assert times(control)[-1] == ("stalled", 1011.0)
    answer_queries(control, 13.0, **after_wave(0))
    assert times(control)[-2:] == [("recovered", 1013.0), ("wave_started", 1013.0)]
    group_leaves(control)
    for rank in (0, 1):
        control.handle(from_rank(rank, hello_of(rank, "g2", 5), 5, 30 + rank), 14.0)
    assert times(control)[-1] == ("ended", 1014.0)


def test_a_wave_found_on_the_ranks_is_counted_with_its_unix_time():
    stored = ctl.StoredRecords(plans=(record(control_of(S.MIGRATING)),), epochs={Epoch(0): BASE})
    control = control_of(S.RECOVERING, stored, unix_offset_s=OFFSET)
    for query in (1, 2):
        both(
            control,
            lambda rank, query=query: state_of(
                rank, query=query, state=msg.ParticipantState.ARMED, wave=key_of()
            ),
        )
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
