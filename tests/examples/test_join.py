"""The toy engine of docs/join.md, end to end, and the page beside its code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.join.__main__ import judge
from tests.waiting import deadline

ROOT = Path(__file__).parent.parent.parent


def run(*options):
    command = [sys.executable, "-m", "examples.join", "--limit-s", str(deadline(60)), *options]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=deadline(280), check=False
    )


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_experts_of_the_toy_engine_move_and_no_bit_of_an_output_changes():
    ended = run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ends = re.findall(r"'checked': (\d+), 'wrong': (\d+).*'epoch': (\d+)", ended.stdout)
    assert len(ends) == 2
    assert all(int(checked) > 4 and wrong == "0" and epoch != "0" for checked, wrong, epoch in ends)


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_the_probe_finds_the_forgotten_hook_and_the_text_names_the_expert():
    ended = run("--forget-hook")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    named = r"ranks take no more plans: layer \d+ expert \d+ in slot \d+ of rank \d does not answer"
    assert re.search(named, ended.stdout)


def test_the_cause_is_told_rather_than_the_loss_of_a_peer():
    """A plan may write slots of one rank only; the other then loses its peer."""
    ends = [{"left": "lost a peer: closed"}, {"left": "a boundary was left out"}]
    assert judge(ends, 2, 60.0) == "2 ranks left the group: a boundary was left out"
    assert judge(ends[:1], 2, 60.0) == "1 ranks left the group: lost a peer: closed"
    assert judge([], 2, 60.0) == "2 ranks did not finish"


def test_a_run_without_a_plan_says_that_it_shows_nothing_and_what_to_do():
    end = {"left": "", "trouble": "", "wrong": 0, "digest": "d", "epoch": 0}
    said = judge([end, end], 2, 300.0)
    assert said.startswith("no plan was carried out in time: within 300 s no expert moved")
    assert "Run it again with --limit-s 900;" in said
    assert judge([{**end, "epoch": 1}] * 2, 2, 300.0) == ""


def test_the_code_of_the_page_is_the_code_of_the_example():
    code = "\n".join(
        (ROOT / "examples" / "join" / name).read_text("utf-8") for name in ("engine.py", "rank.py")
    )
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "join.md").read_text(), re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        assert block.strip("\n") in code, block
