"""A change of the number of ranks while they serve, as their supervisor sees it.

First the processes that join load, and the ranks that retire serve the requests that they have.
The old group serves meanwhile, and giving up leaves it whole. Only then it is told to stop after a
step, and the processes that stay or join form the new group.

After a death the ranks that are left form the new group as soon as all of them have noticed it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.fleet_report import FINAL, FleetRecord
from evenkeel_moe.engines.reference.rank_process import RankProcess
from evenkeel_moe.engines.reference.resize import leaving_ranks
from evenkeel_moe.model.quantities import counted, numbered

_NOTICE_S = 30.0
"""Seconds in which the other ranks must have noticed a death."""
_LOAD_S = 120.0
"""Seconds in which processes that join must have loaded, after those of the drain."""


@dataclass(frozen=True, slots=True)
class ResizeOutcome:
    """How a resize ended."""

    ranks_before: int
    ranks_wanted: int
    failed: str = ""
    """Why it did; empty if the new group serves."""
    first_step: int = 0
    """First step of the new group; the old one ended with the step before."""
    pause_s: float = 0.0
    """The longest time on a rank between these two steps."""
    given_up: int = 0
    """Requests that retiring ranks had not ended in time."""
    dead: tuple[int, ...] = ()
    """The ranks whose death made the group smaller."""
    recovered: int = 0
    """Experts that died with them, and were read from the checkpoint."""

    @property
    def words(self) -> str:
        """The outcome in one sentence."""
        sizes = f"from {self.ranks_before} to {self.ranks_wanted} ranks"
        if self.dead:
            return self._words_after_death()
        if self.failed:
            return f"the resize {sizes} failed: {self.failed}"
        left = f"; {self.given_up} requests of retiring ranks were given up" * bool(self.given_up)
        return (
            f"resized {sizes}: serving paused for {self.pause_s:.3f} s between steps"
            f" {self.first_step - 1} and {self.first_step}{left}"
        )

    def _words_after_death(self) -> str:
        dead = f"rank{'s' * (len(self.dead) > 1)} {numbered(self.dead)} died"
        if self.failed:
            return f"{dead}, and the others do not go on without: {self.failed}"
        return (
            f"{dead}, the other {self.ranks_wanted} go on: every expert was served again after"
            f" {self.pause_s:.3f} s, {counted(self.recovered, 'lost expert')} read from the"
            " checkpoint"
        )


@dataclass(eq=False, slots=True)
class Resizing:
    """A resize under way."""

    before: RankConfig
    after: RankConfig
    old: Sequence[RankProcess]
    """The process of each rank of the old group, also of those that died."""
    joining: Mapping[int, RankProcess]
    """The process of each rank of the new group that was not in the old one."""
    began: float
    """Monotonic seconds."""
    drain_s: float
    """Seconds that retiring ranks may go on serving the requests they have."""
    forming: bool = False
    """The old group was told to stop."""

    @property
    def leaving(self) -> tuple[int, ...]:
        """The ranks of the old group that are not in the new one."""
        return leaving_ranks(self.before.num_ranks, self.after.former)

    @property
    def retiring(self) -> tuple[int, ...]:
        """The ranks of the old group that leave alive."""
        return tuple(rank for rank in self.leaving if rank not in self.after.dead)

    @property
    def members(self) -> list[RankProcess]:
        """The process of each rank of the new group."""
        return [
            self.joining[rank] if before is None else self.old[before]
            for rank, before in enumerate(self.after.former)
        ]

    def is_prepared(self, record: FleetRecord, now: float) -> bool:
        """Return True if who joins has loaded, and who retires has no request or no more time."""
        if self.after.dead:
            return record.of_group(self.before.group, "lost").keys() >= set(self.after.former)
        drained = record.of_group(self.after.group, "drained").keys()
        waits = now < self.began + self.drain_s and not drained >= set(self.retiring)
        ready = record.of_group(self.after.group, "ready").keys()
        return not waits and ready >= self.joining.keys()

    def is_formed(self, record: FleetRecord) -> bool:
        """Return True if every rank of the new group has begun to serve."""
        group = self.after.group
        came = {rank for rank, before in enumerate(self.after.former) if before is not None}
        started = len(record.of_group(group, "start"))
        return started == self.after.num_ranks and record.of_group(group, "resized").keys() >= came

    def trouble(self, record: FleetRecord, now: float, saved_epoch: int) -> str:
        """Return why this resize has to be given up; empty if it goes on.

        Args:
            record: what the ranks have written.
            now: monotonic seconds.
            saved_epoch: the newest that a rank of the old group has saved; -1 if none has.
        """
        if self.after.dead:
            lost = record.of_group(self.before.group, "lost")
            if not self.is_prepared(record, now) and now > self.began + _NOTICE_S:
                return f"only ranks {sorted(lost)} noticed it within {_NOTICE_S:g} s"
            epochs = {line["epoch"] for line in lost.values()}
            if len(epochs) > 1:
                return f"their maps have the epochs {sorted(epochs)}"
            if epochs and saved_epoch > max(epochs):
                # Who died had swapped and may have told so: the others must not use this epoch.
                return f"they are at epoch {max(epochs)}, who died had come to {saved_epoch}"
            return ""
        dead = [rank for rank, process in self.joining.items() if process.poll() is not None]
        if dead and not self.forming:
            codes = ", ".join(f"{rank} with exit code {self.joining[rank].poll()}" for rank in dead)
            return f"new ranks ended before they joined: {codes}"
        loading = sorted(self.joining.keys() - record.of_group(self.after.group, "ready").keys())
        limit_s = self.drain_s + _LOAD_S
        if loading and not self.forming and now > self.began + limit_s:
            return f"the new ranks {loading} did not load within {limit_s:g} s"
        refused = record.of_group(self.after.group, "refused")
        # Until every rank has, one may still have to look into the configuration.
        if len(refused) == self.before.num_ranks:
            return str(refused[0]["detail"])
        if all(process.poll() in FINAL for process in self.old):
            return "the run ended first"
        return ""

    def outcome(self, record: FleetRecord) -> ResizeOutcome:
        """Return what came of it, once the new group has formed."""
        group = self.after.group
        resized = record.of_group(group, "resized").values()
        return ResizeOutcome(
            self.before.num_ranks,
            self.after.num_ranks,
            first_step=record.of_group(group, "start")[0]["step"],
            pause_s=max(line["pause_s"] for line in resized),
            given_up=record.given_up(self.before.group),
            dead=self.after.dead,
            recovered=sum(line["recovered"] for line in resized),
        )

    def failed(self, why: str) -> ResizeOutcome:
        """Return the outcome of a resize that was given up."""
        sizes = self.before.num_ranks, self.after.num_ranks
        return ResizeOutcome(*sizes, why, dead=self.after.dead)
