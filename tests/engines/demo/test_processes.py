"""Child processes of the demo end with it, and signals become a flag."""

import os
import signal
import socket
import sys
import time

import psutil
import pytest

from evenkeel_moe.engines.demo import processes
from evenkeel_moe.engines.demo.processes import ChildProcess, free_ports, stop_flag
from tests.waiting import deadline, wait_until

IGNORING = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    signal.pause()
"""
STUBBORN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {IGNORING!r}])
print(child.pid, flush=True)
{IGNORING}
"""
PAUSING = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
PARENT = f"""
import signal, sys
from pathlib import Path
from evenkeel_moe.engines.demo.processes import ChildProcess
child = ChildProcess([sys.executable, "-c", {PAUSING!r}], Path(sys.argv[1]))
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_sets_the_flag_and_raises_nothing(number):
    before = signal.getsignal(number)
    with stop_flag() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal_number == number
        start = time.monotonic()
        stop.wait(3600)
        assert time.monotonic() - start < deadline(5)
    assert signal.getsignal(number) is before


def test_free_ports_are_all_different_and_no_connection_gets_one():
    """A connection that took one first kept a store from its start."""
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(20_000 <= port < 32_768 for port in ports)


def test_a_port_in_use_is_not_free(monkeypatch):
    one, other = free_ports(2)
    monkeypatch.setattr(processes, "_PORTS", (one, other))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", one))
        assert free_ports(1) == (other,)
        with pytest.raises(OSError, match="fewer than 2 of the ports"):
            free_ports(2)
    assert set(free_ports(2)) == {one, other}


def test_stopping_ends_children_that_ignore_sigterm(tmp_path):
    log = tmp_path / "log"
    child = ChildProcess([sys.executable, "-c", STUBBORN], log)
    grandchild = psutil.Process(int(wait_until(log.read_text)))
    assert child.running
    child.stop(grace_s=0.2)
    assert not child.running
    gone, alive = psutil.wait_procs([grandchild], timeout=deadline(5))
    assert (len(gone), alive) == (1, [])


def test_an_ended_child_is_seen_and_its_words_are_kept(tmp_path):
    command = [sys.executable, "-c", "print('port', 'taken')"]
    child = ChildProcess(command, tmp_path / "log")
    wait_until(lambda: not child.running)
    assert child.log_tail() == "port taken"
    child.stop()
    child.stop()


def test_the_command_goes_with_a_parent_that_is_killed(tmp_path):
    log = tmp_path / "log"
    parent = psutil.Popen([sys.executable, "-c", PARENT, str(log)])
    child = psutil.Process(int(wait_until(lambda: log.exists() and log.read_text())))
    parent.kill()
    parent.wait(deadline(10))
    _, alive = psutil.wait_procs([child], timeout=deadline(5))
    assert alive == []
