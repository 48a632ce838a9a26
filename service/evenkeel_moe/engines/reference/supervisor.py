"""Starts, restarts and resizes the ranks of a run, and leaves no process behind.

Use::

    supervisor = Supervisor(config)
    supervisor.start()
    while (report := supervisor.poll()) is None:   # restarts the group when a rank died
        ...                                        # e.g. supervisor.resize(6)
    supervisor.stop()                              # always safe, also after the end

or `fleet.run_fleet(config)`, which does this and stops the ranks on SIGINT and SIGTERM. The kernel
kills the ranks when the thread that called `start` ends, however it ends. So that thread must
live as long as the run.
"""

import fcntl
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

from evenkeel_moe.engines.reference.config import ExitCode, RankConfig
from evenkeel_moe.engines.reference.fleet_report import (
    FINAL,
    FleetRecord,
    FleetReport,
    died_words,
)
from evenkeel_moe.engines.reference.lines import LineWriter, replace_text
from evenkeel_moe.engines.reference.rank_process import RankProcess, StartRank, start_rank_process
from evenkeel_moe.engines.reference.resize import resized_config, survivors_config
from evenkeel_moe.engines.reference.resizing import ResizeOutcome, Resizing
from evenkeel_moe.engines.reference.state import SavedPlacement, first_placement, load_placement
from evenkeel_moe.errors import Conflict, InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import Placement

_POLL_S = 0.05


class Supervisor:
    """The parent of one run's ranks.

    Args:
        config: the run; the supervisor sets `rank`, `first_step`, and all fields of the group.
        max_restarts: how often the group may be restarted.
        grace_s: seconds that ranks get to stop before they are killed.
        module: the module of a rank process, run as `python -m MODULE CONFIG RANK`.
        start_rank: starts a rank process; `start_rank_process` by default.
        tell: takes a sentence for the operator whenever a rank died or a resize ended.
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
        self._config = config.replace(rank=-1)
        self._module = module
        self._start_rank = start_rank
        self._tell = tell or (lambda words: None)
        self._max_restarts = max_restarts
        self._grace_s = grace_s
        self._ranks: list[RankProcess] = []
        self._retired: list[tuple[int, int, RankProcess]] = []  # (group, rank, process)
        self._resizing: Resizing | None = None
        self._before: RankConfig | None = None  # the group that died while it went over
        self._newest_group = config.group
        self._over_at: float | None = None
        self._stopping = False
        self._report: FleetReport | None = None
        self._lock: IO[str] | None = None
        self._lines: LineWriter | None = None
        self._record = FleetRecord(self.folder)
        self.resized: ResizeOutcome | None = None
        """How the last resize ended; None before, and while one is under way."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of each rank of the current group."""
        return tuple(process.pid for process in self._ranks)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the current group."""
        return self._config.num_ranks

    @property
    def restarts(self) -> int:
        """The number of restarts so far."""
        return self._config.attempt

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
        self._record = FleetRecord(self.folder)
        self._start_group(self._config)
        self._write("started", pids=self.pids)

    def poll(self) -> FleetReport | None:
        """Check the ranks once, without waiting; return None while the run goes on."""
        if self._report is not None:
            return self._report
        if self._resizing is not None:
            self._carry_on(self._resizing)
        codes = [process.poll() for process in self._ranks]
        broken = any(code is not None and code not in FINAL for code in codes)
        now = time.monotonic()
        if (broken or None not in codes) and self._over_at is None:
            if broken:
                self._write("rank_died", codes=codes)
                resizing = self._resizing
                if resizing is not None and not (resizing.forming or resizing.after.dead):
                    self._give_up(resizing, "a rank died")
                if (after := self._without_dead(codes)) is not None:
                    self._tell(f"{died_words(codes)}; the others go on without")
                    self._ranks = self._begin_resize(after).members
                    return None
                self._tell(f"{died_words(codes)}; {self._next_words()}")
                self._end_resize_by_death()
                for process in self._ranks if self._config.shrinks else ():
                    process.terminate()  # It may wait for a group without the dead.
                codes = [process.poll() for process in self._ranks]
            self._over_at = now
        if None in codes or None in self._retired_codes():
            if self._over_at is None or now - self._over_at <= self._grace_s:
                return None
            self._kill()
        if broken and not self._stopping and self.restarts < self._max_restarts:
            self._restart()
            return None
        return self._finish()

    def resize(
        self, num_ranks: int, retire: Collection[int] = (), *, drain_s: float = 30.0
    ) -> None:
        """Begin to change the number of ranks while they serve; `poll` carries on.

        The processes that stay keep their experts, their requests and their order, and become
        ranks 0, 1, ...; new processes with empty slots come after them.

        Args:
            num_ranks: M, of the new group.
            retire: ranks that leave; by default the highest ones, as many as are too many.
            drain_s: seconds that retiring ranks may go on serving the requests they have. What has
                not ended then is given up, with a line for each request.

        Raises:
            Conflict: the ranks start, stop, restart or are resized just now.
            InvalidInput: nothing would change, or this group cannot have this size.
            InfeasiblePlan: an expert lives on retiring ranks alone.
        """
        if self._resizing is not None:
            sizes = self._resizing.before.num_ranks, self._resizing.after.num_ranks
            raise Conflict(f"a resize from {sizes[0]} to {sizes[1]} ranks is under way")
        if self._report is not None or self._stopping or self._over_at is not None:
            raise Conflict(f"the {self.num_ranks} ranks are stopping or being restarted")
        self._record.read()
        started = len(self._record.of_group(self._config.group, "start"))
        if started < self.num_ranks:
            raise Conflict(f"{started} of {self.num_ranks} ranks have started so far")
        after = resized_config(self._config, self._placement(), num_ranks, retire)
        resizing = self._begin_resize(after, drain_s)
        leaving, joining = resizing.leaving, list(resizing.joining)
        self._write("resizing", ranks=num_ranks, retire=leaving, joining=joining)

    def request_stop(self) -> None:
        """Ask the ranks to stop after their current step and run the final check."""
        self._stopping = True
        if self._resizing is not None and not self._resizing.forming:
            self._give_up(self._resizing, "the run is stopping")
        for process in self._processes():
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

    # --- groups -----------------------------------------------------------------------------------

    def _start_group(self, config: RankConfig) -> None:
        """Start every rank of a group that takes over nothing."""
        self._config = config.replace(
            former=(), forming=True, rendezvous=self._rendezvous(config.group)
        )
        self._write_config(self._config)
        self._ranks = [self._start_process(rank) for rank in range(config.num_ranks)]

    def _restart(self) -> None:
        self._record.read()
        first_step = self._newest_step() + 1
        self._over_at = None
        before, self._before = self._before, None
        if before is not None and self._saved_epoch(before) >= self._saved_epoch(self._config):
            self._config = before  # No rank of the next group has saved its map yet.
        attempt, group = self.restarts + 1, self._next_group()
        self._start_group(self._config.replace(attempt=attempt, group=group, first_step=first_step))
        self._write("restarted", attempt=attempt, first_step=first_step, pids=self.pids)

    def _without_dead(self, codes: list[int | None]) -> RankConfig | None:
        """Return the group of the ranks that are left; None if all have to start again."""
        config = self._config
        dead = [rank for rank, code in enumerate(codes) if code is not None]
        self._record.read()
        started = len(self._record.of_group(config.group, "start")) == self.num_ranks
        if self._stopping or self._resizing is not None or not (config.shrinks and started):
            return None
        # A rank that ended by itself has left a group whose state is unknown.
        if any(codes[rank] in set(ExitCode) - {ExitCode.FAILED} for rank in dead):
            return None
        try:
            return survivors_config(config, self._placement(), dead)
        except (InvalidInput, InfeasiblePlan, ShapeMismatch) as error:
            self._tell(f"the other ranks cannot go on alone: {error}")
            return None

    def _begin_resize(self, after: RankConfig, drain_s: float = 0.0) -> Resizing:
        group = self._next_group()
        after = after.replace(group=group, forming=False, rendezvous=self._rendezvous(group))
        self._write_config(after)
        joining = {
            rank: self._start_process(rank)
            for rank, former in enumerate(after.former)
            if former is None
        }
        now = time.monotonic()
        self._resizing = Resizing(self._config, after, self._ranks, joining, now, drain_s)
        self.resized = None
        return self._resizing

    def _carry_on(self, resizing: Resizing) -> None:
        """Take the next step of a resize, if it is due."""
        self._record.read()
        now = time.monotonic()
        if resizing.is_formed(self._record):
            self._end_resize("")
        elif why := resizing.trouble(self._record, now, self._saved_epoch(resizing.before)):
            self._give_up(resizing, why)
        elif not resizing.forming and resizing.is_prepared(self._record, now):
            resizing.forming = True
            group = resizing.before.group
            lost = self._record.of_group(group, "lost").values()
            first_step = max(
                (line["next_step"] for line in lost), default=resizing.after.first_step
            )
            self._config = resizing.after.replace(forming=True, first_step=first_step)
            self._ranks = resizing.members
            self._retired += [(group, rank, resizing.old[rank]) for rank in resizing.retiring]
            after = self._config
            self._write("forming", group=after.group, former=after.former, dead=after.dead)
            self._write_config(self._config)

    def _give_up(self, resizing: Resizing, why: str) -> None:
        """Go back to the group that was to be resized, which serves or has ended."""
        for process in resizing.joining.values():
            process.kill()
            process.wait()
        self._config, self._ranks = resizing.before, list(resizing.old)
        if resizing.after.dead:
            self._kill()
        self._retired = [one for one in self._retired if one[0] != resizing.before.group]
        self._write_config(self._config)
        self._end_resize(why)

    def _end_resize_by_death(self) -> None:
        """Give a resize up; once ranks of the next group have saved its map, that is restarted."""
        resizing = self._resizing
        if resizing is not None and not resizing.forming:
            self._give_up(resizing, "a rank died")
        elif resizing is not None:
            for process in resizing.joining.values():
                process.kill()
            leaving = [one for one in self._retired if one[0] == resizing.before.group]
            self._retired = [one for one in self._retired if one not in leaving]
            self._ranks += [process for _, _, process in leaving]
            self._before = resizing.before
            self._end_resize("a rank died meanwhile, all ranks are started again")

    def _end_resize(self, failed: str) -> None:
        resizing, self._resizing = self._resizing, None
        if resizing is None:
            return
        if failed:
            outcome = resizing.failed(failed)
            self._write("resize_failed", detail=failed)
        else:
            outcome = resizing.outcome(self._record)
            self._write(
                "resized",
                ranks=outcome.ranks_wanted,
                former=resizing.after.former,
                pids=self.pids,
                first_step=outcome.first_step,
                pause_s=outcome.pause_s,
                given_up=outcome.given_up,
                dead=outcome.dead,
                recovered=outcome.recovered,
            )
        self.resized = outcome
        self._tell(outcome.words)

    def _next_group(self) -> int:
        self._newest_group += 1
        return self._newest_group

    def _placement(self) -> Placement:
        """Return the placement in force, as far as the ranks have saved it."""
        found = self._newest_saved(self._config)
        return first_placement(self._config) if found is None else found.placement

    def _saved_epoch(self, config: RankConfig) -> int:
        """Return the newest epoch that ranks of a group of this size have saved; -1 if none has."""
        found = self._newest_saved(config)
        return -1 if found is None else found.epoch

    def _newest_saved(self, config: RankConfig) -> SavedPlacement | None:
        files = (config.replace(rank=rank).state_file for rank in range(config.num_ranks))
        found = [saved for file in files if (saved := load_placement(file, config.shape))]
        return max(found, key=lambda saved: saved.epoch, default=None)

    # --- processes and files ----------------------------------------------------------------------

    def _processes(self) -> list[RankProcess]:
        joining = self._resizing.joining.values() if self._resizing is not None else ()
        return [*self._ranks, *(process for _, _, process in self._retired), *joining]

    def _retired_codes(self) -> list[int | None]:
        return [process.poll() for _, _, process in self._retired]

    def _start_process(self, rank: int) -> RankProcess:
        log = self.folder / f"rank-{rank}.log"
        return self._start_rank(self._module, self._config.file, rank, log)

    def _kill(self) -> None:
        processes = self._processes()
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()

    def _rendezvous(self, group: int) -> str:
        """Return the address at which a group meets: a file without what an earlier run left."""
        path = self.folder.resolve() / f"rendezvous-{group}"
        path.unlink(missing_ok=True)
        return f"file://{path}"

    def _write_config(self, config: RankConfig) -> None:
        replace_text(config.file, config.to_json())

    # --- the report -------------------------------------------------------------------------------

    def _next_words(self) -> str:
        if self._stopping:
            return "the group is stopping"
        if self.restarts < self._max_restarts:
            return "restarting the group"
        return "the group is not restarted again"

    def _finish(self) -> FleetReport:
        self._end_resize("the run ended first")
        self._record.read()
        codes = tuple(process.returncode for process in self._ranks)
        retired = tuple(process.returncode for _, _, process in self._retired)
        problems = tuple(dict.fromkeys(self._record.problems))
        ended = [(group, rank) for group, rank, _ in self._retired]
        checks = self._record.checks(self._config.group, ended)
        all_checked = len(checks) == len(codes) + len(retired)
        ok = not problems and not any(codes) and not any(retired) and all_checked
        steps = self._newest_step() + 1
        self._report = FleetReport(
            ok, codes, self.restarts, steps, problems, checks, self._unconnected(), retired
        )
        self._write("finished", ok=ok, codes=codes, restarts=self.restarts, problems=problems)
        if self._lines is not None:
            self._lines.close()
        if self._lock is not None:
            self._lock.close()
        return self._report

    def _unconnected(self) -> str:
        """Return why no rank was ever connected to a controller; empty if one was."""
        if not self._config.agent or not self._config.controllers or self._record.connected:
            return ""
        return self._record.unconnected

    def _newest_step(self) -> int:
        newest = self._record.newest_step
        return self._config.first_step - 1 if newest is None else newest

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
