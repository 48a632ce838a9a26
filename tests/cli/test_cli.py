import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from evenkeel_moe.cli import app
from tests.waiting import deadline


def every_command(group=app, prefix=()):
    for command in group.registered_commands:
        yield (*prefix, command.name or command.callback.__name__.replace("_", "-"))
    for child in group.registered_groups:
        yield from every_command(child.typer_instance, (*prefix, child.name))


@pytest.mark.parametrize("command", list(every_command()), ids=" ".join)
def test_help_explains_every_option(command):
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == 0
    # The help's renderer drops square brackets as markup, so units must be words.
    assert not re.search(r"\s[.,;](\s|$)", result.output)
    assert "<bool>" not in result.output, "a flag takes no value"
    rows = [line for line in result.output.splitlines() if line.strip("│ ").startswith("--")]
    for row in rows:
        words = row.strip("│ ").split()
        assert len(words) >= 3, row


def test_help_names_the_exit_codes():
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "160", "TERM": "dumb"})
    assert "3 no controller at the address" in " ".join(result.output.split())


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
