"""Starts the ranks of a run, restarts the group when a rank dies, and leaves no process behind.

Use::

    supervisor = Supervisor(config)
    supervisor.start()
    while (report := supervisor.poll()) is None:   # restarts the group when a rank died
        ...
    supervisor.stop()                              # always safe, also after the end

or `run_fleet(config)`, which does this and stops the ranks on SIGINT and SIGTERM. The kernel
kills the ranks when the thread that called `start` ends, however it ends. So that thread must
live as long as the run.
"""

import fcntl
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from evenkeel_moe.adapters.processes.child_process import dying_with_parent
from evenkeel_moe.engines.reference.config import ExitCode, RankConfig
from evenkeel_moe.engines.reference.fleet_watch import FleetWatch
from evenkeel_moe.engines.reference.lines import LineWriter, read_lines, read_new_lines
from evenkeel_moe.errors import InvalidInput

_POLL_S = 0.05
_POLLS_PER_PROGRESS = 20
_FINAL = frozenset({ExitCode.FINISHED, ExitCode.CHECK_FAILED})
"""Exit codes after which the group is not restarted."""
_FINDINGS = ("epoch_mismatch", "check_failed")
"""Exit reasons that count as problems. A lost peer or a failed gate only causes a restart."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The result of a run."""

    ok: bool
    """Every rank finished, and no rank reported a problem in any attempt."""
    codes: tuple[int, ...]
    """Exit code of each rank in the last attempt; minus the signal number if a signal ended it."""
    restarts: int
    steps: int
    """Newest step that any rank wrote, plus one."""
    problems: tuple[str, ...] = ()
    """Problems the ranks found, in words."""
    checks: tuple[dict[str, Any], ...] = ()
    """The `check` line of each rank that wrote one in the last attempt."""
    unconnected: str = ""
    """The reason that no rank was ever connected to a controller; empty if one was, or if none is
    configured."""

    @property
    def words(self) -> str:
        """The result in one sentence."""
        restarts = "1 restart" if self.restarts == 1 else f"{self.restarts} restarts"
        ended = f"the ranks ended after {self.steps} steps and {restarts}"
        alone = (
            f"; they were never connected to a controller: {self.unconnected}"
            if self.unconnected
            else ""
        )
        if self.ok:
            return f"{ended}: all {len(self.checks)} checks of weights and outputs passed{alone}"
        found = f"{len(self.problems)} problems" if self.problems else "not every check was made"
        return f"{ended}, with exit codes {', '.join(map(str, self.codes))}: {found}{alone}"


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


class Supervisor:
    """The parent of one run's ranks.

    Args:
        config: the run; the supervisor sets `rank`, `attempt`, `first_step` and `rendezvous`.
        max_restarts: how often the group may be restarted.
        grace_s: seconds that ranks get to stop before they are killed.
        module: the module of a rank process, run as `python -m MODULE CONFIG RANK`.
        start_rank: starts a rank process; `start_rank_process` by default.
        tell: takes a sentence for the operator whenever a rank died.
    """

    def __init__(
        self,
        config: RankConfig,
        *,
        max_restarts: int = 3,
        grace_s: float = 10.0,
        module: str = "evenkeel_moe.engines.reference",
        start_rank: StartRank = start_rank_process,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._module = module
        self._start_rank = start_rank
        self._tell = tell
        self._max_restarts = max_restarts
        self._grace_s = grace_s
        self._attempt = 0
        self._ranks: list[RankProcess] = []
        self._broken_at: float | None = None
        self._stopping = False
        self._report: FleetReport | None = None
        self._lock: IO[str] | None = None
        self._lines: LineWriter | None = None
        self._earlier: dict[int, int] = {}  # rank -> lines of earlier runs in the same folder

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of each rank of the current attempt."""
        return tuple(process.pid for process in self._ranks)

    @property
    def restarts(self) -> int:
        """The number of restarts so far."""
        return self._attempt

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._config.folder

    def start(self) -> None:
        """Start every rank for the first time.

        Raises:
            InvalidInput: another fleet runs in the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        self._lines = LineWriter(self.folder / "supervisor.jsonl")
        self._earlier = {rank: len(self._lines_of(rank)) for rank in range(self._config.num_ranks)}
        self._spawn(self._config.first_step)
        self._write("started", pids=self.pids)

    def poll(self) -> FleetReport | None:
        """Check the ranks once, without waiting; return None while the run goes on."""
        if self._report is not None:
            return self._report
        codes = [process.poll() for process in self._ranks]
        broken = any(code is not None and code not in _FINAL for code in codes)
        now = time.monotonic()
        if broken and self._broken_at is None:
            self._broken_at = now
            self._write("rank_died", codes=codes)
            if self._tell is not None:
                self._tell(f"{died_words(codes)}; {self._next_words()}")
        if None in codes:
            if self._broken_at is None or now - self._broken_at <= self._grace_s:
                return None
            self._kill()
        if broken and not self._stopping and self._attempt < self._max_restarts:
            self._restart()
            return None
        return self._finish()

    def request_stop(self) -> None:
        """Ask the ranks to stop after their current step and run the final check."""
        self._stopping = True
        for process in self._ranks:
            if process.poll() is None:
                process.terminate()

    def stop(self) -> FleetReport:
        """Stop the ranks, wait up to `grace_s`, and kill those that are left."""
        self.request_stop()
        deadline = time.monotonic() + self._grace_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._kill()
        report = self.poll()
        assert report is not None
        return report

    def kill_rank(self, rank: int) -> None:
        """Kill one rank without warning, as a crash would."""
        self._ranks[rank].kill()

    def _next_words(self) -> str:
        if self._stopping:
            return "the group is stopping"
        if self._attempt < self._max_restarts:
            return "restarting the group"
        return "the group is not restarted again"

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
        self._ranks = [
            self._start_rank(self._module, path, rank, self.folder / f"rank-{rank}.log")
            for rank in range(config.num_ranks)
        ]

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
            for line in self._lines_of(rank):
                if line["kind"] == "start":
                    attempt = line["attempt"]
                elif line["kind"] == "check":
                    problems += line["problems"]
                    if attempt == self._attempt:
                        checks.append(line)
                elif line["kind"] == "exit" and line["reason"] in _FINDINGS and line["detail"]:
                    problems.append(f"rank {rank} left: {line['reason']}: {line['detail']}")
        unique = tuple(dict.fromkeys(problems))
        ok = not unique and not any(codes) and len(checks) == len(codes)
        steps = self._newest_step() + 1
        self._report = FleetReport(
            ok, codes, self._attempt, steps, unique, tuple(checks), self._unconnected()
        )
        self._write("finished", ok=ok, codes=codes, restarts=self._attempt, problems=unique)
        if self._lines is not None:
            self._lines.close()
        if self._lock is not None:
            self._lock.close()
        return self._report

    def _unconnected(self) -> str:
        """Return why no rank was ever connected to a controller; empty if one was."""
        if not self._config.agent or not self._config.controllers:
            return ""
        ranks = range(self._config.num_ranks)
        links = [line for rank in ranks for line in self._lines_of(rank) if line["kind"] == "link"]
        if any(line["connected"] for line in links):
            return ""
        return links[-1]["detail"] if links else "none had answered by the end"

    def _newest_step(self) -> int:
        ranks = range(self._config.num_ranks)
        lines = (line for rank in ranks for line in self._lines_of(rank))
        steps = (line["step"] for line in lines if line["kind"] == "step")
        return int(max([self._config.first_step - 1, *steps]))

    def _lines_of(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank wrote in this run."""
        return read_lines(self.folder / f"rank-{rank}.jsonl")[self._earlier.get(rank, 0) :]

    def _write(self, kind: str, **keys: Any) -> None:
        if self._lines is not None:
            self._lines.write(kind, **keys)


def _locked(folder: Path) -> IO[str]:
    """Return a file that locks the folder until it is closed; the ranks do not inherit it."""
    lock = (folder / "lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise InvalidInput(
            f"another fleet runs in the folder {folder}; --out names another folder"
        ) from None
    return lock


def died_words(codes: Sequence[int | None]) -> str:
    """Return which ranks died of what, such as `rank 1 died (signal 9)`.

    Args:
        codes: exit code of each rank, or minus the number of its signal; None while it runs.
    """
    return ", ".join(
        f"rank {rank} died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        for rank, code in enumerate(codes)
        if code is not None and code not in _FINAL
    )


def run_fleet(
    config: RankConfig,
    tell: Callable[[str], None] | None = None,
    progress: Callable[[int | None], None] | None = None,
) -> FleetReport:
    """Run the ranks to their end; on the main thread, SIGINT and SIGTERM stop them cleanly.

    Args:
        config: as in `Supervisor`.
        tell: as in `Supervisor`.
        progress: takes about once a second the newest step; None before the first.
    """
    supervisor = Supervisor(config, tell=tell)
    watch = FleetWatch(tell or (lambda words: None))

    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        supervisor.request_stop()

    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        read = {path: path.stat().st_size for path in config.folder.glob("rank-*.jsonl")}
        supervisor.start()
        polls = 0
        while (report := supervisor.poll()) is None:
            if polls % _POLLS_PER_PROGRESS == 0:
                watch.feed(read_new_lines(config.folder, config.num_ranks, read), time.monotonic())
                if progress is not None:
                    progress(watch.step)
            polls += 1
            time.sleep(_POLL_S)
        return report
    finally:
        supervisor.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
