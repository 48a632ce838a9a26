"""What a plan's record says of each change, and which plans count as failed or as begun."""

import dataclasses

import pytest

from evenkeel_moe.errors import NotFound, Reason
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.protocol.leader.plan_records import PlanRecords, is_failure, select_remembered
from tests.protocol.machines import plan_of

P = PlanPhase


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
