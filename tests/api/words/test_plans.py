"""A plan and its story in words."""

import json
from dataclasses import replace

import pytest

from evenkeel_moe.api.words.plans import plan_text, story_rows
from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.delivered import DeliveredGain, ServingSpeed
from evenkeel_moe.model.plan import PlanKind, PlanPhase, phase_text
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from tests.api.fakes import NOW, make_plan

PROMISED = "promised 33.4% (at least 32.4%), "


def told(*rows, kind=PlanKind.MANUAL):
    record = make_plan("mine", story=tuple({"at": NOW, **row} for row in rows))
    return [
        row["text"] for row in story_rows(replace(record, plan=replace(record.plan, kind=kind)))
    ]


def test_every_reason_has_a_sentence_and_an_unknown_one_is_shown_as_it_is():
    for reason in Reason:
        assert sentence(reason) != f"{reason}." and sentence(reason).endswith("."), reason
    assert sentence("brand_new") == "brand_new."
    assert sentence(None) == "The reason is unknown."


def test_a_story_tells_events_reasons_and_waves():
    records, plan = PlanRecords(), make_plan("mine").plan
    (wave,) = plan.waves
    plan = replace(plan, waves=tuple(replace(wave, index=index) for index in range(3)))
    records.add(plan, PlanPhase.PROPOSED, Reason.MANUAL_REQUEST, NOW, by="alice")
    begun = {"phase": PlanPhase.MIGRATING, "reason": Reason.PLAN_STARTED}
    stalled = {"phase": PlanPhase.STALLED, "reason": Reason.RANKS_MISSING, "detail": "rank 3"}
    for event, row in (
        ("approved", {"phase": PlanPhase.APPROVED, "by": "bob"}),
        ("wave_started", {**begun, "detail": "wave 1 of 3: 1 transfer"}),
        ("wave_agreed", {"wave_agreed": True}),
        ("wave_committed", {"waves_committed": 1, "detail": "epoch 4"}),
        ("stalled", stalled),
        ("resumed", begun),
        ("wave_started", begun),
        ("recovered", {"waves_committed": 1, "detail": "epoch 4"}),
        ("wave_committed", {"waves_committed": 3, "detail": "found on the ranks"}),
    ):
        records.change(records.get(plan.plan_id), event, NOW, **row)
    records.complete(records.get(plan.plan_id), NOW)
    rows = story_rows(records.get(plan.plan_id))
    assert [row["text"] for row in rows] == [
        "Created by alice: An operator asked for this plan.",
        "Approved by bob",
        "Wave 1 of 3 began: 1 copy, 1 kB",
        "All ranks agreed on wave 1 of 3",
        "Wave 1 of 3 was committed: the ranks are at epoch 4",
        f"Stalled: {sentence(Reason.RANKS_MISSING)} (rank 3)",
        "Continued",
        "Wave 2 of 3 began: 1 copy, 1 kB",
        "Taken over by a new leader (epoch 4)",
        "Waves 2 to 3 of 3 were committed: the ranks are at epoch 6 (found on the ranks)",
        "Ended: All waves were carried out.",
    ]
    assert [rows[0]["phase_text"], rows[-1]["phase_text"]] == ["proposed", "committed"]


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (
            DeliveredGain(1.0, 0.217, 0.01, -0.101, 0.444, None, 56),
            (
                f" on 56 steps: {PROMISED}delivered 21.7% saved "
                "(95 % interval 10.1% slower to 44.4% saved)"
            ),
        ),
        (
            DeliveredGain(1.0, -2.519, 0.01, -3.0, -2.0, None, 64),
            (
                f" on 64 steps: {PROMISED}delivered 3.5x as long "
                "(95 % interval 3.0x as long to 4.0x as long)"
            ),
        ),
        (
            DeliveredGain(1.0, unknown_because="no rank reports seconds"),
            f": {PROMISED}delivered unknown, because no rank reports seconds",
        ),
        (
            DeliveredGain(
                1.0,
                unknown_because="no rank reports seconds",
                before=ServingSpeed(0.0123, 1612.4),
                after=ServingSpeed(0.0101, 1748.0),
            ),
            (
                f": {PROMISED}delivered unknown, because no rank reports seconds;"
                " a step took 12.3 ms and 10.1 ms before and after, at 1,612 and 1,748 tokens/s"
            ),
        ),
        (
            DeliveredGain(
                1.0, 0.217, 0.01, 0.2, 0.23, None, 56, after=ServingSpeed(0.0101, 1748.0)
            ),
            (
                f" on 56 steps: {PROMISED}delivered 21.7% saved (95 % interval 20.0% to 23.0%);"
                " a step took - and 10.1 ms before and after, at - and 1,748 tokens/s"
            ),
        ),
    ],
)
def test_a_measured_gain_is_told_beside_its_promise(gain, words):
    records, plan = PlanRecords(), make_plan("mine").plan
    plan.numbers.update(gain=0.334, gain_lower=0.324)
    records.add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, NOW)
    records.measured(records.get(plan.plan_id), gain, NOW)
    assert story_rows(records.get(plan.plan_id))[-1]["text"] == f"MoE time measured{words}"


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ((112, 112, 0, 0), "112 of 112 moved experts answer as before"),
        ((1, 1, 0, 0), "1 of 1 moved expert answers as before"),
        ((9, 6, 1, 0), "6 of 9 moved experts answer as before; 1 does not; 2 were moved again"),
        ((9, 9, 0, 2), "9 of 9 moved experts answer as before; 2 answer as another expert does"),
    ],
)
def test_what_moved_experts_answer_is_told_with_its_doubts(figures, words):
    names = ("moved", "same", "different", "blind")
    (found,) = told({"event": "answered", **dict(zip(names, figures, strict=True))})
    assert found.startswith(words)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (PlanKind.ROLLBACK, "A rollback returns to an earlier placement, so MoE time may rise."),
        (PlanKind.EVACUATION, "experts off ranks that retire, so MoE time may rise."),
    ],
)
def test_a_plan_for_another_reason_that_cost_time_says_why(kind, why):
    row = {"event": "measured", "delivered_gain": -0.204}
    (words,) = told(row, kind=kind)
    assert words.startswith("MoE time measured: delivered 20.4% slower") and words.endswith(why)


def test_a_plan_that_starts_by_itself_was_not_made_by_a_person_and_news_are_shown_as_they_are():
    made = {"event": "created", "phase": "approved", "reason": "load_changed", "by": "auto"}
    assert told(made) == [f"Created in mode auto: {sentence('load_changed')}"]
    assert told({"event": "brand_new"}) == ["brand new"]


def test_a_plan_that_another_one_replaced_is_superseded_one_that_breaks_a_rule_is_refused():
    for reason in ("stale_base", "generation_changed", "weights_version_changed"):
        assert phase_text("refused", reason) == "superseded"
        assert phase_text("aborted", reason) == "aborted"
    assert phase_text("refused", "empty_slots") == "refused"


def test_a_proposal_that_was_cancelled_is_rejected_a_plan_that_was_cancelled_is_not():
    def cancelled(phase):
        asked = {"at": NOW, "event": "cancel_requested", "phase": phase, "by": "kim"}
        ended = {"phase": PlanPhase.CANCELLED, "reason": Reason.CANCELLED, "error": "cancelled"}
        record = make_plan(story=(asked,), **ended)
        return story_rows(record)[0]["text"], plan_text(record)

    rejected = ("Rejected by kim", "An operator rejected it. Nothing has moved.")
    assert cancelled("proposed") == rejected
    assert cancelled("migrating") == ("Cancellation requested by kim", "An operator cancelled it.")


@pytest.mark.parametrize(
    ("phase", "reason", "error", "words"),
    [
        ("proposed", "plan_proposed", None, "It waits for approval. Nothing has moved."),
        (
            "refused",
            "stale_base",
            "the epoch is 4",
            f"It never began, and nothing is wrong with it. {sentence('stale_base')}",
        ),
        ("aborted", "rank_lost", "rank 2", "A rank was lost."),
        ("committed", "committed", None, "All waves were carried out."),
    ],
)
def test_a_plan_says_where_it_stands(phase, reason, error, words):
    record = make_plan(phase=PlanPhase(phase), reason=Reason(reason), error=error)
    assert plan_text(record) == words


@pytest.mark.fault(
    "a reader of a plan with a damaged row in its story", "got an error for the whole plan"
)
@pytest.mark.parametrize(
    "row",
    [
        {"event": "answered", "moved": 3},
        {"event": "measured", "delivered_gain": "much"},
        {"event": "wave_committed", "waves_committed": "2"},
        {"event": "ended", "reason": [1]},
    ],
)
def test_a_row_of_another_form_is_shown_as_it_is_stored(row):
    shown, after = told(row, {"event": "resumed"})
    assert (json.loads(shown), after) == ({"at": NOW, **row}, "Continued")
