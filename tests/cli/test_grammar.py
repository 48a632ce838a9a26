"""The commands there are, by their names; what they share; and how long a help may be."""

import pytest

from evenkeel_moe.cli.exits import Exit
from tests.cli.conftest import COMMANDS, help_of

NAMES = """
status recommend capacity resize pause resume decisions heatmap audit offline profile demo fleet
serve
fleet resize
plan create|list|show|story|approve|cancel|rollback
policy get|set
placement list|export
deployment forget|quarantine
context set|use|list
replay compare|plan|inspect
record sglang|vllm
config check|print
engines check
"""
HIDDEN = {"rank"}
GONE = ("freeze", "hold", "forget", "quarantine", "epochs", "story", "export", "policy mode=auto")


def options(command):
    return {name for one in command.params for name in one.opts if name.startswith("-")}


def test_these_are_the_commands():
    wanted: set[tuple[str, ...]] = set()
    for line in NAMES.strip().splitlines():
        first, _, rest = line.partition(" ")
        if "|" in rest or first in ("engines", "fleet"):
            wanted |= {(first, name) for name in rest.split("|")}
        else:
            wanted |= {(name,) for name in line.split()}
    found = {path for path, command in COMMANDS.items() if not command.hidden}
    assert found == wanted
    assert {path[0] for path, command in COMMANDS.items() if command.hidden} == HIDDEN


@pytest.mark.parametrize("words", GONE)
def test_old_names_are_gone(command, words):
    code, out, err = command(*words.split())
    assert (code, out) == (Exit.USAGE, "")
    assert "No such command" in err


def test_files_are_named_with_out_and_forms_with_output():
    for path, command in COMMANDS.items():
        found = options(command)
        if "-o" in found:
            assert "--output" in found, path
        assert not found & {"--json", "--folder", "--run-folder", "--html", "--save-plans"}, path
        by_name = {name: one for one in command.params for name in one.opts}
        if "--out" in found:
            assert by_name["--out"].opts == ["--out"], path


def test_every_answer_of_the_controller_has_the_same_forms():
    for path, command in COMMANDS.items():
        if "--deployment" in options(command) and path not in (
            *(("pause",), ("resume",), ("fleet",), ("context", "set"), ("placement", "export")),
        ):
            assert {"-o", "-d", "--address", "--context"} <= options(command), path


@pytest.mark.parametrize("words", [("replay", "compare"), ("replay", "plan"), ("offline",)])
def test_commands_on_recordings_have_eight_options_of_their_own(words):
    own = [one for one in COMMANDS[words].params if one.opts[0].startswith("-")]
    shared = {"--output", "--help"}
    assert len([one for one in own if not shared & set(one.opts)]) <= 8
    assert "--config" in options(COMMANDS[words])


@pytest.mark.parametrize("words", list(COMMANDS), ids=" ".join)
def test_a_help_fits_two_screens_of_80_columns(words):
    out = help_of(words, 80)
    limit = 70 if words == ("demo",) else 50
    assert len(out.splitlines()) <= limit
    assert max(map(len, out.splitlines())) <= 80
