"""Every command that the documents show is one that the command line takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from evenkeel_moe.cli import app

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
