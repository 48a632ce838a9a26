"""`make help` lists every command of the Makefile."""

import re
import subprocess
from pathlib import Path

from tests.waiting import deadline

MAKEFILE = Path(__file__).parents[1] / "Makefile"


def test_help_lists_every_command_in_one_form():
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=MAKEFILE.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=deadline(30),
    ).stdout.splitlines()
    for line in shown:
        assert re.fullmatch(r"make [a-z0-9%-]{1,16} +[A-Z][a-z]+s,? .*[^.]\.", line), line
        assert len(line) <= 100, line
    phony = re.findall(r"^\.PHONY: (.*)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for line in phony for name in line.split()} | {"bench-%"}
    assert {line.split()[1] for line in shown} == names
