"""The whole demo: a controller, its store, real ranks, a plan, a shift, a second plan."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from tests.waiting import deadline

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def start_demo(tmp_path, *options):
    return psutil.Popen(
        dying_with_parent(
            [
                *(sys.executable, "-m", "evenkeel_moe", "demo", "--plain"),
                *("--timeout-s", str(deadline(170)), *options),
            ]
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


def family(process):
    """Return all descendants of the demo, as handles that stay valid after their parents end."""
    return {child.pid: child for child in process.children(recursive=True)}


def assert_all_gone(processes):
    _, alive = psutil.wait_procs(processes.values(), timeout=deadline(10))
    assert [child.cmdline() for child in alive] == []


def finish(demo):
    """Return (exit code, output) of a demo, and check that nothing it started outlives it."""
    processes: dict[int, psutil.Process] = {}
    lines = []
    began = time.monotonic()
    for line in demo.stdout:
        processes |= family(demo)
        lines.append(line)
        assert time.monotonic() - began < deadline(200), "".join(lines[-40:])
    code = demo.wait(deadline(20))
    demo.stdout.close()
    assert len(processes) >= 5, "".join(lines)
    assert_all_gone(processes)
    return code, "".join(lines)


def test_plans_and_not_a_bit_wrong(tmp_path):
    code, output = finish(start_demo(tmp_path))
    assert code == 0, output
    assert "FAIL" not in output
    # The first placement may suit the second text, too. Then the shift costs little, and the plan
    # after it, if any, is made because balance is below the threshold.
    fell = re.search(r"^ok   balancedness fell .*: ([\d.]+) -> ([\d.]+) at", output, re.MULTILINE)
    assert fell, output
    if float(fell[1]) - float(fell[2]) > 0.05:
        assert re.search(r"^Plan 2  .*because load_changed$", output, re.MULTILINE), output
    assert re.search(r"^ok   every slot's weights equal", output, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["byte", "map", "epoch"])
def test_a_fault_is_found_and_named(tmp_path, fault):
    code, output = finish(
        start_demo(tmp_path, "--steps", "400", "--step-s", "0.05", "--fault", fault)
    )
    assert code == 1, output
    assert re.search(rf"^found {fault}: ", output, re.MULTILINE), output
    assert f"the {fault} fault was found" in output


@pytest.mark.timed
@pytest.mark.timeout(600)
def test_a_slow_rank_is_planned_for_by_what_is_measured_and_again_when_it_recovers(tmp_path):
    code, output = finish(start_demo(tmp_path, "--slow", "--steps", "480"))
    assert code == 0, output
    assert re.search(r"cost model measured: .*rank 1 takes 1\.\d\d times as long", output), output
    assert re.search(r"^ok   MoE time fell by at least 80% of the promise", output, re.MULTILINE)
    assert re.search(r"^ok   the recovered rank got tokens back", output, re.MULTILINE), output


@pytest.mark.timed
def test_a_slow_rank_is_planned_for_by_what_the_ranks_tell(tmp_path):
    code, output = finish(start_demo(tmp_path, "--slow", "--told", "--steps", "200"))
    assert code == 0, output
    assert re.search(r"cost model profiled: .*rank 1 takes 1\.12 times as long", output), output
    assert re.search(r"^ok   MoE time fell by at least 80% of the promise", output, re.MULTILINE)


def started(demo, seen):
    """Read the demo's output up to `seen`, and return the processes it has started by then."""
    processes: dict[int, psutil.Process] = {}
    for line in demo.stdout:
        processes |= family(demo)
        if seen in line and len(processes) >= 6:
            break
    assert len(processes) >= 6
    return processes


@pytest.mark.slow
def test_a_group_grows_loses_a_rank_and_shrinks_and_not_a_bit_is_wrong(tmp_path):
    code, output = finish(start_demo(tmp_path, "--resize"))
    assert code == 0, output
    assert re.search(r"^resized from 4 to 6 ranks: serving paused for ", output, re.MULTILINE)
    filled = re.search(r": (\d+) copies, the best assignment (\d+)$", output, re.MULTILINE)
    assert filled, output
    copied, least = map(int, filled.groups())
    assert 0 < copied <= 1.05 * least
    lost = re.search(r"^killing rank 2: (\d+) experts? live on it alone$", output, re.MULTILINE)
    assert lost, output
    went_on = rf"^rank 2 died, the other 5 go on: .* {lost[1]} lost experts? read from the checkp"
    assert re.search(went_on, output, re.MULTILINE), output
    assert re.search(r"are ready to retire: .* (\d+) copies, least \1$", output, re.MULTILINE)
    assert re.search(r"^resized from 5 to 3 ranks: ", output, re.MULTILINE)
    assert "outputs compared with those of a model that never moved: 0 differ" in output


@pytest.mark.slow
def test_a_killed_demo_leaves_no_process(tmp_path):
    demo = start_demo(tmp_path, "--steps", "2000")
    processes = started(demo, "step -")
    demo.kill()
    demo.wait(deadline(30))
    demo.stdout.close()
    assert_all_gone(processes)


@pytest.mark.parametrize(
    ("number", "seen"), [(signal.SIGINT, "balancedness 0"), (signal.SIGTERM, "step -")]
)
@pytest.mark.slow
def test_a_stopped_demo_leaves_no_process(tmp_path, number, seen):
    demo = start_demo(tmp_path, "--steps", "2000")
    processes = started(demo, seen)
    demo.send_signal(number)
    rest = demo.stdout.read()
    assert demo.wait(deadline(30)) == 128 + number
    demo.stdout.close()
    assert "stopped" in rest
    assert_all_gone(processes)
    assert list(tmp_path.iterdir()) == []
