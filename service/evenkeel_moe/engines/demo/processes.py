"""A child process with a log, and signals as a flag."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from evenkeel_moe.adapters.processes.child_process import dying_with_parent

_POLL_S = 0.05
_PORTS = range(20_000, 32_768)
"""Linux takes the ports of connections from 32768 on. One of those could be in use again before the
process that it was chosen for listens."""


class StopFlag:
    """Set by the first signal that asks the process to end."""

    signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    def wait(self, seconds: float) -> None:
        """Sleep, but return at once when the flag is set."""
        deadline = time.monotonic() + seconds
        while not self and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """Turn SIGINT, SIGTERM and SIGHUP into a flag, so that no exception interrupts a clean-up."""
    flag = StopFlag()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        flag.signal_number = number

    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.signal(number, on_signal))
        yield flag


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports of 127.0.0.1 that are free at this moment.

    Raises:
        OSError: fewer are free.
    """
    with ExitStack() as stack:
        found: list[int] = []
        # Not from the seed of a test: tests that run at the same time would choose the same ports.
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            with suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return tuple(found)
    raise OSError(f"fewer than {count} of the ports {_PORTS[0]} to {_PORTS[-1]} are free")


class ChildProcess:
    """A command in its own process group, which can be ended as a whole.

    If this process is killed, the kernel sends the command SIGTERM.

    Args:
        command: the program, as an absolute path, and its arguments.
        log: file for its output.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                dying_with_parent(command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._log = log

    @property
    def running(self) -> bool:
        """True while it runs."""
        return not self._ended()

    def log(self) -> str:
        """Return its log."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def log_tail(self, lines: int = 5) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def stop(self, grace_s: float = 10.0) -> None:
        """Ask it to end, then kill what is left of its process group."""
        if not self._ended():
            self._process.terminate()
        deadline = time.monotonic() + grace_s
        while not self._ended() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # No other process can get the group's number before this process has waited for it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None
