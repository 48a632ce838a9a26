"""Plan records: the ended plans a leader still knows after many more have ended."""

import dataclasses

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
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
