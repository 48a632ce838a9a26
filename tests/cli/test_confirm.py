import io
import json
import os
import pty
import sys
from dataclasses import replace

import pytest

from evenkeel_moe.cli.exits import Exit
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.plan import PlanPhase
from evenkeel_moe.model.policy import Mode
from tests.api.fakes import make_plan, make_rank
from tests.cli.conftest import Terminal

MOVING = [
    ("plan", "approve", "mine", "-d", "demo"),
    ("plan", "rollback", "-d", "demo"),
    ("plan", "create", "-d", "demo", "--start"),
    ("policy", "set", "-d", "demo", "mode=auto"),
    ("deployment", "forget", "demo"),
    ("deployment", "quarantine", "-d", "demo", "--clear"),
]


@pytest.mark.parametrize("words", MOVING, ids=" ".join)
def test_without_a_terminal_nothing_moves_unless_yes_is_given(run, operations, words):
    operations.records["demo"] = [make_plan("mine")]
    code, out, err = run(*words)
    assert (code, out) == (Exit.USAGE, "")
    assert "--yes" in err
    assert (operations.calls, len(operations.records["demo"])) == ([], 1)
    assert operations.records["demo"][0].phase == "proposed"


def test_the_operator_sees_the_plan_and_decides(run, operations, monkeypatch):
    operations.records["demo"] = [make_plan("mine")]
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, out, err = run("plan", "approve", "mine", "-d", "demo")
    assert (code, out) == (1, "")
    digest = operations.records["demo"][0].plan.target.digest
    assert (
        "Ranks of demo copy 1 expert, 1 kB, in 1 wave. Plan mine, whose target has digest"
        f" {digest[:12]}, takes the placement from epoch 3 to epoch 4; the expected stall is not"
        " known. Go on? [y/N]: " in err
    )
    assert "0.600 -> 0.900" in err
    assert operations.records["demo"][0].phase == "proposed"
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    code, out, _ = run("plan", "approve", "mine", "-d", "demo")
    assert (code, "approved" in out) == (0, True)


@pytest.mark.fault("an operator", "a line pasted behind the command answered its question")
@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"y\n", 0)])
def test_only_what_is_typed_after_the_question_answers_it(
    run, operations, monkeypatch, answer, code
):
    class Asked(io.StringIO):
        def write(self, text):
            if text.endswith("[y/N]: "):
                os.write(keyboard, answer)
            return super().write(text)

    operations.records["demo"] = [make_plan("mine")]
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"n\n" if code == 0 else b"y\n")
    with open(terminal) as stdin, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", stdin)
        patched.setattr(sys, "stderr", Asked())
        assert run("plan", "approve", "mine", "-d", "demo")[0] == code
    os.close(keyboard)


def test_the_plan_that_was_shown_is_approved_or_none(run, operations, monkeypatch):
    """A store that lost the plan may hold another one under the same id by then."""
    shown = make_plan("mine")
    operations.records["demo"] = [shown]
    other = replace(shown, plan=replace(shown.plan, target=shown.plan.base, waves=()))

    class Slow(Terminal):
        def readline(self, size=-1):
            operations.records["demo"] = [other]
            return super().readline(size)

    monkeypatch.setattr(sys, "stdin", Slow("y\n"))
    code, out, err = run("plan", "approve", "mine", "-d", "demo")
    assert (code, out) == (Exit.REFUSED, "")
    assert f"the target of plan mine has digest {other.plan.target.digest}" in err
    assert operations.records["demo"][0].phase == "proposed"


@pytest.mark.fault("two operators", "a change of the policy overwrote one made meanwhile")
@pytest.mark.parametrize("also", ["cycle_s=60", "policy=gem"])
def test_the_policy_that_was_read_is_changed_or_none(run, operations, monkeypatch, also):
    changed = {"mode": "observe", "cycle_s": 90}

    class Slow(Terminal):
        def readline(self, *_):
            operations.document = changed
            return "y\n"

    operations.document = {"mode": "observe", "cycle_s": 30}
    monkeypatch.setattr(sys, "stdin", Slow())
    code, out, err = run("policy", "set", "-d", "demo", "mode=auto", also)
    assert (code, out, operations.document) == (1, "", changed)
    assert "The document has changed since it was read" in err
    operations.document = {"mode": "observe", "cycle_s": 30}
    assert run("policy", "set", "-d", "demo", "mode=auto", also, "--yes")[0] == 0
    assert operations.document["mode"] == "auto"


def test_a_plan_that_would_start_at_once_is_made_and_shown_first(run, operations, monkeypatch):
    words = ("plan", "create", "-d", "demo", "--start")
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, out, err = run(*words, "--id", "mine")
    assert (code, out) == (1, "")
    assert "0.600 -> 0.900" in err
    assert "Plan mine, whose target has digest" in err
    assert err.endswith("Aborted!\n") and "plan mine is cancelled; it has moved nothing" in err
    assert operations.records["demo"][0].phase == "cancelled"
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    code, out, _ = run(*words, "--id", "more")
    assert (code, out.startswith("plan more approved; it moves 1 expert")) == (0, True)
    assert [call[2].approve for call in operations.calls] == [False, False]
    assert operations.records["demo"][0].phase == "approved"


def test_nobody_is_asked_about_a_plan_that_does_not_wait(run, operations):
    operations.records["demo"] = [make_plan("mine", phase=PlanPhase.COMMITTED)]
    code, out, err = run("plan", "approve", "mine", "-d", "demo")
    assert (code, out) == (Exit.REFUSED, "")
    assert "plan mine is committed" in err and "--yes" not in err


def test_a_rollback_asks_with_its_epochs_and_what_it_undoes(run, operations, monkeypatch):
    before = make_plan("mine", phase=PlanPhase.COMMITTED, waves_committed=1)
    before = replace(before, plan=replace(before.plan, base_epoch=Epoch(2)))
    operations.records["demo"] = [before]
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    code, _, err = run("plan", "rollback", "-d", "demo")
    assert code == 0
    assert err == (
        "Ranks of demo copy 1 expert, 1 kB, in 1 wave, to return from epoch 3 to the placement of"
        " epoch 2; expected stall 4 ms of one step for each wave. This undoes plan mine (1 expert,"
        " 1 kB, in 1 wave). Automatic plans wait for `evenkeel resume -d demo`. Go on? [y/N]: "
    )
    # The epoch that was shown is requested, also if another plan has ended by then.
    assert operations.calls == [("rollback", "demo", 2, "alice")]
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    code, _, err = run("plan", "rollback", "-d", "demo", "--to-epoch", "1")
    assert (code, "to the placement of epoch 1; expected" in err) == (1, True), err
    assert len(operations.calls) == 1


def test_a_rollback_to_a_placement_asks_with_its_epoch_and_history(run, operations, monkeypatch):
    rows = json.loads(run("placement", "list", "-d", "demo", "-o", "json")[1])
    replaced = next(row for row in rows if row["replaced"])
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    code, _, err = run("plan", "rollback", "-d", "demo", "--to-placement", replaced["digest"])
    assert code == 0
    digest = replaced["digest"]
    assert f"from epoch 3 to placement {digest[:12]} of epoch 8; expected stall" in err
    assert operations.calls == [("rollback", "demo", digest, "alice")]
    code, _, err = run("plan", "rollback", "-d", "demo", "--to-placement", "0" * 32)
    assert code == Exit.REFUSED and f"no placement {'0' * 32} is recorded" in err
    both = ("--to-placement", digest, "--to-epoch", "2", "--yes")
    assert run("plan", "rollback", "-d", "demo", *both)[0] == Exit.USAGE
    assert len(operations.calls) == 1


def test_without_an_earlier_placement_no_rollback_is_asked_for(run, operations):
    operations.show(rollback_epoch=None)
    code, out, err = run("plan", "rollback", "-d", "demo")
    assert (code, out) == (Exit.REFUSED, "")
    assert "is recorded" in err


def test_what_moves_nothing_needs_no_confirmation(run, operations):
    assert run("plan", "create", "-d", "demo", "--dry-run")[0] == 0
    for mode in Mode:
        operations.show(mode=mode)
        assert run("plan", "create", "-d", "demo")[0] == 0
        assert operations.records["demo"][0].phase == "proposed"
    assert run("policy", "set", "-d", "demo", "mode=propose")[0] == 0


def test_a_deployment_without_ranks_is_forgotten(run, operations):
    operations.show(ranks=tuple(make_rank(rank, fresh=False) for rank in range(2)))
    code, _, err = run("deployment", "forget", "demo", "--yes")
    assert (code, "admin" in err) == (Exit.UNAUTHORIZED, True)
    assert run("deployment", "forget", "--yes")[0] == Exit.USAGE
