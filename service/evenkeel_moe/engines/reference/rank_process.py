"""Starts the processes of ranks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from evenkeel_moe.adapters.processes.child_process import dying_with_parent


class RankProcess(Protocol):
    """A rank process, as `subprocess.Popen` describes it."""

    pid: int
    returncode: Any
    """None until `poll` or `wait` has seen the end."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """


StartRank = Callable[[str, Path, int, Path], RankProcess]
"""Starts a rank from its module, the file of its configuration, its number and its log."""


def start_rank_process(module: str, config: Path, rank: int, log: Path) -> RankProcess:
    """Start a rank as a new process that dies with this one."""
    with log.open("ab") as out:
        return subprocess.Popen(
            dying_with_parent([sys.executable, "-m", module, str(config), str(rank)]),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,  # A Ctrl-C in the terminal must reach only the supervisor.
        )
