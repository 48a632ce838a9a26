import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from evenkeel_moe.errors import Unavailable
from tests.api.conftest import OPERATE
from tests.api.fakes import make_plan
from tests.waiting import deadline

HEIGHT, WIDTH = 12, 80


@pytest.fixture
def rounds(monkeypatch):
    """Let a command watch for three rounds, and return the functions called between them."""
    between = []

    def sleep(seconds):
        assert seconds == 2.0
        if not between:
            raise KeyboardInterrupt
        between.pop(0)()

    monkeypatch.setattr("evenkeel_moe.cli.watch.time.sleep", sleep)
    return between


def test_a_view_is_shown_again_until_interrupted(run, rounds):
    rounds += [lambda: None, lambda: None]
    code, out, _ = run("status", "--watch")
    assert code == 130
    assert out.count("DEPLOYMENT") == 3
    assert "every 2 s, Ctrl-C ends" in out


def test_json_has_one_answer_a_line(run, rounds):
    rounds += [lambda: None]
    out = run("decisions", "-d", "demo", "-w", "-o", "json", "-n", "2")[1]
    assert [len(json.loads(line)) for line in out.splitlines()] == [2, 2]


def test_a_controller_that_is_away_is_waited_for(run, rounds, operations):
    def leave():
        operations.error = Unavailable("the store does not answer")

    def return_():
        operations.error = None

    operations.records["demo"] = [make_plan()]
    rounds += [leave, return_]
    code, out, err = run("plan", "list", "-d", "demo", "--watch")
    assert (code, out.count("PLAN ")) == (130, 2)
    assert "the store does not answer" in err


def test_a_refusal_ends_the_watch(run, rounds):
    assert run("status", "absent", "--watch")[0] == 1


class TerminalSession:
    """A command that watches in a terminal of its own, and all that it has written."""

    def __init__(self, url, *arguments):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("LINES", "CI")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evenkeel_moe", *arguments, "--interval", "0.1"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**kept, "EVENKEEL_ADDRESS": url, "EVENKEEL_TOKEN": OPERATE, "TERM": "xterm"},
        )
        os.close(slave)
        self.written = ""

    def read(self):
        """Read what is there, and return False at the end."""
        if not select.select([self._master], [], [], 0.1)[0]:
            return True
        try:
            piece = os.read(self._master, 65536)
        except OSError:
            return False
        self.written += piece.decode()
        return bool(piece)

    def until(self, words):
        """Read until these words are drawn anew."""
        begun, until = len(self.written), time.monotonic() + deadline(20)
        while words not in self.written[begun:]:
            assert time.monotonic() < until, self.written[-2000:]
            assert self.read(), self.written[-2000:]

    def end(self):
        """Interrupt the command, and return its exit code."""
        self.process.send_signal(signal.SIGINT)
        until = time.monotonic() + deadline(20)
        while self.read():
            if time.monotonic() > until:
                self.process.kill()
        code = self.process.wait(deadline(20))
        os.close(self._master)
        return code


def test_a_terminal_is_redrawn_in_place_until_ctrl_c(url, operations):
    operations.records["demo"] = [make_plan(f"plan-{number}") for number in range(30)]
    session = TerminalSession(url, "plan", "list", "-d", "demo", "--watch")
    try:
        session.until(" more lines: make the terminal taller")
        operations.error = Unavailable("the store does not answer")
        session.until("the store does not answer")
        operations.error = None
        session.until("plan-3")
    finally:
        code = session.end()
    assert code == 130
    screen = session.written
    # A screen of its own, which leaves the terminal as it was; no clearing, which would flicker.
    assert screen.count("\x1b[?1049h") == screen.count("\x1b[?1049l") == 1
    assert screen.index("\x1b[?25l") < screen.index("\x1b[?25h")
    assert "\x1b[2J" not in screen
    frames = screen.split("\x1b[H")[1:]
    assert len(frames) >= 3
    # A frame with more lines would scroll.
    assert {frame.count("\n") for frame in frames} <= {HEIGHT - 1, 0}
