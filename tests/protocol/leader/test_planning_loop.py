"""The planning loop in each mode; every cycle ends in a recorded decision."""

import dataclasses

import pytest

from evenkeel_moe.errors import Conflict, NotFound, Reason
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.ids import EpRank, Generation, PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.schedule import Schedule
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.plan_records import PlanRecords, is_failure, select_remembered
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    AFTER_TWO,
    BASE,
    CONTROL_TIMING,
    Operator,
    answer_queries,
    both,
    carry_out,
    control_of,
    from_rank,
    hello_of,
    key_of,
    of_kind,
    only,
    plan_of,
    planning_loop_of,
    record,
    refused,
    state_of,
)

AUTO = DeploymentPolicy(mode=Mode.AUTO, cycle_s=10.0)


def decide(control, plan, now=10.0, reason=Reason.PLAN_STARTED):
    cycle = only(control.handle(msg.Tick(), now), ctl.RunCycle)
    hear(control, now)
    return control.handle(ctl.CycleDecided(cycle.cycle, reason, plan, {"gain": 0.2}), now)


def hear(control, now):
    for rank in (0, 1):
        control.handle(from_rank(rank, state_of(rank)), now)


def closed_row(control, now=10.0):
    """Return the decision of a cycle in which no plan may begin, and which measures the balance."""
    cycle = only(control.handle(msg.Tick(), now), ctl.RunCycle)
    assert cycle.closed_by is not None
    decided = ctl.CycleDecided(cycle.cycle, cycle.closed_by, numbers={"time_balance": 0.7})
    return only(control.handle(decided, now + 0.5), ctl.PersistDecision).row


def fresh(policy, now=9.9, **changes):
    control = control_of(policy=policy, **changes)
    hear(control, now)
    return control


@pytest.mark.parametrize(
    ("mode", "reason", "phase", "by"),
    [
        (Mode.AUTO, Reason.PLAN_STARTED, PlanPhase.MIGRATING, "auto"),
        (Mode.PROPOSE, Reason.PLAN_PROPOSED, PlanPhase.PROPOSED, None),
        (Mode.OBSERVE, Reason.OBSERVE_MODE, None, None),
    ],
)
def test_the_mode_decides_what_becomes_of_the_plan_of_a_cycle(mode, reason, phase, by):
    control = fresh(dataclasses.replace(AUTO, mode=mode))
    actions = decide(control, plan_of(kind=PlanKind.AUTOMATIC))
    row = only(actions, ctl.PersistDecision).row
    assert (row["reason"], row["numbers"]) == (reason, {"gain": 0.2})
    assert (control.state is S.MIGRATING) is (mode is Mode.AUTO)
    if phase is None:
        assert (row["plan_id"], control.records.by_id) == (None, {})
    else:
        assert (row["plan_id"], record(control).phase) == ("p", phase)
        assert record(control).story[0].get("by") == by, "if nobody had to approve it"


def test_propose_mode_makes_one_proposal_at_a_time():
    control = fresh(dataclasses.replace(AUTO, mode=Mode.PROPOSE))
    decide(control, plan_of(kind=PlanKind.AUTOMATIC))
    row = closed_row(control, 20.0)
    assert (row["reason"], row["plan_id"], row["numbers"]) == (
        Reason.PLAN_PROPOSED,
        "p",
        {"time_balance": 0.7},
    )


def test_a_cycle_that_waits_for_approval_says_until_when():
    control = fresh(dataclasses.replace(AUTO, mode=Mode.PROPOSE))
    decide(control, plan_of(kind=PlanKind.AUTOMATIC, expires_at=620.0 + control.unix_offset_s))
    row = closed_row(control, 20.0)
    assert row["numbers"] == {"time_balance": 0.7, "expires_in_s": 599.5}


def test_a_proposal_that_was_approved_during_a_cycle_is_not_waited_for():
    control = fresh(dataclasses.replace(AUTO, mode=Mode.PROPOSE))
    decide(control, plan_of(kind=PlanKind.AUTOMATIC))
    cycle = only(control.handle(msg.Tick(), 20.0), ctl.RunCycle)
    hear(control, 20.0)
    Operator(control).approve(record(control).plan.plan_id, "me", 20.0)
    late = control.handle(ctl.CycleDecided(cycle.cycle, Reason.PLAN_PROPOSED), 20.5)
    assert only(late, ctl.PersistDecision).row["plan_id"] is None


def test_cycle_without_a_plan_is_recorded_with_its_reason():
    control = fresh(AUTO)
    actions = decide(control, None, reason=Reason.GAIN_TOO_SMALL)
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.GAIN_TOO_SMALL


def test_invalid_plan_of_a_cycle_is_recorded_as_refused():
    """R17."""
    control = fresh(AUTO)
    plan = plan_of(kind=PlanKind.AUTOMATIC, waves=1)
    actions = decide(control, dataclasses.replace(plan, target=BASE))
    assert record(control).phase is PlanPhase.REFUSED and record(control).error
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.INVALID_INPUT
    assert control.state is S.READY


def test_plan_that_was_overtaken_is_not_begun():
    control = fresh(AUTO)
    cycle = only(control.handle(msg.Tick(), 10.0), ctl.RunCycle)
    Operator(control).freeze(60.0, 10.0)
    actions = control.handle(ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan_of()), 10.5)
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.FROZEN
    late = control.handle(ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan_of()), 10.6)
    assert late == [], "a cycle is answered once"


def test_plan_of_a_cycle_of_an_earlier_term_is_not_begun():
    """It was made under an earlier policy, and the new term's cycle waits for its own answer."""
    control = fresh(AUTO)
    late = only(control.handle(msg.Tick(), 10.0), ctl.RunCycle)
    control.handle(ctl.LeaseLost(), 10.1)
    control.handle(ctl.LeaseAcquired(msg.Leader("a", 2)), 10.2)
    both(control, hello_of, 10.3)
    answer_queries(control, 10.4)
    both(control, lambda rank: state_of(rank), 20.0)
    asked = only(control.handle(msg.Tick(), 20.3), ctl.RunCycle)
    assert control.handle(ctl.CycleDecided(late.cycle, Reason.PLAN_STARTED, plan_of()), 20.4) == []
    answered = control.handle(ctl.CycleDecided(asked.cycle, Reason.PLAN_STARTED, plan_of()), 20.5)
    assert only(answered, ctl.PersistDecision).row["reason"] == Reason.PLAN_STARTED


def only_from(unix: float, minutes: int = 60) -> Schedule:
    """Return a schedule that opens every day at the minute of a Unix time."""
    first = int(unix // 60) % 1440
    begins, ends = divmod(first, 60), divmod((first + minutes) % 1440, 60)
    return Schedule(windows=(f"daily {begins[0]:02}:{begins[1]:02} - {ends[0]:02}:{ends[1]:02}",))


def test_outside_its_schedule_no_plan_begins_and_none_by_hand():
    unix = control_of(S.READY).unix_offset_s + 10.0
    control = fresh(dataclasses.replace(AUTO, schedule=only_from(unix + 7200)))
    assert closed_row(control)["reason"] == Reason.OUTSIDE_SCHEDULE
    with pytest.raises(Conflict, match="the schedule opens in 120 min") as caught:
        Operator(control).submit(plan_of(), 10.0, approve=True)
    assert caught.value.reason is Reason.OUTSIDE_SCHEDULE
    waiting, _ = Operator(control).submit(plan_of(), 10.0)
    name = waiting.plan.plan_id
    asked = refused(Conflict, lambda: Operator(control).approve(name, "me", 10.0))
    assert asked[0] is Reason.OUTSIDE_SCHEDULE
    assert record(control).phase is PlanPhase.PROPOSED
    Operator(control).set_policy(dataclasses.replace(AUTO, schedule=only_from(unix - 60)), {}, 10.0)
    started, _ = Operator(control).approve(waiting.plan.plan_id, "me", 10.0)
    assert (started.phase, control.state) == (PlanPhase.MIGRATING, S.MIGRATING)


def test_a_rollback_may_begin_at_any_time():
    control = fresh(AUTO)
    closed = only_from(control.unix_offset_s + 7200)
    Operator(control).set_policy(dataclasses.replace(AUTO, schedule=closed), {}, 10.0)
    back, _ = Operator(control).submit(plan_of(kind=PlanKind.ROLLBACK), 10.0, approve=True)
    assert not back.phase.terminal and back.phase is not PlanPhase.PROPOSED


@pytest.mark.parametrize("waits", ["", "stalled", "paused"])
def test_while_a_plan_runs_or_waits_every_cycle_measures_the_balance(waits):
    control = control_of(S.MIGRATING, policy=AUTO)
    if waits:
        health = ctl.WaveHealth(key_of(), waits == "stalled", Reason.NO_STEPS)
        control.as_leader.executor._note_health(health, 9.0)
        assert record(control).phase == waits
    row = closed_row(control)
    assert (row["reason"], row["numbers"]) == (Reason.PLAN_IN_PROGRESS, {"time_balance": 0.7})
    assert of_kind(control.handle(msg.Tick(), 10.6), ctl.RunCycle) == []


@pytest.mark.parametrize(
    ("state", "reason"),
    [(S.WAITING_FOR_RANKS, Reason.RANKS_MISSING), (S.RECOVERING, Reason.RECOVERING)],
)
def test_a_cycle_ends_at_once_while_the_placement_is_not_known(state, reason):
    control = control_of(state, policy=AUTO)
    rows = of_kind(control.handle(msg.Tick(), 10.0), ctl.PersistDecision)
    assert [row.row["reason"] for row in rows] == [reason]
    assert of_kind(control.handle(msg.Tick(), 10.1), ctl.PersistDecision) == []


def cycle_or_reason(control, now=10.0):
    """Return the reason of the decision at a tick; None if a cycle begins that may plan."""
    actions = control.handle(msg.Tick(), now)
    if cycles := of_kind(actions, ctl.RunCycle):
        assert not of_kind(actions, ctl.PersistDecision)
        return cycles[0].closed_by
    return only(actions, ctl.PersistDecision).row["reason"]


@pytest.mark.parametrize(
    ("mode", "held", "proposed", "troubled"),
    [
        (Mode.AUTO, Reason.HELD_AFTER_ROLLBACK, None, Reason.OBSERVE_ONLY),
        (Mode.PROPOSE, None, Reason.PLAN_PROPOSED, Reason.OBSERVE_ONLY),
        (Mode.OBSERVE, None, None, None),
    ],
)
def test_what_stops_a_cycle_depends_on_the_mode(mode, held, proposed, troubled):
    policy = dataclasses.replace(AUTO, mode=mode)
    control = fresh(policy)
    planning_loop_of(control).hold = Hold(Reason.HELD_AFTER_ROLLBACK)
    assert cycle_or_reason(control) == held
    control = fresh(policy)
    control.records.add(
        plan_of(kind=PlanKind.AUTOMATIC), PlanPhase.PROPOSED, Reason.LOAD_CHANGED, 0.0
    )
    assert cycle_or_reason(control) == proposed
    control = fresh(policy)
    control.handle(ctl.RankTroubled(EpRank(1), 11, "its replicas differ"), 9.9)
    assert cycle_or_reason(control) == troubled


def test_a_planner_that_failed_is_said_once_and_asked_again():
    control = fresh(AUTO)
    assert cycle_or_reason(control) is None
    deadline = 10.0 + CONTROL_TIMING.cycle_deadline_s
    hear(control, deadline - 1.0)
    assert of_kind(control.handle(msg.Tick(), deadline - 1.0), ctl.PersistDecision) == []
    assert cycle_or_reason(control, deadline) == Reason.PLANNER_FAILED
    hear(control, deadline)
    assert cycle_or_reason(control, deadline + 0.1) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"base_epoch": 1}, Reason.STALE_BASE),
        ({"generation": Generation("g0")}, Reason.STALE_BASE),
        ({"weights_version": 0}, Reason.WEIGHTS_VERSION_CHANGED),
    ],
)
def test_a_plan_of_a_cycle_for_another_epoch_group_or_weights_is_not_entered(changes, reason):
    control = fresh(AUTO)
    actions = decide(control, plan_of(kind=PlanKind.AUTOMATIC, **changes))
    assert only(actions, ctl.PersistDecision).row["reason"] == reason
    assert not control.records.by_id


# --- Plan records: the ended plans a leader still knows after many more have ended ----------------


P = PlanPhase


def enter(records, name, phase, reason=Reason.EXPIRED, *, waves=0, kind=PlanKind.AUTOMATIC):
    """Enter a plan and end it, one second after the previous one."""
    at = float(len(records.seen))
    records.seen.append(name)
    plan = plan_of(plan_id=name, kind=kind, created_at=at)
    records.add(plan, P.MIGRATING if waves else P.PROPOSED, Reason.MANUAL_REQUEST, at)
    records.change(
        records.get(PlanId(name)), "ended", at, phase=phase, reason=reason, waves_committed=waves
    )


class NotedRecords(PlanRecords):
    """Plan records that note the order of entry."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def crowd(self, count=40):
        for _ in range(count):
            enter(self, f"dry{len(self.seen)}", P.EXPIRED, kind=PlanKind.MANUAL)

    def kept(self):
        return [str(name) for name in self.by_id if not name.startswith("dry")]


@pytest.fixture
def records():
    return NotedRecords()


def test_what_later_decisions_rest_on_outlives_newer_plans(records):
    enter(records, "earlier", P.COMMITTED, Reason.COMMITTED, waves=2)
    enter(records, "earlier-fault", P.ABORTED, Reason.RANK_LOST)
    enter(records, "carried-out", P.COMMITTED, Reason.COMMITTED, waves=2)
    enter(records, "partly", P.CANCELLED, Reason.CANCELLED, waves=1)
    enter(records, "stopped", P.CANCELLED, Reason.CANCELLED)
    enter(records, "failed", P.ABORTED, Reason.PREPARE_DEADLINE)
    enter(records, "refused", P.REFUSED, Reason.NO_SOURCE)
    enter(records, "outrun", P.ABORTED, Reason.GENERATION_CHANGED)
    wanted = ["carried-out", "partly", "stopped", "failed", "refused", "outrun"]
    records.crowd()
    assert records.kept() == wanted
    assert len(records.by_id) <= 16 + 1 + len(wanted), "and no more than a few of the others"


def test_failures_are_kept_back_to_the_last_plan_that_was_carried_out_and_not_without_end(records):
    enter(records, "fault-before", P.REFUSED, Reason.NO_SOURCE)
    enter(records, "carried-out", P.COMMITTED, Reason.COMMITTED, waves=2)
    for number in range(50):
        enter(records, f"fault{number}", P.REFUSED, Reason.NO_SOURCE)
    enter(records, "by-hand", P.REFUSED, Reason.NO_SOURCE, kind=PlanKind.MANUAL)
    records.crowd()
    assert records.kept() == ["carried-out", *(f"fault{number}" for number in range(34, 50))]


GAINED = DeliveredGain(9.0, gain=0.1, error=0.01, lower=0.08, upper=0.12, steps=64)


def test_the_newest_measured_plans_are_kept_for_the_next_promises(records):
    for number in range(12):
        enter(records, f"done{number}", P.COMMITTED, Reason.COMMITTED, waves=1)
        record = records.get(PlanId(f"done{number}"))
        record.plan.numbers["gain"] = 0.1
        written = records.measured(record, GAINED, 50.0).record
        assert written is records.get(PlanId(f"done{number}"))
        assert (written.updated_at, written.phase) == (record.updated_at, P.COMMITTED)
    enter(records, "unknown", P.COMMITTED, Reason.COMMITTED, waves=1)
    nothing = DeliveredGain(9.0, unknown_because="no rank reports seconds")
    records.measured(records.get(PlanId("unknown")), nothing, 50.0)
    records.crowd()
    assert records.kept() == [*(f"done{number}" for number in range(4, 12)), "unknown"]


def test_the_story_tells_promise_and_delivery(records):
    enter(records, "done", P.COMMITTED, Reason.COMMITTED, waves=1)
    record = records.get(PlanId("done"))
    record.plan.numbers.update(gain=0.12, gain_lower=0.1)
    row = records.measured(record, GAINED, 50.0).record.story[-1]
    assert (row["at"], row["event"], row["phase"]) == (50.0, "measured", "committed")
    assert (row["promised_gain"], row["promised_lower"]) == (0.12, 0.1)
    assert (row["delivered_gain"], row["delivered_lower"], row["delivered_upper"]) == (
        0.1,
        0.08,
        0.12,
    )
    assert "detail" not in row


def test_plans_that_have_not_ended_are_kept_whatever_came_after(records):
    records.add(plan_of(plan_id="waits", created_at=-1.0), P.PROPOSED, Reason.MANUAL_REQUEST, 0.0)
    records.crowd()
    assert records.kept() == ["waits"]


def test_loaded_records_are_those_that_were_kept(records):
    enter(records, "carried-out", P.COMMITTED, Reason.COMMITTED, waves=2)
    stored = dict(records.by_id)
    for number in range(40):
        enter(records, f"dry{number}", P.EXPIRED)
        stored |= records.by_id
    loaded = PlanRecords()
    loaded.load(reversed(stored.values()))
    assert PlanId("carried-out") in loaded.by_id
    assert len(loaded.by_id) == 17


def add(records, name="p", phase=P.PROPOSED, reason=Reason.MANUAL_REQUEST, **changes):
    kind = changes.pop("kind", PlanKind.AUTOMATIC)
    return records.add(plan_of(plan_id=name, kind=kind), phase, reason, 1.0, **changes).record


@pytest.mark.parametrize(
    ("phase", "reason", "kind", "failed"),
    [
        (P.REFUSED, Reason.NO_SOURCE, PlanKind.AUTOMATIC, True),
        (P.ABORTED, Reason.RANK_LOST, PlanKind.AUTOMATIC, True),
        (P.ABORTED, Reason.STALE_BASE, PlanKind.AUTOMATIC, False),
        (P.CANCELLED, Reason.CANCELLED, PlanKind.AUTOMATIC, True),
        (P.ABORTED, Reason.RANK_LOST, PlanKind.MANUAL, False),
    ],
)
def test_automatic_plans_that_failed_or_were_rejected_are_failures(phase, reason, kind, failed):
    assert is_failure(add(PlanRecords(), phase=phase, reason=reason, kind=kind)) is failed


def test_a_new_record_says_who_made_it_and_why_it_was_refused():
    assert add(PlanRecords()).story == (
        {"at": 1.0, "event": "created", "phase": "proposed", "reason": "manual_request"},
    )
    for detail, error in (("layer 3", "layer 3"), ("", "no_source")):
        refused = add(PlanRecords(), phase=P.REFUSED, reason=Reason.NO_SOURCE, detail=detail)
        assert (refused.error, refused.story[0].get("detail", "")) == (error, detail)
    made = add(PlanRecords(), by="me", detail="a proposal")
    assert (made.story[0]["by"], made.story[0]["detail"], made.error) == ("me", "a proposal", None)


def test_a_change_says_what_has_changed_and_no_more():
    records = PlanRecords()
    record = add(records)
    approved = records.change(
        record, "approved", 2.0, phase=P.APPROVED, by="me", approved_by="me"
    ).record
    assert approved.story[1:] == (
        {
            "at": 2.0,
            "event": "approved",
            "phase": "approved",
            "reason": "manual_request",
            "by": "me",
        },
    )
    assert (approved.approved_by, approved.error) == ("me", None)
    asked = records.change(approved, "cancel_requested", 3.0, by="you", detail="too slow").record
    assert (asked.approved_by, asked.error, asked.story[-1]["detail"]) == ("me", None, "too slow")
    counted = records.change(
        asked, "wave_committed", 4.0, phase=P.MIGRATING, waves_committed=1
    ).record
    assert counted.story[-1]["waves_committed"] == counted.waves_committed == 1
    assert "by" not in counted.story[-1] and "waves_committed" not in asked.story[-1]
    for detail, error in (("rank 3", "rank 3"), ("", "rank_lost")):
        ended = records.end(counted, Reason.RANK_LOST, 5.0, detail).record
        assert (ended.phase, ended.error) == (P.ABORTED, error)
    done = records.change(counted, "ended", 5.0, phase=P.COMMITTED, reason=Reason.COMMITTED).record
    assert done.error is None


def test_an_unknown_plan_is_not_found():
    with pytest.raises(NotFound, match="no plan q"):
        PlanRecords().get(PlanId("q"))


def test_a_plan_has_begun_once_a_wave_was_sent_or_counted():
    records = PlanRecords()
    record = add(records)
    assert not record.has_begun
    assert dataclasses.replace(record, waves_committed=1).has_begun
    assert dataclasses.replace(record, wave_sent=True).has_begun


def test_only_the_oldest_proposals_by_hand_give_way():
    records = PlanRecords()
    add(records, "automatic")
    add(records, "accepted", P.APPROVED, kind=PlanKind.MANUAL)
    for number in range(32):
        add(records, f"dry{number}", kind=PlanKind.MANUAL)
    assert records.drop_excess(2.0) == []
    add(records, "dry32", kind=PlanKind.MANUAL)
    (dropped,) = records.drop_excess(2.0)
    assert (dropped.record.plan.plan_id, dropped.record.phase) == ("dry0", P.EXPIRED)


def test_failures_count_from_the_end_of_the_last_plan_that_was_carried_out():
    def ended(name, at, phase, reason, waves=0):
        record = add(PlanRecords(), name, phase, reason)
        return dataclasses.replace(record, updated_at=at, waves_committed=waves)

    records = [
        ended("done1", 1.0, P.COMMITTED, Reason.COMMITTED, 1),
        ended("between", 2.0, P.REFUSED, Reason.NO_SOURCE),
        ended("with", 3.0, P.REFUSED, Reason.NO_SOURCE),
        ended("done2", 3.0, P.COMMITTED, Reason.COMMITTED, 1),
        ended("after", 4.0, P.REFUSED, Reason.NO_SOURCE),
        *(ended(f"dry{n}", 5.0 + n, P.EXPIRED, Reason.EXPIRED) for n in range(16)),
    ]
    kept = [r.plan.plan_id for r in select_remembered(records) if r.phase is not P.EXPIRED]
    assert kept == ["done2", "after"]


def test_plans_that_calibrate_promises_are_kept_however_many_rollbacks_were_measured_since():
    def measured(name, at, error, **numbers):
        record = add(PlanRecords(), name, P.COMMITTED, Reason.COMMITTED)
        delivered = DeliveredGain(at, 0.2, error, 0.2 - 2 * error, 0.2 + 2 * error, steps=64)
        plan = dataclasses.replace(record.plan, numbers=numbers)
        return dataclasses.replace(record, plan=plan, updated_at=at, delivered=delivered)

    records = [
        measured("promised", 1.0, 0.01, gain=0.2),
        *(measured(f"rough{n}", 2.0 + n, 0.2, gain=0.2) for n in range(16)),
        *(measured(f"rollback{n}", 20.0 + n, 0.01) for n in range(16)),
    ]
    assert "promised" in {r.plan.plan_id for r in select_remembered(records)}


def test_rollback_undoes_the_whole_last_plan_however_many_dry_runs_came_after():
    """R16."""
    control = control_of(S.MIGRATING)
    carry_out(control)
    operator = Operator(control)
    for number in range(40):
        now = 0.1 * number
        dry = plan_of(1, f"dry{number}", 2, base=AFTER_TWO, target=AFTER_TWO, created_at=now)
        operator.submit(dataclasses.replace(dry, expires_at=now + 0.05), now)
        control.handle(msg.Tick(), now + 0.09)
    assert control.rollback_target(None) == (0, BASE)


def test_a_plan_of_a_cycle_that_ends_after_closing_time_is_not_begun():
    unix = control_of(S.READY).unix_offset_s + 10.0
    control = fresh(dataclasses.replace(AUTO, schedule=only_from(unix - 60)))
    cycle = only(control.handle(msg.Tick(), 10.0), ctl.RunCycle)
    Operator(control).set_policy(
        dataclasses.replace(AUTO, schedule=only_from(unix + 7200)), {}, 10.0
    )
    actions = control.handle(ctl.CycleDecided(cycle.cycle, Reason.PLAN_STARTED, plan_of()), 10.5)
    assert only(actions, ctl.PersistDecision).row["reason"] == Reason.OUTSIDE_SCHEDULE
