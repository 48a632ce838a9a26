"""Plan records: the ended plans a leader still knows after many more have ended."""

import dataclasses

import pytest

from evenkeel_moe.errors import NotFound, Reason
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.plan_records import PlanRecords, is_failure, select_remembered
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import (
    AFTER_ONE,
    AFTER_TWO,
    BASE,
    Operator,
    ack,
    control_of,
    plan_of,
    vote,
)

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


def test_rollback_undoes_the_whole_last_plan_however_many_dry_runs_came_after():
    """R16."""
    control = control_of(S.MIGRATING)
    vote(control)
    ack(control, AFTER_ONE, 1)
    vote(control, 1)
    ack(control, AFTER_TWO, 2, 1)
    operator = Operator(control)
    for number in range(40):
        now = 0.1 * number
        dry = plan_of(1, f"dry{number}", 2, base=AFTER_TWO, target=AFTER_TWO, created_at=now)
        operator.submit(dataclasses.replace(dry, expires_at=now + 0.05), now)
        control.handle(msg.Tick(), now + 0.09)
    assert control.rollback_target(None) == (0, BASE)


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
