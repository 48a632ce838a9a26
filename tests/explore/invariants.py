"""The invariants of the search, and the record of what has truly happened."""

from dataclasses import dataclass, replace

from evenkeel_moe.model.plan import PlanPhase, PlanRecord, WaveKey
from evenkeel_moe.protocol import control_messages as ctl
from tests.sim.checks import (
    NO_PROGRESS,
    RECORDS_DISAGREE,
    TORN_MAP,
    UNMATCHED_OPERATION,
    WRONG_BYTES,
    Violation,
)

EPOCH_FALLS = "epoch falls"
TOLD_UNSAVED = "unsaved epoch told"
UNEXPECTED = "unexpected message"
"""A machine takes a message of a correct peer for a violation, or raises an error."""

__all__ = [
    "EPOCH_FALLS",
    "NO_PROGRESS",
    "RECORDS_DISAGREE",
    "TOLD_UNSAVED",
    "TORN_MAP",
    "UNEXPECTED",
    "UNMATCHED_OPERATION",
    "WRONG_BYTES",
    "History",
    "Violation",
]


@dataclass(frozen=True)
class History:
    """The true events that records are compared with."""

    maps: frozenset[tuple[str, int, str]] = frozenset()
    """(generation, epoch, digest) of every map that some rank has installed."""
    saved: frozenset[tuple[str, int, str]] = frozenset()
    swapped: frozenset[WaveKey] = frozenset()
    outcomes: frozenset[tuple[WaveKey, bool]] = frozenset()
    """(wave, committed) as leaders took it."""

    def install(self, generation: str, epoch: int, digest: str) -> "History":
        """Note a map that a rank has installed: an epoch has one map on all ranks."""
        other = {d for g, e, d in self.maps if (g, e) == (generation, epoch)} - {digest}
        if other:
            raise Violation(TORN_MAP, f"epoch {epoch} of {generation} is two maps")
        return replace(self, maps=self.maps | {(generation, epoch, digest)})

    def save(self, generation: str, epoch: int, digest: str) -> "History":
        return replace(self, saved=self.saved | {(generation, epoch, digest)})

    def swap(self, wave: WaveKey) -> "History":
        if (wave, False) in self.outcomes:
            raise Violation(RECORDS_DISAGREE, f"{short(wave)} is taken as aborted and swapped")
        return replace(self, swapped=self.swapped | {wave})

    def end(self, wave: WaveKey, committed: bool) -> "History":
        """Check how a leader takes a wave to have ended."""
        if (wave, not committed) in self.outcomes:
            raise Violation(RECORDS_DISAGREE, f"{short(wave)} is taken as committed and aborted")
        if committed is not (wave in self.swapped):
            what = "committed, no rank swapped it" if committed else "aborted, a rank swapped it"
            raise Violation(RECORDS_DISAGREE, f"{short(wave)} is taken as {what}")
        return replace(self, outcomes=self.outcomes | {(wave, committed)})

    def write(self, action: ctl.PersistAction, before: PlanRecord | None, newest: int) -> "History":
        """Check a record that a leader writes.

        Args:
            before: the record of the plan that it replaces.
            newest: the highest epoch that is recorded.
        """
        match action:
            case ctl.PersistEpoch(generation=generation, epoch=epoch, placement=placement):
                self._epoch(generation, epoch, placement.digest, newest)
            case ctl.PersistPlan(record=record):
                self._plan(record, before)
        return self

    def _epoch(self, generation: str, epoch: int, digest: str, newest: int) -> None:
        if (generation, epoch, digest) not in self.saved:
            detail = f"epoch {epoch} of {generation} is recorded, and no rank has saved that map"
            raise Violation(RECORDS_DISAGREE, detail)
        if newest > epoch and any((g, e) == (generation, newest) for g, e, _ in self.maps):
            raise Violation(RECORDS_DISAGREE, f"epoch {newest} was recorded, now {epoch}")

    def _plan(self, record: PlanRecord, before: PlanRecord | None) -> None:
        plan, phase = record.plan, record.phase
        if before is not None and before.phase.terminal and phase is not before.phase:
            detail = f"{plan.plan_id} is recorded as {before.phase}, then as {phase}"
            raise Violation(RECORDS_DISAGREE, detail)
        waves = len(plan.waves)
        done = waves if phase is PlanPhase.COMMITTED else record.waves_committed
        for index in range(waves):
            wave = plan.key(index)
            if index < done and wave not in self.swapped:
                raise Violation(RECORDS_DISAGREE, f"{short(wave)} counts, and no rank swapped it")
            if index >= done and phase.terminal and (wave, True) in self.outcomes:
                detail = f"{plan.plan_id} ended {phase} without {short(wave)}, which is committed"
                raise Violation(RECORDS_DISAGREE, detail)


def short(wave: WaveKey) -> str:
    """Return the name of a wave for people."""
    return f"{wave.plan_id}/{wave.wave_index}"
