"""The toy engine of docs/join.md, end to end, and the page beside its code."""

import multiprocessing
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.join.__main__ import judge, last_reason
from examples.local_fleet import ControllerFailed, run_ranks
from tests.waiting import deadline

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "join.md"


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
    shown, printed = (
        {tuple(re.findall(r"'(\w+)':", line)) for line in re.findall("rank .: end (.*)", text)}
        for text in (PAGE.read_text("utf-8"), ended.stdout)
    )
    assert shown == printed, "docs/join.md shows other fields than the example prints"


@pytest.mark.slow
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
    assert judge(ends, 2, 60.0, None) == "2 ranks left the group: a boundary was left out"
    assert judge(ends[:1], 2, 60.0, None) == "1 ranks left the group: lost a peer: closed"
    assert judge([], 2, 60.0, None) == "2 ranks did not finish"


def test_a_run_without_a_plan_says_that_it_shows_nothing_and_what_the_controller_waits_for():
    end = {"left": "", "trouble": "", "wrong": 0, "digest": "d", "epoch": 0}
    said = judge([end, end], 2, 300.0, "planner_starting")
    assert said.startswith("no plan was carried out in time: within 300 s no expert moved")
    assert "Run it again with --limit-s 900; the controller's last cycle ended with" in said
    assert said.endswith("planner_starting: The planner is compiling its kernels.")
    assert judge([end, end], 2, 300.0, None).endswith("; no cycle of the controller ended")
    assert judge([{**end, "epoch": 1}] * 2, 2, 300.0, None) == ""


def test_the_last_reason_is_that_of_the_last_cycle_before_a_rank_stopped():
    waits, missing = (
        f'{{"at": 1.0, "reason": "{reason}", "numbers": {{}}, "event": "decision"}}\n'
        for reason in ("no_steps", "ranks_missing")
    )
    plan, stopped = '{"reason": "committed", "event": "plan"}\n', '{"event": "rank_stopped"}\n'
    assert last_reason(missing + waits + plan + stopped + missing) == "no_steps"
    assert last_reason(plan + stopped + missing) is None


def idle_rank(*_arguments):
    time.sleep(600)


def test_ranks_end_at_once_when_the_controller_ends():
    began = time.monotonic()
    with (
        subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as controller,
        pytest.raises(ControllerFailed, match="the controller ended with code 3"),
    ):
        run_ranks(idle_rank, 2, controller, "127.0.0.1:1", 600.0)
    assert time.monotonic() - began < deadline(60)
    assert not multiprocessing.active_children()


@pytest.mark.integration
def test_a_controller_that_does_not_start_ends_the_run_and_its_log_says_why(monkeypatch):
    monkeypatch.setenv("EVENKEEL_INGEST__RANK_LEASE_S", "1")
    ended = run()
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED: the controller ended with code 2, so this run shows nothing" in ended.stdout
    assert "exceeds ingest.rank_lease_s 1" in ended.stdout and "Traceback" not in ended.stderr


def test_the_code_of_the_page_is_the_code_of_the_example():
    code = "\n".join(
        (ROOT / "examples" / "join" / name).read_text("utf-8") for name in ("engine.py", "rank.py")
    )
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        assert block.strip("\n") in code, block
