"""What the commands that change a plan say afterwards."""

import json

import pytest

from evenkeel_moe.cli import plan_words
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.plan import PlanPhase
from tests.api.fakes import make_plan

SHOW = "evenkeel plan show mine -d demo --watch"
WAITS = "It begins once all ranks are connected and its record is stored."


def plan(phase, reason="plan_started", **changes):
    found = {
        "plan_id": "mine",
        "deployment": "demo",
        "phase": phase,
        "reason": reason,
        "phase_text": phase,
        "ended": PlanPhase(phase).terminal,
        "text": "All waves were carried out.",
        "error": None,
        "waves": 3,
        "waves_committed": 0,
        "moves": 31,
        "numbers": {"to_epoch": 8.0},
    }
    return found | changes


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


def test_a_new_plan_ends_with_the_command_that_starts_or_follows_it(run):
    create = ("plan", "create", "-d", "demo", "--yes")
    out = run(*create, "--id", "mine")[1]
    assert out.splitlines()[-1] == "Nothing has moved. Start it: evenkeel plan approve mine -d demo"
    assert run(*create, "--id", "more", "--start")[1].splitlines()[-1] == (
        f"{WAITS} Follow it: " + SHOW.replace("mine", "more")
    )
    assert json.loads(run(*create, "--id", "third", "-o", "json")[1])["plan_id"] == "third"


def test_a_rollback_names_its_epoch_and_the_hold():
    first, second = plan_words.rolled_back(plan("migrating")).splitlines()
    placement = "the placement of epoch 8; it moves 31 experts in 3 waves"
    assert first == f"plan mine returns to {placement}. Follow it: {SHOW}"
    assert second == "Automatic plans are held until: evenkeel resume -d demo"
    unknown = plan_words.rolled_back(plan("approved", numbers={}))
    assert "returns to an earlier placement; it moves" in unknown


def test_a_cancel_says_what_stays():
    going_on = plan_words.cancelled(plan("migrating", waves_committed=1))
    assert going_on.startswith("plan mine is being cancelled: ") and going_on.endswith(SHOW)
    partly = plan_words.cancelled(plan("cancelled", "cancelled", waves_committed=1))
    assert partly == (
        "plan mine cancelled after 1 of 3 waves, which stay. Return to the placement before it:"
        " evenkeel plan rollback -d demo"
    )


@pytest.mark.parametrize("words", [plan_words.approved, plan_words.rolled_back])
def test_a_repeated_request_whose_plan_has_ended_says_so(words):
    ended = words(plan("committed", "committed"))
    assert ended == "plan mine is committed: All waves were carried out."
    shown = {"phase_text": "superseded", "text": "It never began.", "error": "the epoch is 4"}
    failed = plan("refused", Reason.STALE_BASE.value, **shown)
    assert words(failed) == "plan mine is superseded: It never began. the epoch is 4"
