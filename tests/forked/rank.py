"""Ranks of the reference engine, forked."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.forked.server import CONTEXT, Output, end_with_parent


class ForkedRank:
    """A forked rank with the interface of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return code


def fork_rank(module: str, config: Path, rank: int, log: Path) -> ForkedRank:
    """Do what `supervisor.start_rank` does."""
    with log.open("ab") as out:
        process = CONTEXT.Process(
            target=_run, args=(module, str(config), str(rank), Output(out.fileno())), daemon=True
        )
        process.start()
    return ForkedRank(process)


def _run(module: str, config: str, rank: str, output: Output) -> None:
    os.setpgid(0, 0)
    output.use()
    end_with_parent()
    sys.argv = [module, config, rank]
    # Of a package, this runs its `__main__`.
    runpy.run_module(module, run_name="__main__", alter_sys=True)
