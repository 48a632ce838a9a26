"""Starts the ranks of a run, restarts the group when one dies, and leaves nothing behind.

Use::

    supervisor = Supervisor(config)
    supervisor.start()
    while (report := supervisor.poll()) is None:   # restarts the group when a rank died
        ...
    supervisor.stop()                              # always safe, also after the end

or `run_fleet(config)`, which does that and ends the ranks on SIGINT and SIGTERM. The ranks die with
the thread that called `start`, so that thread must live as long as the run.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from evenkeel_moe.engines.reference.config import ExitCode, RankConfig
from evenkeel_moe.engines.reference.lines import LineWriter

__all__ = ["FleetReport", "Supervisor", "run_fleet"]

_POLL_S = 0.05
_NOT_RESTARTED = frozenset({ExitCode.FINISHED, ExitCode.CHECK_FAILED})
"""Ranks that ended so have said their last word."""
_TELLING = ("epoch_mismatch", "check_failed")
"""Exit reasons that are findings; a lost peer or a failed gate is what restarts are for."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """How a run ended."""

    ok: bool
    """Every rank finished and no rank reported a problem, in any attempt."""
    codes: tuple[int, ...]
    """Exit code of each rank in the last attempt; minus the signal's number for a killed one."""
    restarts: int
    steps: int
    """Newest step any rank wrote, plus one."""
    problems: tuple[str, ...] = ()
    """What the ranks found wrong, in words."""
    checks: tuple[dict[str, Any], ...] = field(default=())
    """The `check` line of each rank that wrote one in the last attempt."""


class Supervisor:
    """The parent of one run's ranks.

    Args:
        config: the run; `rank`, `attempt`, `first_step` and `rendezvous` are set here.
        max_restarts: how often the group may be started again.
        grace_s: how long ranks get to stop by themselves before they are killed.
        module: what each rank process runs, as `python -m MODULE CONFIG RANK PARENT`.
    """

    def __init__(
        self,
        config: RankConfig,
        *,
        max_restarts: int = 3,
        grace_s: float = 10.0,
        module: str = "evenkeel_moe.engines.reference",
    ) -> None:
        self._config = config
        self._module = module
        self._max_restarts = max_restarts
        self._grace_s = grace_s
        self._attempt = 0
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._broken_at: float | None = None
        self._stopping = False
        self._report: FleetReport | None = None
        self._lines: LineWriter | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each rank of the current attempt."""
        return tuple(process.pid for process in self._ranks)

    @property
    def restarts(self) -> int:
        """How often the group was started again."""
        return self._attempt

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._config.folder

    def start(self) -> None:
        """Start every rank for the first time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lines = LineWriter(self.folder / "supervisor.jsonl")
        self._spawn(self._config.first_step)
        self._write("started", pids=self.pids)

    def poll(self) -> FleetReport | None:
        """Look after the ranks once, without waiting: None while the run goes on."""
        if self._report is not None:
            return self._report
        codes = [process.poll() for process in self._ranks]
        broken = [code for code in codes if code is not None and code not in _NOT_RESTARTED]
        if broken and self._broken_at is None:
            self._broken_at = time.monotonic()
            self._write("rank_died", codes=codes)
        ended = all(code is not None for code in codes)
        if (
            not ended
            and self._broken_at is not None
            and time.monotonic() - self._broken_at > self._grace_s
        ):
            self._kill()
            ended = True
        if not ended:
            return None
        if broken and not self._stopping and self._attempt < self._max_restarts:
            self._restart()
            return None
        return self._finish()

    def request_stop(self) -> None:
        """Ask the ranks to stop after their current step and check themselves; `poll` tells when they have."""
        self._stopping = True
        for process in self._ranks:
            if process.poll() is None:
                process.terminate()

    def stop(self) -> FleetReport:
        """End the run: ask, wait up to the grace, kill what is left. Nothing of it lives afterwards."""
        self.request_stop()
        deadline = time.monotonic() + self._grace_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._kill()
        report = self.poll()
        assert report is not None
        return report

    def kill_rank(self, rank: int) -> None:
        """End one rank without warning, as a crash would."""
        self._ranks[rank].kill()

    def _restart(self) -> None:
        first_step = self._newest_step() + 1
        self._attempt += 1
        self._broken_at = None
        self._spawn(first_step)
        self._write("restarted", attempt=self._attempt, first_step=first_step, pids=self.pids)

    def _spawn(self, first_step: int) -> None:
        rendezvous = self.folder.resolve() / f"rendezvous-{self._attempt}"
        rendezvous.unlink(missing_ok=True)
        config = self._config.replace(
            rank=-1, attempt=self._attempt, first_step=first_step, rendezvous=f"file://{rendezvous}"
        )
        path = self.folder / "config.json"
        path.write_text(config.to_json(), encoding="utf-8")
        self._ranks = []
        for rank in range(config.num_ranks):
            with (self.folder / f"rank-{rank}.log").open("ab") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        self._module,
                        str(path),
                        str(rank),
                        str(os.getpid()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # A Ctrl-C in the terminal reaches us alone.
                )
            self._ranks.append(process)

    def _kill(self) -> None:
        for process in self._ranks:
            if process.poll() is None:
                process.kill()
        for process in self._ranks:
            process.wait()

    def _finish(self) -> FleetReport:
        codes = tuple(process.returncode for process in self._ranks)
        problems: list[str] = []
        checks = []
        for rank in range(self._config.num_ranks):
            attempt = 0
            for line in _read_lines(self.folder / f"rank-{rank}.jsonl"):
                if line["kind"] == "start":
                    attempt = line["attempt"]
                elif line["kind"] == "check":
                    problems += line["problems"]
                    if attempt == self._attempt:
                        checks.append(line)
                elif line["kind"] == "exit" and line["reason"] in _TELLING and line["detail"]:
                    problems.append(f"rank {rank} left: {line['reason']}: {line['detail']}")
        unique = tuple(dict.fromkeys(problems))
        ok = not unique and not any(codes) and len(checks) == len(codes)
        self._report = FleetReport(
            ok, codes, self._attempt, self._newest_step() + 1, unique, tuple(checks)
        )
        self._write("finished", ok=ok, codes=codes, restarts=self._attempt, problems=unique)
        if self._lines is not None:
            self._lines.close()
        return self._report

    def _newest_step(self) -> int:
        newest = self._config.first_step - 1
        for rank in range(self._config.num_ranks):
            for line in _read_lines(self.folder / f"rank-{rank}.jsonl"):
                if line["kind"] == "step":
                    newest = max(newest, line["step"])
        return newest

    def _write(self, kind: str, **keys: Any) -> None:
        if self._lines is not None:
            self._lines.write(kind, **keys)


def run_fleet(
    config: RankConfig,
    *,
    max_restarts: int = 3,
    on_poll: Callable[[Supervisor], None] | None = None,
) -> FleetReport:
    """Run the ranks to their end; SIGINT and SIGTERM stop them cleanly (main thread only).

    Args:
        config: the run.
        max_restarts: how often the group may be started again.
        on_poll: called about twenty times a second, to draw or to interfere.
    """
    supervisor = Supervisor(config, max_restarts=max_restarts)
    in_main = threading.current_thread() is threading.main_thread()

    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        supervisor.request_stop()

    previous = (
        {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)} if in_main else {}
    )
    try:
        supervisor.start()
        while (report := supervisor.poll()) is None:
            if on_poll is not None:
                on_poll(supervisor)
            time.sleep(_POLL_S)
        return report
    finally:
        supervisor.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a last one cut off by a crash is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
