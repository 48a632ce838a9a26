import json
import sys

import pytest

from evenkeel_moe.cli.console import Listing, SafeConsole, TableColumn, print_json, work_bars
from tests.api.fakes import make_plan, make_rank
from tests.cli.conftest import Terminal

STEERING = "\x1b]0;owned\x1b\\ \x1b]52;c;cm0=\x07 \x1b[2J \x7f \x9b31m \u202e \u2066 \u200f"
"""Sets the title and the clipboard of a terminal, clears it, and turns the writing around."""


def steers(text):
    """Return True if a text has a character of its own that a terminal obeys."""
    return any(not line.isprintable() for line in text.splitlines())


def test_lines_in_a_pipe_end_without_blanks_and_fit_columns(run, monkeypatch):
    for command in (
        ("status",),
        ("status", "demo"),
        ("decisions", "-d", "demo"),
        ("policy", "get", "-d", "demo"),
    ):
        lines = run(*command)[1].splitlines()
        assert lines == [line.rstrip() for line in lines]
    assert "POLICY" in run("status", "-o", "wide")[1]
    monkeypatch.setenv("COLUMNS", "80")
    out = run("status")[1]
    assert "POLICY" not in out.splitlines()[0]
    assert max(map(len, out.splitlines())) <= 80


def test_no_text_of_a_rank_or_of_the_store_steers_the_terminal(run, operations):
    ranks = (make_rank(0, node=STEERING, device=STEERING, trouble=STEERING), make_rank(1))
    proposal = make_plan("p-1", story=({"at": 0.0, "event": STEERING, "by": STEERING},))
    operations.show(ranks=ranks, dispatch=STEERING, dispatch_warning=STEERING, proposals=[proposal])
    operations.records["demo"] = [proposal]
    for command in (
        ("status",),
        ("status", "demo"),
        ("status", "demo", "-o", "json"),
        ("plan", "list"),
        ("plan", "show", "p-1", "-d", "demo"),
        ("plan", "story", "p-1", "-d", "demo"),
        ("policy", "set", f"policy={STEERING}"),
        ("plan", "show", "p-1", "--address", f"http://127.0.0.1:1/{STEERING}"),
    ):
        _, out, err = run(*command)
        assert out + err
        assert not steers(out) and not steers(err), command
    assert "\ufffd]0;owned" in run("status", "demo")[1]


@pytest.mark.fault("an operator", "words of a rank forged a line of `evenkeel status` in a pipe")
@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b"])
def test_no_text_of_a_rank_makes_a_line_of_its_own_in_a_pipe(run, operations, end):
    trouble = f"slow{end}rank 1: all experts copied{end}"
    operations.show(ranks=(make_rank(0, trouble=trouble), make_rank(1)))
    lines = run("status", "demo")[1].splitlines()
    assert any("slow" in line for line in lines)
    assert not any(line.startswith("rank 1: all") for line in lines)


def test_a_terminal_gets_the_styles_of_a_table_and_no_other_code(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = SafeConsole(width=200, force_terminal=True)
    with console.capture() as captured:
        console.print(Listing([TableColumn("NODE", 0)], [[STEERING]]))
    out = captured.get()
    assert "\x1b[1mNODE" in out and "\ufffd]0;owned\ufffd\\ \ufffd]52;" in out
    assert not steers(out.replace("\x1b[1m", "").replace("\x1b[0m", ""))


def test_json_has_null_for_numbers_that_json_does_not_have(capsys):
    nan, infinity = float("nan"), float("inf")
    print_json({"a": nan, "b": [1.5, (infinity, "text")], "c": {1: nan}})
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [1.5, [None, "text"]],
        "c": {"1": None},
    }


def test_work_bars_show_the_name_of_a_policy_unchanged(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with work_bars() as (on_work, _):
        on_work("[/best]: planning", 0)
    assert "[/best]: planning" in terminal.getvalue()


def test_an_interrupt_of_compiled_code_is_raised_as_an_interrupt():
    inner = SystemError("unpickle returned a result with an exception set")
    inner.__cause__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), work_bars():
        raise SystemError("CPUDispatcher returned a result with an exception set") from inner
    with pytest.raises(SystemError, match="of its own"), work_bars():
        raise SystemError("of its own")
