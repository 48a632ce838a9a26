"""The command that the demo prints for those who want to look at it."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from evenkeel_moe.engines.demo.run import status_command


@pytest.mark.parametrize("active", [True, False])
def test_the_printed_command_runs_with_and_without_an_active_environment(
    active, monkeypatch, tmp_path
):
    programs = Path(sys.prefix, "bin")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin" if active else "/usr/bin:/bin")
    token_file = tmp_path / "a folder" / "tokens"
    words = shlex.split(status_command("http://127.0.0.1:9", token_file))
    assert words[0] == ("evenkeel" if active else str(programs / "evenkeel"))
    token_file.parent.mkdir()
    token_file.write_text("me admin 0123456789abcdef\n")
    ran = subprocess.run(words, capture_output=True, text=True, cwd="/", check=False)
    assert ran.returncode == 3, ran.stderr
    assert "no controller answers at http://127.0.0.1:9" in ran.stderr
