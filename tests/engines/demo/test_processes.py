import os
import signal
import sys
import time

import psutil
import pytest

from evenkeel_moe.engines.demo.processes import ChildProcess, free_ports, stop_flag

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing came"
        os.sched_yield()
    return value


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_sets_the_flag_and_raises_nothing(number):
    before = signal.getsignal(number)
    with stop_flag() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal_number == number
        start = time.monotonic()
        stop.wait(30)
        assert time.monotonic() - start < 5
    assert signal.getsignal(number) is before


def test_free_ports_are_all_different():
    assert len(set(free_ports(5))) == 5


def test_stopping_ends_children_that_will_not(tmp_path):
    log = tmp_path / "log"
    child = ChildProcess([sys.executable, "-c", STUBBORN], log)
    grandchild = psutil.Process(int(wait_for(log.read_text)))
    assert child.running
    child.stop(grace_s=0.2)
    assert not child.running
    gone, alive = psutil.wait_procs([grandchild], timeout=5)
    assert (len(gone), alive) == (1, [])


def test_an_ended_child_is_seen_and_its_words_are_kept(tmp_path):
    command = [sys.executable, "-c", "print('port', 'taken')"]
    child = ChildProcess(command, tmp_path / "log")
    wait_for(lambda: not child.running)
    assert child.last_words() == "port taken"
    child.stop()
    child.stop()


def test_the_command_goes_with_a_parent_that_is_killed(tmp_path):
    log = tmp_path / "log"
    code = (
        "import sys, time; from pathlib import Path; from evenkeel_moe.engines.demo.processes import ChildProcess;"
        f" child = ChildProcess([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'], Path({str(log)!r}));"
        " time.sleep(60)"
    )
    parent = psutil.Popen([sys.executable, "-c", code])
    child = psutil.Process(int(wait_for(lambda: log.exists() and log.read_text())))
    parent.kill()
    parent.wait(10)
    _, alive = psutil.wait_procs([child], timeout=5)
    assert alive == []
