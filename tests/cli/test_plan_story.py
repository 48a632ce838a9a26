"""`evenkeel plan story` tells each event in words."""

import re

import pytest

from evenkeel_moe.cli.plan_story import story_table
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from tests.api.fakes import NOW, make_plan
from tests.cli.test_tables import drawn


def told(rows, width=200):
    """Return event, phase and detail of each row."""
    lines = drawn(story_table(rows), width)[1 : len(rows) + 1]
    return [tuple(re.split(" {2,}", line)[1:]) for line in lines]


def test_a_story_tells_events_and_reasons_in_words():
    records, plan = PlanRecords(), make_plan("mine").plan
    records.add(plan, PlanPhase.PROPOSED, Reason.MANUAL_REQUEST, NOW, by="alice")
    begun = {"phase": PlanPhase.MIGRATING, "reason": Reason.PLAN_STARTED}
    stalled = {"phase": PlanPhase.STALLED, "reason": Reason.RANKS_MISSING, "detail": "rank 3"}
    for event, row in (
        ("approved", {"phase": PlanPhase.APPROVED, "by": "bob"}),
        ("wave_started", {**begun, "detail": "wave 1 of 1: 2 transfers"}),
        ("stalled", stalled),
        ("resumed", begun),
        ("recovered", {"waves_committed": 0, "detail": "epoch 3"}),
        ("wave_committed", {"waves_committed": 1, "detail": "epoch 4"}),
    ):
        records.change(records.get(plan.plan_id), event, NOW, **row)
    records.complete(records.get(plan.plan_id), NOW)
    assert told(records.get(plan.plan_id).story) == [
        ("created by alice", "proposed", "an operator asked for the plan"),
        ("approved by bob", "approved", "-"),
        ("a wave began", "migrating", "wave 1 of 1: 2 transfers"),
        (
            "stalled",
            "stalled",
            "not all ranks of the EP group are connected and alive (ranks_missing); rank 3",
        ),
        ("resumed", "migrating", "-"),
        (
            "taken over by a new leader",
            "migrating",
            "0 waves committed so far; the ranks are at epoch 3",
        ),
        ("a wave was committed", "migrating", "1 wave committed so far; the ranks are at epoch 4"),
        ("ended", "committed", "every wave of the plan is in place"),
    ]


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (
            DeliveredGain(1.0, 0.217, 0.01, -0.101, 0.444, None, 56),
            "delivered 21.7% saved (95 % interval 10.1% slower to 44.4% saved), on 56 steps",
        ),
        (
            DeliveredGain(1.0, -2.519, 0.01, -3.0, -2.0, None, 64),
            "delivered 3.5x as long (95 % interval 3.0x as long to 4.0x as long), on 64 steps",
        ),
        (
            DeliveredGain(1.0, unknown_because="no rank reports seconds"),
            "delivered gain unknown: no rank reports seconds",
        ),
    ],
)
def test_a_measured_gain_is_told_beside_its_promise(gain, words):
    records, plan = PlanRecords(), make_plan("mine").plan
    plan.numbers.update(gain=0.334, gain_lower=0.324)
    records.add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, NOW)
    records.measured(records.get(plan.plan_id), gain, NOW)
    shown = words if gain.gain is None else f"promised 33.4% (at least 32.4%), {words}"
    assert told(records.get(plan.plan_id).story)[-1] == ("gain measured", "committed", shown)


def test_a_plan_that_starts_by_itself_was_not_made_by_a_person():
    row = {"at": 1.0, "event": "created", "phase": "approved", "reason": "load_changed"}
    assert told([{**row, "by": "auto"}]) == [
        ("created in mode auto", "approved", "traffic changed, and the change cost balance")
    ]


def test_a_story_fits_a_narrow_terminal_and_shows_what_it_does_not_know():
    rows = [
        {"at": 1.0, "event": "ended", "phase": "refused", "reason": "stale_base"},
        {"at": 2.0, "event": "a_new_event", "new_limit_s": 3.0, "new_word": "x"},
    ]
    lines = drawn(story_table(rows), 80)
    assert max(map(len, lines)) <= 80
    assert "superseded" in lines[1] and "(stale_base)" in "".join(lines)
    assert told(rows)[1] == ("a new event", "-", "new limit 3 s; new word x")
