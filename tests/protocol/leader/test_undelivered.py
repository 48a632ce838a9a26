"""Three plans in a row that deliver less than half of their lower bound stop `auto`."""

import dataclasses

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from evenkeel_moe.protocol.leader.undelivered import has_delivered, undelivered_in_a_row
from tests.protocol.machines import LEADER, Operator, control_of, plan_of, planning_loop_of

LOWER = 0.1
UNKNOWN = None


def record_of(gain, at=1.0, *, name="p", upper=0.01, lower=LOWER, kind=PlanKind.AUTOMATIC):
    plan = plan_of(plan_id=name, kind=kind, numbers={"gain": 0.12, "gain_lower": lower})
    record = PlanRecords().add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, 0.0).record
    if gain is UNKNOWN:
        delivered = DeliveredGain(at, unknown_because="no rank reports seconds")
    else:
        delivered = DeliveredGain(at, gain, 0.01, gain - 0.01, gain + upper, None, 64)
    return dataclasses.replace(record, delivered=delivered)


@pytest.mark.parametrize(
    ("gain", "upper", "answer"),
    [
        (0.05, 0.01, True),
        (0.049, 0.01, False),
        (-0.2, 0.01, False),
        (0.04, 0.06, None),  # The bound of the promise is the end of the interval.
        (0.049, 0.06, None),  # The promise lies inside the interval: measured too roughly.
        (0.12, 0.01, True),
    ],
)
def test_less_than_half_of_the_lower_bound_is_too_little(gain, upper, answer):
    assert has_delivered(record_of(gain, upper=upper)) is answer


def test_what_is_not_promised_measured_or_automatic_says_nothing():
    assert has_delivered(record_of(UNKNOWN)) is None
    assert has_delivered(dataclasses.replace(record_of(0.0), delivered=None)) is None
    assert has_delivered(record_of(0.0, lower=0.0)) is None
    assert has_delivered(record_of(0.0, kind=PlanKind.MANUAL)) is None
    missed = record_of(0.0)
    unmeasured = dataclasses.replace(missed, delivered=None)
    assert undelivered_in_a_row([unmeasured, missed], 0.0) == [missed]
    unpromised = record_of(0.0)
    unpromised.plan.numbers.clear()
    assert has_delivered(unpromised) is None


def test_plans_count_in_the_order_of_their_measurements_back_to_one_that_delivered():
    missed = [record_of(0.0, at) for at in (2.0, 3.0, 5.0)]
    unknown = record_of(UNKNOWN, 4.0)
    assert undelivered_in_a_row([*missed, unknown], 0.0) == missed[::-1]
    assert undelivered_in_a_row([*missed, record_of(0.1, 4.5)], 0.0) == [missed[2]]
    assert undelivered_in_a_row(missed, 2.0) == missed[:0:-1], "since the last resume"


# --- in the leader's machine ----------------------------------------------------------------------


def leading(mode=Mode.AUTO):
    control = control_of()
    Operator(control).set_policy(DeploymentPolicy(mode=mode, cycle_s=30.0), {}, 0.0)
    return control


def deliver(control, name, gain, now):
    """Enter a committed plan that promised 10 % at least, and measure it."""
    plan = plan_of(plan_id=name, kind=PlanKind.AUTOMATIC, numbers={"gain_lower": LOWER})
    control.records.add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, now)
    delivered = record_of(gain, now).delivered
    return control.handle(ctl.PlanMeasured(PlanId(name), delivered), now)


def test_the_third_plan_in_a_row_stops_auto_with_a_reason_of_its_own():
    control = leading()
    for at, name in ((1.0, "a"), (2.0, "b")):
        assert [type(action) for action in deliver(control, name, 0.0, at)] == [ctl.PersistPlan]
    _, document, alert = deliver(control, "c", 0.0, 3.0)
    stored = {"held": True, "held_because": "gains_not_delivered", "frozen_until": 0.0}
    assert document == ctl.PersistDocument("control", stored)
    assert isinstance(alert, ctl.Alert)
    assert alert.reason is Reason.GAINS_NOT_DELIVERED
    assert alert.detail.endswith("plans a, b, c")
    (decision,) = [
        action
        for action in control.handle(msg.Tick(), 40.0)
        if isinstance(action, ctl.PersistDecision)
    ]
    assert decision.row["reason"] == "gains_not_delivered"
    assert [type(action) for action in deliver(control, "d", 0.0, 41.0)] == [ctl.PersistPlan]


def test_a_plan_that_delivers_begins_the_count_again():
    control = leading()
    for at, (name, gain) in enumerate([("a", 0.0), ("b", 0.0), ("c", 0.11), ("d", 0.0)], 1):
        deliver(control, name, gain, float(at))
    assert not control.held


@pytest.mark.parametrize("mode", [Mode.PROPOSE, Mode.OBSERVE])
def test_only_auto_is_stopped(mode):
    control = leading(mode)
    for at, name in enumerate("abcd", 1):
        deliver(control, name, 0.0, float(at))
    assert not control.held


def test_resume_starts_auto_and_three_further_plans_must_fail():
    control = leading()
    for at, name in enumerate("abc", 1):
        deliver(control, name, 0.0, float(at))
    assert control.held
    (document,) = Operator(control).resume(10.0)
    assert isinstance(document, ctl.PersistDocument)
    assert document.body == {"held": False, "judged_from": 10.0, "frozen_until": 0.0}
    assert Operator(control).resume(11.0) == []
    for at, name in enumerate("de", 12):
        deliver(control, name, 0.0, float(at))
    assert not control.held
    deliver(control, "f", 0.0, 14.0)
    assert control.hold == Hold(Reason.GAINS_NOT_DELIVERED, 10.0)


def test_the_stop_outlives_a_change_of_the_leader():
    control = leading()
    for at, name in enumerate("abc", 1):
        deliver(control, name, 0.0, float(at))
    stored = ctl.StoredRecords(hold=Hold.of_document(control.document().body))
    control.handle(ctl.LeaseLost(), 5.0)
    assert not control.held
    control.handle(ctl.LeaseAcquired(LEADER, stored), 6.0)
    assert planning_loop_of(control).hold.because is Reason.GAINS_NOT_DELIVERED


def test_a_rollback_keeps_the_reason_of_the_stop():
    control = leading()
    for at, name in enumerate("abc", 1):
        deliver(control, name, 0.0, float(at))
    Operator(control).submit(plan_of(plan_id="back", kind=PlanKind.ROLLBACK), 5.0)
    assert control.hold.because is Reason.GAINS_NOT_DELIVERED


@pytest.mark.parametrize(
    ("body", "hold"),
    [
        ({}, Hold()),
        ({"held": False, "held_because": "gains_not_delivered"}, Hold()),
        ({"held": True}, Hold(Reason.HELD_AFTER_ROLLBACK)),
        ({"held": True, "held_because": ["?"]}, Hold(Reason.HELD_AFTER_ROLLBACK)),
        ({"held": True, "held_because": "committed"}, Hold(Reason.HELD_AFTER_ROLLBACK)),
        ({"held": True, "held_because": "held_after_data_loss"}, Hold(Reason.HELD_AFTER_DATA_LOSS)),
        ({"judged_from": "soon"}, Hold()),
        ({"judged_from": float("nan")}, Hold()),
        ({"judged_from": 5}, Hold(None, 5.0)),
    ],
)
def test_a_stored_hold_that_cannot_be_read_still_holds(body, hold):
    assert Hold.of_document(body) == hold
    assert Hold.of_document(hold.document()) == hold
