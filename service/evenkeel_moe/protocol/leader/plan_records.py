"""The plan records of one deployment: which there are, what each may become, and its story.

Pure bookkeeping: every change returns the PersistPlan that stores it. Who may run is decided in
`control`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from evenkeel_moe.errors import Conflict, NotFound, Reason
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase, PlanRecord
from evenkeel_moe.protocol.control_messages import PersistPlan

__all__ = ["PlanRecords", "is_failure", "remembered", "repeated"]

_KEPT_TERMINAL = 16
"""Newest ended plans kept in memory; the store keeps more. One of a large model may have thousands of transfers, megabytes."""

_KEPT_FAILURES = 16
"""Failed plans kept however old: the wait for the next plan, doubled so often, is at its longest."""

_MOST_PROPOSALS = 32
"""Proposals by hand that wait at a time."""

_ACTIVE = frozenset({PlanPhase.APPROVED, PlanPhase.MIGRATING, PlanPhase.PAUSED, PlanPhase.STALLED})

_MOVED_ON = frozenset(
    {
        Reason.STALE_BASE,
        Reason.GENERATION_CHANGED,
        Reason.WEIGHTS_VERSION_CHANGED,
        Reason.LEASE_LOST,
    }
)
"""Ends that say nothing about whether the group can carry plans out."""


def repeated(record: PlanRecord, digest: str | None) -> PlanRecord:
    """The record, asked for again by the request that created it.

    Raises:
        Conflict: another request did.
    """
    if record.request_digest != digest:
        raise Conflict(
            f"plan {record.plan.plan_id} was created by another request", Reason.ID_REUSED
        )
    return record


def is_failure(record: PlanRecord) -> bool:
    """Whether an automatic plan was refused or failed, and not because the world outran it."""
    failed = (
        record.phase in (PlanPhase.REFUSED, PlanPhase.ABORTED) and record.reason not in _MOVED_ON
    )
    return failed and record.plan.kind is PlanKind.AUTOMATIC


def remembered(records: Iterable[PlanRecord]) -> list[PlanRecord]:
    """Of all records, oldest first, those a leader must know: what has not ended, and the newest that has.

    However many ended since: the plan that led to the present epoch, which a rollback undoes; the newest that was
    carried out, cancelled or aborted, from whose end cooldowns count; the failures since one was carried out.
    """
    records = list(records)
    ended = [record for record in records if record.phase.terminal]
    by_end = sorted(ended, key=lambda record: record.updated_at)
    kept = ended[-_KEPT_TERMINAL:] + [record for record in ended if record.waves_committed][-1:]
    for phase in (PlanPhase.COMMITTED, PlanPhase.CANCELLED, PlanPhase.ABORTED):
        kept += [record for record in by_end if record.phase is phase][-1:]
    done_at = max(
        (r.updated_at for r in ended if r.phase is PlanPhase.COMMITTED), default=float("-inf")
    )
    failures = [record for record in by_end if record.updated_at > done_at and is_failure(record)]
    names = {record.plan.plan_id for record in kept + failures[-_KEPT_FAILURES:]}
    return [
        record for record in records if not record.phase.terminal or record.plan.plan_id in names
    ]


class PlanRecords:
    """Records by plan id, oldest first: all that have not ended, and of the others those in `remembered`."""

    def __init__(self) -> None:
        self.by_id: dict[PlanId, PlanRecord] = {}

    def load(self, records: Iterable[PlanRecord]) -> None:
        """Replace everything by what the store held."""
        self.by_id = {r.plan.plan_id: r for r in sorted(records, key=lambda r: r.plan.created_at)}
        self._forget_old()

    def get(self, plan_id: PlanId) -> PlanRecord:
        """One record.

        Raises:
            NotFound: no such plan in memory.
        """
        if plan_id not in self.by_id:
            raise NotFound(f"no plan {plan_id}")
        return self.by_id[plan_id]

    @property
    def active(self) -> PlanRecord | None:
        """The accepted plan that has not ended; there is at most one."""
        return next((r for r in reversed(self.by_id.values()) if r.phase in _ACTIVE), None)

    @property
    def open(self) -> tuple[PlanRecord, ...]:
        """Records that have not ended, oldest first."""
        return tuple(r for r in self.by_id.values() if not r.phase.terminal)

    def proposal(self) -> PlanRecord | None:
        """The newest automatic proposal that waits for approval."""
        waiting = (r for r in reversed(self.by_id.values()) if r.phase is PlanPhase.PROPOSED)
        return next((r for r in waiting if r.plan.kind is PlanKind.AUTOMATIC), None)

    def add(
        self,
        plan: Plan,
        phase: PlanPhase,
        reason: Reason,
        unix: float,
        *,
        digest: str | None = None,
        by: str = "",
        detail: str = "",
    ) -> PersistPlan:
        """Enter a new plan."""
        row: dict[str, Any] = {
            "at": unix,
            "event": "created",
            "phase": phase.value,
            "reason": reason.value,
        }
        if by:
            row["by"] = by
        if detail:
            row["detail"] = detail
        error = detail or reason.value if phase.terminal else None
        record = PlanRecord(
            plan, phase, reason, 0, unix, error, request_digest=digest, story=(row,)
        )
        self.by_id[plan.plan_id] = record
        self._forget_old()
        return PersistPlan(record)

    def change(
        self,
        record: PlanRecord,
        event: str,
        unix: float,
        *,
        phase: PlanPhase | None = None,
        reason: Reason | None = None,
        detail: str = "",
        by: str = "",
        waves_committed: int | None = None,
    ) -> PersistPlan:
        """Replace a record and append a story row saying what happened, and why."""
        phase = record.phase if phase is None else phase
        reason = record.reason if reason is None else reason
        waves = record.waves_committed if waves_committed is None else waves_committed
        row: dict[str, Any] = {
            "at": unix,
            "event": event,
            "phase": phase.value,
            "reason": reason.value,
        }
        if waves_committed is not None:
            row["waves_committed"] = waves
        if detail:
            row["detail"] = detail
        if by:
            row["by"] = by
        failed = phase.terminal and phase is not PlanPhase.COMMITTED
        new = replace(
            record,
            phase=phase,
            reason=reason,
            waves_committed=waves,
            updated_at=unix,
            error=(detail or reason.value) if failed else record.error,
            approved_by=by if event == "approved" else record.approved_by,
            story=(*record.story, row),
        )
        self.by_id[record.plan.plan_id] = new
        return PersistPlan(new)

    def end(self, record: PlanRecord, reason: Reason, unix: float, detail: str = "") -> PersistPlan:
        """End a plan early: CANCELLED if asked for, REFUSED before its first wave began, else ABORTED."""
        if reason is Reason.CANCELLED:
            phase = PlanPhase.CANCELLED
        elif record.phase in (PlanPhase.PROPOSED, PlanPhase.APPROVED):
            phase = PlanPhase.REFUSED
        else:
            phase = PlanPhase.ABORTED
        return self.change(record, "ended", unix, phase=phase, reason=reason, detail=detail)

    def complete(self, record: PlanRecord, unix: float) -> PersistPlan | None:
        """End a plan whose every wave is committed; None if one is not."""
        if record.waves_committed < len(record.plan.waves):
            return None
        phase, reason = PlanPhase.COMMITTED, Reason.COMMITTED
        return self.change(record, "ended", unix, phase=phase, reason=reason)

    def sweep(self, is_stale: Callable[[PlanRecord], bool], unix: float) -> list[PersistPlan]:
        """End proposals that ran out of time or whose base is no more."""
        changes = []
        for record in self.open:
            expires_at = record.plan.expires_at
            if record.phase is not PlanPhase.PROPOSED:
                continue
            if expires_at is not None and unix >= expires_at:
                phase, reason = PlanPhase.EXPIRED, Reason.EXPIRED
                changes.append(self.change(record, "ended", unix, phase=phase, reason=reason))
            elif is_stale(record):
                detail = f"based on epoch {record.plan.base_epoch}"
                changes.append(self.end(record, Reason.STALE_BASE, unix, detail))
        return changes

    def same_request(self, plan_id: PlanId, digest: str | None) -> PlanRecord | None:
        """The record an id already names; None if it is new.

        Raises:
            Conflict: the id names a plan another request created.
        """
        record = self.by_id.get(plan_id)
        return None if record is None else repeated(record, digest)

    @staticmethod
    def cancel_requested(record: PlanRecord) -> bool:
        """Whether an operator asked to stop it; survives a change of leader with the record."""
        return any(row["event"] == "cancel_requested" for row in record.story)

    @staticmethod
    def has_begun(record: PlanRecord) -> bool:
        """Whether a wave of it was ever sent out."""
        return record.waves_committed > 0 or any(
            row["event"] == "wave_started" for row in record.story
        )

    def drop_excess(self, unix: float) -> list[PersistPlan]:
        """End the oldest proposals by hand beyond a few: dry runs are many and each is kept until it expires."""
        waiting = [
            record
            for record in self.open
            if record.phase is PlanPhase.PROPOSED and record.plan.kind is not PlanKind.AUTOMATIC
        ]
        return [
            self.change(
                record,
                "ended",
                unix,
                phase=PlanPhase.EXPIRED,
                reason=Reason.EXPIRED,
                detail=f"{_MOST_PROPOSALS} newer proposals wait",
            )
            for record in waiting[: max(0, len(waiting) - _MOST_PROPOSALS)]
        ]

    def _forget_old(self) -> None:
        self.by_id = {record.plan.plan_id: record for record in remembered(self.by_id.values())}
