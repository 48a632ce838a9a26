import io
import json
import sys

import pytest

from evenkeel_moe.cli.console import print_json, work_bars


def test_lines_in_a_pipe_end_without_blanks_and_fit_columns(run, monkeypatch):
    for command in (
        ("status",),
        ("status", "demo"),
        ("decisions", "demo"),
        ("policy", "-d", "demo"),
    ):
        lines = run(*command)[1].splitlines()
        assert lines == [line.rstrip() for line in lines]
    assert "POLICY" in run("status")[1]
    monkeypatch.setenv("COLUMNS", "80")
    out = run("status")[1]
    assert "POLICY" not in out.splitlines()[0]
    assert max(map(len, out.splitlines())) <= 80


def test_json_has_null_for_numbers_that_json_does_not_have(capsys):
    nan, infinity = float("nan"), float("inf")
    print_json({"a": nan, "b": [1.5, (infinity, "text")], "c": {1: nan}})
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [1.5, [None, "text"]],
        "c": {"1": None},
    }


def test_work_bars_show_the_name_of_a_policy_unchanged(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

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
