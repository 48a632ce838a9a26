"""The list of plans, and what the commands that change a plan say afterwards."""

import json

import pytest

from evenkeel_moe.cli import plan_words
from evenkeel_moe.cli.plan_tables import plans_table
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from tests.api.fakes import NOW, make_plan, make_status
from tests.cli.conftest import drawn


def plan(plan_id, **changes):
    found = {
        "plan_id": plan_id,
        "deployment": "demo",
        "kind": "automatic",
        "policy": "keel",
        "phase": "committed",
        "reason": "committed",
        "reason_text": "All waves were carried out.",
        "planned_because": "balance_below_threshold",
        "base_epoch": 0,
        "waves": 3,
        "waves_committed": 3,
        "moves": 31,
        "nbytes": 2_050_000,
        "created_at": 60.0,
        "text": "All waves were carried out.",
        "error": None,
        "numbers": {"gain": 0.339},
        "delivered": {"gain": 0.331, "lower": 0.3, "upper": 0.36},
    }
    found |= changes
    ended = PlanPhase(found["phase"]).terminal
    return {"phase_text": found["phase"], "ended": ended, "may_cost_text": None} | found


PLAN = plan("automatic-0-0bc37c751748")


def rollback(to_epoch, plan_id="rollback-0bc37c751748", **changes):
    values = {"kind": "rollback", "policy": "rollback", "base_epoch": 3, "created_at": 120.0}
    return plan(plan_id, numbers={"to_epoch": to_epoch}, delivered=None, **(values | changes))


def test_a_rollback_names_the_epoch_that_it_returns_to():
    heads, first, second, *_ = drawn(plans_table([rollback(2.0), PLAN]), 200, True)
    begin, end = heads.index("RETURNS TO"), heads.index("WHY MADE")
    assert (first[begin:end].strip(), second[begin:end].strip()) == ("epoch 2", "-")


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("created_at", [60.0, 100_000.0])
def test_the_list_shows_when_plans_were_made_at_usual_widths(width, created_at):
    lines = drawn(plans_table([rollback(0.0, created_at=created_at), PLAN]), width)
    heads = lines[0].split()
    assert {"PLAN", "PHASE", "PROMISED", "DELIVERED", "CREATED"} <= set(heads)
    same_day = created_at < 86_400
    assert lines[2].endswith("00:01:00" if same_day else "01-01 00:01")
    assert max(map(len, lines)) <= width
    assert ("created: UTC, all on 1970-01-01" in lines) == same_day


def test_a_measured_gain_whose_interval_contains_0_is_uncertain():
    def listed(gain, lower, upper):
        delivered = {"gain": gain, "lower": lower, "upper": upper}
        lines = drawn(plans_table([plan("p", delivered=delivered)]), 200, True)
        end = lines[0].index("DELIVERED") + len("DELIVERED")
        cell, text = lines[1][:end].split("  ")[-1].strip(), " ".join(lines)
        return cell, "uncertain: the 95 % interval of the measured" in text, "slower: " in text

    assert listed(0.333, -0.017, 0.562) == ("uncertain", True, False)
    assert listed(-0.05, -0.2, 0.1) == ("uncertain", True, False)
    assert listed(0.333, 0.001, 0.562) == ("33.3% saved", False, False)
    assert listed(-0.05, -0.08, -0.01) == ("5.0% slower", False, True)


def test_a_reason_that_repeats_the_phase_is_not_shown():
    assert "WHY THIS PHASE" not in drawn(plans_table([PLAN]), 200, True)[0]
    runs = plan("runs", phase="migrating", reason="plan_started")
    assert "WHY THIS PHASE" not in drawn(plans_table([runs, PLAN]), 200, True)[0]
    lost = plan("lost", phase="aborted", reason="rank_lost")
    assert drawn(plans_table([lost, PLAN]), 200, True)[1].split()[2] == "rank_lost"


def test_a_proposal_does_not_say_twice_why_it_was_made(run, operations):
    reason = Reason.MANUAL_REQUEST
    operations.records["demo"] = [make_plan("mine", reason=reason)]
    wide = run("plan", "list", "-d", "demo", "-o", "wide")[1]
    assert wide.splitlines()[0].count("WHY") == 1


@pytest.mark.parametrize("width", [80, 100])
def test_the_reason_of_a_phase_is_shown_at_usual_widths(width):
    lost = plan("automatic-7-0bc37c751748", phase="aborted", reason="weights_version_changed")
    lost["reason_text"] = "The weights of the model changed."
    lines = drawn(plans_table([lost, rollback(0.0), PLAN]), width)
    assert lines[1].split()[:2] == ["automatic-7-0bc37c751748", "aborted"]
    assert lines[2].startswith("rollback-0bc37c751748")
    assert "weights_version_changed: The weights of the model changed." in lines
    assert max(map(len, lines)) <= width


def test_a_proposal_that_another_plan_replaced_is_superseded_and_not_refused(run, operations):
    records = PlanRecords()
    records.add(make_plan("mine").plan, PlanPhase.PROPOSED, Reason.MANUAL_REQUEST, NOW)
    records.sweep(lambda record: True, NOW)  # As the first wave of another plan does.
    operations.records["demo"] = list(records.by_id.values())
    row = run("plan", "list", "-d", "demo", "-o", "wide")[1].splitlines()[1]
    assert row.split()[:3] == ["mine", "superseded", "stale_base"]
    for command in ("list", "show", "story"):
        name = [] if command == "list" else ["mine"]
        out = run("plan", command, "-d", "demo", *name)[1]
        assert "superseded" in out and "refused" not in out
    answer = run("plan", "show", "mine", "-d", "demo", "-o", "json")[1]
    assert json.loads(answer)["phase"] == "refused"


def test_a_plan_that_breaks_a_rule_is_refused():
    wrong = plan("wrong", phase="refused", reason="empty_slots", waves_committed=0)
    lines = drawn(plans_table([wrong]), 200, True)
    assert lines[1].split()[1:3] == ["refused", "empty_slots"]
    assert "superseded" not in "\n".join(lines)


def test_without_plans_the_list_says_so():
    assert drawn(plans_table([])) == ["no plan yet"]


SHOW = "evenkeel plan show mine -d demo --watch"
WAITS = "It begins once all ranks are connected and its record is stored."


def begun(phase, reason="plan_started", **changes):
    """Return a plan of which no wave is committed, or with changes of that."""
    numbers = {"to_epoch": 8.0}
    values = {"phase": phase, "reason": reason, "numbers": numbers, "waves_committed": 0}
    return plan("mine", **(values | changes))


def test_each_change_of_a_plan_ends_in_a_sentence(run, operations):
    operations.records["demo"] = [make_plan("mine")]
    approve = run("plan", "approve", "mine", "-d", "demo", "--yes")
    assert approve == (
        0,
        f"plan mine approved; it moves 1 expert in 1 wave. {WAITS} Follow it: {SHOW}\n",
        "",
    )
    cancel = run("plan", "cancel", "mine", "-d", "demo")
    assert cancel == (0, "plan mine cancelled; it has moved nothing.\n", "")
    code, out, _ = run("plan", "rollback", "-d", "demo", "--id", "mine-2", "--yes")
    assert (code, len(out.splitlines())) == (0, 2)
    assert out.endswith("\nAutomatic plans are held until: evenkeel resume -d demo\n")
    operations.records["demo"] = [make_plan("mine", phase=PlanPhase.APPROVED)]
    answer = json.loads(run("plan", "cancel", "mine", "-d", "demo", "-o", "json")[1])
    assert (answer["plan_id"], answer["phase"]) == ("mine", "cancelled")


def test_a_new_plan_ends_with_the_command_that_starts_or_follows_it(run, operations):
    create = ("plan", "create", "-d", "demo", "--yes")
    out = run(*create, "--id", "mine")[1]
    start = "tart it: evenkeel plan approve mine -d demo"
    assert out.splitlines()[-1] == f"Nothing has moved. S{start}"
    operations.views["demo"].shown = make_status(start_refused_text="paused for another 5 min")
    assert run(*create, "--id", "mine")[1].splitlines()[-2:] == [
        "Nothing has moved. An approval would be refused now: paused for another 5 min.",
        f"After that, s{start}",
    ]
    assert run(*create, "--id", "more", "--start")[1].splitlines()[-1] == (
        f"{WAITS} Follow it: " + SHOW.replace("mine", "more")
    )
    assert json.loads(run(*create, "--id", "third", "-o", "json")[1])["plan_id"] == "third"


def test_a_rollback_names_its_epoch_and_the_hold():
    first, second = plan_words.rolled_back(begun("migrating")).splitlines()
    placement = "the placement of epoch 8; it moves 31 experts in 3 waves"
    assert first == f"plan mine returns to {placement}. Follow it: {SHOW}"
    assert second == "Automatic plans are held until: evenkeel resume -d demo"
    unknown = plan_words.rolled_back(begun("approved", numbers={}))
    assert "returns to an earlier placement; it moves" in unknown


def test_a_cancel_says_what_stays():
    going_on = plan_words.cancelled(begun("migrating", waves_committed=1))
    assert going_on.startswith("plan mine is being cancelled: ") and going_on.endswith(SHOW)
    partly = plan_words.cancelled(begun("cancelled", "cancelled", waves_committed=1))
    assert partly == (
        "plan mine cancelled after 1 of 3 waves, which stay. Return to the placement before it:"
        " evenkeel plan rollback -d demo"
    )


@pytest.mark.parametrize("words", [plan_words.approved, plan_words.rolled_back])
def test_a_repeated_request_whose_plan_has_ended_says_so(words):
    ended = words(plan("mine"))
    assert ended == "plan mine is committed: All waves were carried out."
    shown = {"phase_text": "superseded", "text": "It never began.", "error": "the epoch is 4"}
    failed = begun("refused", "stale_base", **shown)
    assert words(failed) == "plan mine is superseded: It never began. the epoch is 4"
