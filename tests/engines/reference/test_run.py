"""Whole runs: real rank processes under the supervisor, with waves from a script."""

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
import pytest

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from evenkeel_moe.engines.reference.config import DispatchRule, ExitCode, Fault, RankConfig
from evenkeel_moe.engines.reference.fleet import run_fleet
from evenkeel_moe.engines.reference.fleet_report import died_words
from evenkeel_moe.engines.reference.lines import read_lines
from evenkeel_moe.engines.reference.supervisor import Supervisor
from evenkeel_moe.errors import InvalidInput
from tests.forked.rank import fork_rank
from tests.waiting import deadline, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
SMALL: dict[str, Any] = {
    "num_ranks": 2,
    "layers": 3,
    "experts": 8,
    "tokens_per_step": 64,
    "staging_bytes": 1 << 20,
    "group_timeout_s": deadline(60),
    "gate_timeout_s": deadline(20),
}


def lines(folder, rank, kind):
    return [row for row in read_lines(folder / f"rank-{rank}.jsonl") if row["kind"] == kind]


def supervisor_for(folder, script, **changes):
    """Return a supervisor with quick forks for ranks; `options` are its own, `changes` theirs."""
    options = {"grace_s": deadline(10), "start_rank": fork_rank, **changes.pop("options", {})}
    folder.mkdir(parents=True, exist_ok=True)
    if script is not None:
        (folder / "script.json").write_text(json.dumps(script))
        options["module"] = "tests.engines.reference.scripted"
    return Supervisor(RankConfig(run_folder=str(folder), **{**SMALL, **changes}), **options)


def run(folder, script, *, until=lambda supervisor: None, **changes):
    """Run to the end; `until(supervisor)` is called between polls, and may kill a rank."""
    supervisor = supervisor_for(folder, script, **changes)

    def poll():
        until(supervisor)
        return supervisor.poll()

    supervisor.start()
    try:
        return wait_until(poll, within_s=100, what="the end of the run")
    finally:
        supervisor.stop()


def test_a_paced_rank_takes_its_time_in_each_layer_and_the_slow_one_longer(tmp_path):
    pace = {"pace_s_per_token": 1e-4, "slow_rank": 1, "slow_factor": 1.5, "slow_from": 3}
    report = run(tmp_path, None, steps=6, **pace)
    assert report.ok, report
    for rank in range(2):
        for step in lines(tmp_path, rank, "step"):
            factor = 1.5 if rank == 1 and step["step"] >= 3 else 1.0
            least_s = [factor * 1e-4 * tokens for tokens in step["rank_load"]]
            pairs = zip(step["compute_s"], least_s, strict=True)
            assert all(took >= least - 1e-6 for took, least in pairs), step
            assert step["seconds"] > sum(step["compute_s"])


# Each rule is compared over real Gloo, across a change of the map, in test_dispatch.py.
@pytest.mark.parametrize("rule", [DispatchRule.EVEN, DispatchRule.LPLB, DispatchRule.LIBRA_REFINED])
def test_waves_move_real_weights_and_every_output_stays_exact(tmp_path, rule):
    """Two plans with different replica counts per layer, and one aborted plan."""
    script = {"seed": 7, "plans": 3, "uneven": True, "abort": [1]}
    report = run(tmp_path, script, steps=60, dispatch=rule)
    assert report.ok, report
    assert report.codes == (0, 0) and report.restarts == 0
    served = [[step["served"] for step in lines(tmp_path, rank, "step")] for rank in range(2)]
    # Two ranks, 64 tokens each, two choices and one shared expert.
    assert (np.sum(served, axis=0) == 2 * 64 * 3).all()
    for rank in range(2):
        swaps = lines(tmp_path, rank, "swap")
        assert [swap["epoch"] for swap in swaps] == list(range(1, len(swaps) + 1))
        assert len(swaps) >= 4
        # All ranks swapped at the same step.
        assert [swap["step"] for swap in swaps] == [
            swap["step"] for swap in lines(tmp_path, 0, "swap")
        ]
        [check] = lines(tmp_path, rank, "check")
        assert check["mismatches"] == 0 and check["rows_checked"] == 60 * 64
        assert check["ok"] and check["dropped_records"] == 0
        assert check["slots_checked"] == 3 * 5 and check["wrong_slots"] == []
        steps = lines(tmp_path, rank, "step")
        assert [step["step"] for step in steps] == list(range(60))
        assert steps[-1]["epoch"] == len(swaps)
        # The runbooks search the log for these.
        logged = read_lines(tmp_path / f"rank-{rank}.log")
        assert [row["epoch"] for row in logged if row["event"] == "swap"] == [
            swap["epoch"] for swap in swaps
        ]
        events = [row["event"] for row in logged]
        assert (events[:2], events[-1]) == (["canary_registered", "start"], "exit")


@pytest.mark.parametrize(
    "fault, named",
    [
        (Fault.BYTE, "rank 1 layer"),
        (Fault.MAP, "rank 1 routes layer"),
        (Fault.EPOCH, "epochs differ: rank 0 at"),
    ],
)
def test_each_fault_after_the_first_swap_is_detected_and_named(tmp_path, fault, named):
    script = {"seed": 7, "plans": 1, "stop_after": 1}
    report = run(tmp_path, script, steps=40, min_step_s=0.02, fault=fault, fault_rank=1)
    assert not report.ok
    assert any(named in problem for problem in report.problems), report.problems
    [done] = lines(tmp_path, 1, "fault")
    assert done["fault"] == fault and not lines(tmp_path, 0, "fault")
    if fault is Fault.EPOCH:
        exits = lines(tmp_path, 0, "exit") + lines(tmp_path, 1, "exit")
        assert [row["code"] for row in exits].count(ExitCode.EPOCH_MISMATCH) == 2
        assert report.restarts == 1
    else:
        assert report.restarts == 0 and ExitCode.CHECK_FAILED in report.codes


def test_a_killed_rank_restarts_the_group_warm_on_the_last_committed_placement(tmp_path):
    killed = []

    def kill_after_two_swaps(supervisor):
        if not killed and len(lines(tmp_path, 0, "swap")) >= 2:
            killed.append(supervisor.pids)
            supervisor.kill_rank(1)

    report = run(
        tmp_path,
        {"seed": 7, "plans": 1},
        until=kill_after_two_swaps,
        steps=120,
        min_step_s=0.02,
    )
    assert killed and report.ok and report.restarts == 1, report
    first, second = lines(tmp_path, 0, "start")
    assert not first["warm"] and second["warm"]
    assert second["epoch"] >= 2 and second["generation"] != first["generation"]
    assert second["step"] > 0 and second["attempt"] == 1
    # The killed rank came back with the same map, and its outputs were exact.
    other = lines(tmp_path, 1, "start")[1]
    assert other["placement_digest"] == second["placement_digest"]
    assert all(check["mismatches"] == 0 for check in report.checks)
    steps = [row["step"] for row in lines(tmp_path, 0, "step")]
    assert steps == sorted(set(steps)) and steps[-1] == 119
    assert not any(psutil.pid_exists(pid) for pid in killed[0])


def test_a_run_is_judged_by_its_own_lines_alone_in_the_folder_of_an_earlier_one(tmp_path):
    earlier = [
        {"kind": "start", "attempt": 0},
        {"kind": "step", "step": 999},
        {"kind": "check", "problems": ["slot 3 was wrong"]},
    ]
    for rank in range(2):
        text = "".join(json.dumps(row) + "\n" for row in earlier)
        (tmp_path / f"rank-{rank}.jsonl").write_text(text)
    report = run(tmp_path, None, steps=4)
    assert report.ok, report
    assert (report.steps, len(report.checks), report.problems) == (4, 2, ())


def test_only_ranks_that_died_are_named_with_their_signal_or_exit_code():
    codes = (0, -9, None, ExitCode.GROUP_LOST, ExitCode.CHECK_FAILED)
    assert died_words(codes) == "rank 1 died (signal 9), rank 3 died (exit code 43)"


def test_a_group_that_keeps_dying_is_given_up(tmp_path):
    """No rank can start, because such sums are not exact; the restarts are limited."""
    told: list[str] = []
    options = {"max_restarts": 1, "tell": told.append}
    report = run(tmp_path, None, d_ffn=1 << 15, options=options)
    first, last = told
    assert re.fullmatch(r"rank [01] died \(exit code 1\).*; restarting the group", first)
    assert last.endswith("; the group is not restarted again")
    assert not report.ok and report.restarts == 1 and set(report.codes) == {ExitCode.FAILED}


FLEET = """
import sys
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.fleet import run_fleet
report = run_fleet(RankConfig.from_json(open(sys.argv[1]).read()))
print("ok" if report.ok else report.problems, report.steps, flush=True)
"""


def start_fleet(folder):
    config = RankConfig(run_folder=str(folder / "run"), **{**SMALL, "steps": 0, "min_step_s": 0.01})
    path = folder / "fleet.json"
    path.write_text(config.to_json())
    command = dying_with_parent([sys.executable, "-c", FLEET, str(path)])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def serves():
        assert process.poll() is None
        return len(lines(folder / "run", 0, "step")) >= 3

    wait_until(serves, within_s=60, what="three steps")
    return process, psutil.Process(process.pid).children()


def test_a_folder_holds_one_fleet_and_sigint_stops_it_after_its_step_with_a_passed_check(tmp_path):
    process, children = start_fleet(tmp_path)
    assert len(children) == 2
    config = RankConfig(run_folder=str(tmp_path / "run"), **SMALL)
    before = {path: path.stat().st_ino for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(InvalidInput, match=r"another fleet runs in the folder .*/run;"):
        run_fleet(config)
    assert {path: path.stat().st_ino for path in (tmp_path / "run").rglob("*")} == before
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=deadline(30))
    assert process.returncode == 0 and output.startswith("ok")
    assert not any(child.is_running() for child in children)
    counts = {len(lines(tmp_path / "run", rank, "step")) for rank in range(2)}
    assert len(counts) == 1
    again = Supervisor(config, start_rank=fork_rank)
    again.start()
    assert again.stop().restarts == 0


def test_a_supervisor_killed_outright_leaves_no_rank_behind(tmp_path):
    process, children = start_fleet(tmp_path)
    process.kill()
    process.communicate(timeout=deadline(30))
    gone, alive = psutil.wait_procs(children, timeout=deadline(20))
    assert len(gone) == 2 and not alive
