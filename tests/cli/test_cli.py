import os
import re
import subprocess
import sys

import pytest

from tests.cli.conftest import ALL, COMMANDS, help_of
from tests.waiting import deadline


@pytest.mark.parametrize("command", list(COMMANDS), ids=" ".join)
def test_help_explains_every_option(command):
    out = help_of(command, 160)
    assert not re.search(r"\s[.,;](\s|$)", out)
    assert "<bool>" not in out, "a flag takes no value"
    options = out.split("\nOptions:\n")[1]
    for row in re.split(r"\n(?=  -)", options):
        assert len(row.split()) >= 3, row


brackets = pytest.mark.fault(
    "a reader of the help", "usage lines had `[[NAME]]`, and an option had the default `()`"
)


@brackets
@pytest.mark.parametrize("command", [path for path in COMMANDS if path != ("fleet",)], ids=" ".join)
def test_a_usage_line_names_arguments_as_the_list_below_it(command):
    out = help_of(command, 160)
    usage = out.splitlines()[0]
    named = re.fullmatch(rf"Usage: \w+ {' '.join(command)} \[OPTIONS\] ?(.*)", usage)
    assert named, usage
    assert re.fullmatch(r"( ?[\[{][A-Z]+(=VALUE)?[\]}](\.\.\.)?)*", named[1]), usage
    listed = out.partition("\nArguments:\n")[2]
    names = re.findall(r"[A-Z]+(?:=VALUE)?", named[1])
    assert [
        line.split()[0] for line in listed.splitlines() if re.match(r"  +[A-Z=]+ +<", line)
    ] == (names), listed


@brackets
@pytest.mark.parametrize("command", list(COMMANDS), ids=" ".join)
def test_a_default_in_a_help_is_a_value_or_words(command):
    text = " ".join(help_of(command, 160).split())
    for value in re.findall(r"default: ([^;\]]*)[;\]]", text):
        assert value not in ("", "()", "None", "[", "{}", "''"), text


@pytest.mark.parametrize("path", list(ALL), ids=" ".join)
@pytest.mark.parametrize("width", [60, 80])
def test_a_help_cuts_no_name_and_no_sentence(path, width):
    out = help_of(path, width)
    shown = [each for each in ALL[path].params if not getattr(each, "hidden", False)]
    names = {name for each in shown for name in (*each.opts, *each.secondary_opts)}
    for name in (name for name in names if name.startswith("--")):
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", out), name
    assert "…" not in out
    # Below 80 columns a list of commands shortens sentences; the page of each has it whole.
    assert width < 80 or not re.search(r"\w\.\.\.$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= width


def test_help_names_the_exit_codes():
    assert "3 no controller at the address" in " ".join(help_of((), 160).split())


def test_help_is_quick_and_loads_no_heavy_library():
    code = (
        "import sys; from typer.testing import CliRunner; from evenkeel_moe.cli import app;"
        " assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        " heavy = {'torch', 'numpy', 'numba', 'fastapi', 'grpc', 'redis'} & set(sys.modules);"
        " assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=deadline(30),
        env={**os.environ, "TERM": "dumb"},
    )


def test_a_process_of_the_planner_does_not_load_the_command_line():
    # As multiprocessing does in a process that it spawns.
    code = (
        "import runpy, sys; runpy.run_module('evenkeel_moe', run_name='__mp_main__');"
        " print('evenkeel_moe.cli' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(30)
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
