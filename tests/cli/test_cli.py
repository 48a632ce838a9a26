"""The commands there are: their names, their help, and the documents that show them."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from evenkeel_moe.cli import app
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


ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
)
_COMMAND = re.compile(r"(?:^ *|[|&;(] *|\$ |until |if |bin/)evenkeel (?=[a-z-])")
"""A command, and no argument of helm that has the same name."""
_END = {"|", "||", "&&", "&", ";", ">", "<", ")"}


def documented(text: str) -> Iterator[list[str]]:
    """Yield the words after `evenkeel` of each command in a page's blocks of shell."""
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.replace("2>&1", "")
            for found in _COMMAND.finditer(line):
                lexer = shlex.shlex(line[found.end() :], posix=True, punctuation_chars="|&;<>()")
                lexer.whitespace_split = True
                words = []
                for word in lexer:
                    if word in _END:
                        break
                    words.append(word)
                yield words


def parse(words: list[str]) -> None:
    """Parse a command as the command line does, without running it."""
    command = typer.main.get_command(app)
    while words and words[0] in (inner := getattr(command, "commands", {})):
        command, words = inner[words[0]], words[1:]
    command.make_context(command.name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_command_line_takes_each_documented_command(page):
    for words in documented(page.read_text()):
        try:
            parse(words)
        except Exception as error:
            raise AssertionError(f"evenkeel {' '.join(words)}: {error}") from error


def test_a_wrong_option_of_a_documented_command_is_noticed():
    (words,) = documented(
        "```sh\nuntil evenkeel plan list --pages 3 | grep x; do sleep 1; done\n```"
    )
    assert words == ["plan", "list", "--pages", "3"]
    with pytest.raises(Exception, match="No such option: --pages"):
        parse(words)
