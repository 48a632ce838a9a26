"""A change of the number of ranks while they serve, as their supervisor sees it.

First the processes that join load, and the ranks that retire serve the requests that they have.
The old group serves meanwhile, and giving up leaves it whole. Only then it is told to stop after a
step, and the processes that stay or join form the new group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.fleet_report import FINAL, FleetRecord
from evenkeel_moe.engines.reference.rank_process import RankProcess
from evenkeel_moe.engines.reference.resize import leaving_ranks

_LOAD_S = 120.0
"""Seconds in which processes that join must have loaded."""


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

    @property
    def words(self) -> str:
        """The outcome in one sentence."""
        sizes = f"from {self.ranks_before} to {self.ranks_wanted} ranks"
        if self.failed:
            return f"the resize {sizes} failed: {self.failed}"
        left = f"; {self.given_up} requests of retiring ranks were given up" * bool(self.given_up)
        return (
            f"resized {sizes}: serving paused for {self.pause_s:.3f} s between steps"
            f" {self.first_step - 1} and {self.first_step}{left}"
        )


@dataclass(eq=False, slots=True)
class Resizing:
    """A resize under way."""

    before: RankConfig
    after: RankConfig
    old: Sequence[RankProcess]
    """The process of each rank of the old group."""
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
        """The ranks of the old group that retire."""
        return leaving_ranks(self.before.num_ranks, self.after.former)

    @property
    def members(self) -> list[RankProcess]:
        """The process of each rank of the new group."""
        return [
            self.joining[rank] if before is None else self.old[before]
            for rank, before in enumerate(self.after.former)
        ]

    def is_prepared(self, record: FleetRecord, now: float) -> bool:
        """Return True if who joins has loaded, and who retires has no request or no more time."""
        drained = record.group(self.after.group).drained
        waits = now < self.began + self.drain_s and not drained.issuperset(self.leaving)
        return not waits and record.group(self.after.group).ready.issuperset(self.joining)

    def is_formed(self, record: FleetRecord) -> bool:
        """Return True if every rank of the new group has begun to serve."""
        group = record.group(self.after.group)
        came = {rank for rank, before in enumerate(self.after.former) if before is not None}
        return len(group.starts) == self.after.num_ranks and group.resized.keys() >= came

    def trouble(self, record: FleetRecord, now: float) -> str:
        """Return why this resize has to be given up; empty if it goes on."""
        dead = [rank for rank, process in self.joining.items() if process.poll() is not None]
        if dead and not self.forming:
            codes = ", ".join(f"{rank} with exit code {self.joining[rank].poll()}" for rank in dead)
            return f"new ranks ended before they joined: {codes}"
        if not self.forming and now > self.began + max(_LOAD_S, self.drain_s):
            return f"the new ranks {sorted(self.joining)} did not load within {_LOAD_S:g} s"
        refused = record.group(self.after.group).refused
        # Until every rank has, one may still have to look into the configuration.
        if len(refused) == self.before.num_ranks:
            return refused[0]
        if all(process.poll() in FINAL for process in self.old):
            return "the run ended first"
        return ""

    def outcome(self, record: FleetRecord) -> ResizeOutcome:
        """Return what came of it, once the new group has formed."""
        group = record.group(self.after.group)
        return ResizeOutcome(
            self.before.num_ranks,
            self.after.num_ranks,
            first_step=group.starts[0]["step"],
            pause_s=max(line["pause_s"] for line in group.resized.values()),
            given_up=record.group(self.before.group).given_up,
        )

    def failed(self, why: str) -> ResizeOutcome:
        """Return the outcome of a resize that was given up."""
        return ResizeOutcome(self.before.num_ranks, self.after.num_ranks, why)
