import io
import sys

import pytest

from evenkeel_moe.cli.client import Exit
from evenkeel_moe.model.policy import Mode
from tests.api.fakes import FakeView, make_plan, make_rank, make_status


class Terminal(io.StringIO):
    def isatty(self):
        return True


MOVING = [
    ("plan", "approve", "demo", "mine"),
    ("plan", "rollback", "demo"),
    ("plan", "create", "demo"),
    ("plan", "create", "demo", "--start"),
    ("policy", "demo", "mode=auto"),
    ("forget", "demo"),
    ("quarantine", "demo", "--clear"),
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
    code, out, err = run("plan", "approve", "demo", "mine")
    assert (code, out) == (1, "")
    assert "Ranks of demo copy 1 expert, 1 kB, in 1 wave." in err
    assert "0.600 -> 0.900" in err
    assert operations.records["demo"][0].phase == "proposed"
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    code, out, _ = run("plan", "approve", "demo", "mine")
    assert (code, "approved" in out) == (0, True)


def test_what_moves_nothing_needs_no_confirmation(run, operations):
    assert run("plan", "create", "demo", "--dry-run")[0] == 0
    operations.views["demo"] = FakeView(make_status(mode=Mode.PROPOSE), {}, None)
    assert run("plan", "create", "demo")[0] == 0
    assert run("policy", "demo", "mode=propose")[0] == 0


def test_a_deployment_without_ranks_is_forgotten(run, operations):
    gone = tuple(make_rank(rank, fresh=False) for rank in range(2))
    operations.views["demo"] = FakeView(make_status(ranks=gone), {}, None)
    code, _, err = run("forget", "demo", "--yes")
    assert (code, "admin" in err) == (Exit.UNAUTHORIZED, True)
    assert run("forget", "--yes")[0] == Exit.USAGE
