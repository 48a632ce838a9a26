"""The plan records of one deployment, their phases, and the history of their changes.

Every change returns the PersistPlan that stores it. Which plan may run is decided in `control`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from evenkeel_moe.errors import Conflict, NotFound, Reason
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase, PlanRecord
from evenkeel_moe.protocol.control_messages import PersistPlan
from evenkeel_moe.protocol.messages import MovedAnswers

_KEPT_TERMINAL = 16
"""Ended plans kept in memory. The store keeps more: one plan of a large model takes megabytes."""

_KEPT_FAILURES = 16
"""Failed plans kept however old: after so many failures the wait for the next plan is longest."""

_KEPT_CALIBRATING = 8
"""Plans kept however old because their measured gain calibrates the next promises."""

_MOST_PROPOSALS = 32
"""Proposals made by hand that may wait at the same time."""

_ACTIVE = frozenset({PlanPhase.APPROVED, PlanPhase.MIGRATING, PlanPhase.PAUSED, PlanPhase.STALLED})

ANSWERED = "answered"
"""The event of a story's row about the experts that a wave moved."""
MEASURED = "measured"
"""The event of a story's row about the gain that a plan delivered."""

_OVERTAKEN = frozenset(
    {
        Reason.STALE_BASE,
        Reason.GENERATION_CHANGED,
        Reason.WEIGHTS_VERSION_CHANGED,
        Reason.LEASE_LOST,
    }
)
"""Reasons that do not tell whether the group can carry plans out."""


def require_same_request(record: PlanRecord, digest: str | None) -> PlanRecord:
    """Return the record if this request created it.

    Raises:
        Conflict: another request created it.
    """
    if record.request_digest != digest:
        plan_id = record.plan.plan_id
        raise Conflict(f"plan {plan_id} was created by another request", Reason.ID_REUSED)
    return record


def is_failure(record: PlanRecord) -> bool:
    """Return True if an automatic plan was refused or failed, and was not merely overtaken.

    An operator's rejection or cancellation counts as a refusal: who said no is not asked again at
    once, and the plan that was stopped does not begin again at once.
    """
    failed = (
        record.phase in (PlanPhase.REFUSED, PlanPhase.ABORTED) and record.reason not in _OVERTAKEN
    )
    stopped = record.phase is PlanPhase.CANCELLED
    return (failed or stopped) and record.plan.kind is PlanKind.AUTOMATIC


def select_remembered(records: Iterable[PlanRecord]) -> list[PlanRecord]:
    """Return the records a leader needs: all that have not ended, and some that have.

    Besides the newest ended records these are, however old: the plan that led to the present epoch,
    which a rollback undoes; the newest plan that was carried out, cancelled or aborted, from whose
    end cooldowns count; the failures since the last plan that was carried out; the newest plans
    whose measured gain calibrates the next promises.

    Order: as given, oldest first.
    """
    records = list(records)
    ended = [record for record in records if record.phase.terminal]
    by_end = sorted(ended, key=lambda record: record.updated_at)
    kept = ended[-_KEPT_TERMINAL:] + [record for record in ended if record.waves_committed][-1:]
    for phase in (PlanPhase.COMMITTED, PlanPhase.CANCELLED, PlanPhase.ABORTED):
        kept += [record for record in by_end if record.phase is phase][-1:]
    committed = [r.updated_at for r in ended if r.phase is PlanPhase.COMMITTED]
    since = max(committed, default=float("-inf"))
    failures = [record for record in by_end if record.updated_at > since and is_failure(record)]
    calibrating = [r for r in by_end if r.gain_pair is not None and r.gain_pair.counts]
    kept += calibrating[-_KEPT_CALIBRATING:]
    names = {record.plan.plan_id for record in kept + failures[-_KEPT_FAILURES:]}
    return [
        record for record in records if not record.phase.terminal or record.plan.plan_id in names
    ]


class PlanRecords:
    """All records that have not ended, and those of the ended ones that a leader needs."""

    def __init__(self) -> None:
        self.by_id: dict[PlanId, PlanRecord] = {}
        """Oldest first."""

    def load(self, records: Iterable[PlanRecord]) -> None:
        """Replace all records by those of the store."""
        self.by_id = {r.plan.plan_id: r for r in sorted(records, key=lambda r: r.plan.created_at)}
        self._forget_old()

    def get(self, plan_id: PlanId) -> PlanRecord:
        """Return one record.

        Raises:
            NotFound: the plan is not in memory.
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
        """The records that have not ended, oldest first."""
        return tuple(r for r in self.by_id.values() if not r.phase.terminal)

    @property
    def proposals(self) -> tuple[PlanRecord, ...]:
        """The plans that wait for approval, oldest first."""
        return tuple(r for r in self.by_id.values() if r.phase is PlanPhase.PROPOSED)

    def proposal(self) -> PlanRecord | None:
        """Return the newest automatic proposal that waits for approval."""
        waiting = reversed(self.proposals)
        return next((r for r in waiting if r.plan.kind is PlanKind.AUTOMATIC), None)

    def newest(self, phase: PlanPhase) -> PlanRecord | None:
        """Return the record of a phase that changed last."""
        found = (record for record in self.by_id.values() if record.phase is phase)
        return max(found, key=lambda record: record.updated_at, default=None)

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
        row: dict[str, Any] = _story_row(unix, "created", phase, reason)
        row |= {"by": by} if by else {}
        row |= {"detail": detail} if detail else {}
        error = detail or reason.value if phase.terminal else None
        record = PlanRecord(
            plan,
            phase,
            reason,
            0,
            unix,
            error,
            made_by=by or None,
            request_digest=digest,
            story=(row,),
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
        **marks: Any,
    ) -> PersistPlan:
        """Replace a record; `event` and the arguments also become a row of its story.

        Args:
            marks: other fields of the record, which the story does not show.
        """
        phase = record.phase if phase is None else phase
        reason = record.reason if reason is None else reason
        row: dict[str, Any] = _story_row(unix, event, phase, reason)
        if waves_committed is not None:
            row |= {"waves_committed": waves_committed}
            marks |= {"waves_committed": waves_committed, "wave_agreed": False}
        row |= {"detail": detail} if detail else {}
        row |= {"by": by} if by else {}
        failed = phase.terminal and phase is not PlanPhase.COMMITTED
        new = replace(
            record,
            phase=phase,
            reason=reason,
            updated_at=unix,
            error=(detail or reason.value) if failed else record.error,
            story=(*record.story, row),
            **marks,
        )
        self.by_id[record.plan.plan_id] = new
        return PersistPlan(new)

    def end(self, record: PlanRecord, reason: Reason, unix: float, detail: str = "") -> PersistPlan:
        """End a plan early: cancelled on request, refused before its first wave, else aborted."""
        if reason is Reason.CANCELLED:
            phase = PlanPhase.CANCELLED
        else:
            phase = PlanPhase.ABORTED if record.has_begun else PlanPhase.REFUSED
        return self.change(record, "ended", unix, phase=phase, reason=reason, detail=detail)

    def complete(self, record: PlanRecord, unix: float) -> PersistPlan | None:
        """End a plan if all its waves are committed; None if they are not."""
        if record.waves_committed < len(record.plan.waves):
            return None
        phase, reason = PlanPhase.COMMITTED, Reason.COMMITTED
        return self.change(record, "ended", unix, phase=phase, reason=reason)

    def measured(self, record: PlanRecord, delivered: DeliveredGain, unix: float) -> PersistPlan:
        """Enter the measured gain of an ended plan; it still ended when it did."""
        row = _story_row(unix, MEASURED, record.phase, record.reason) | story_of(
            delivered, record.plan.numbers
        )
        new = replace(record, delivered=delivered, story=(*record.story, row))
        self.by_id[record.plan.plan_id] = new
        return PersistPlan(new)

    @staticmethod
    def has_answers(record: PlanRecord, wave: int) -> bool:
        """Return True if the story has what the experts that a wave moved answer."""
        return any(row["event"] == ANSWERED and row.get("wave") == wave for row in record.story)

    def answered(
        self, record: PlanRecord, answers: Sequence[MovedAnswers], unix: float
    ) -> PersistPlan:
        """Enter how the experts that a wave moved answer, by the sums over its ranks."""
        row = _story_row(unix, ANSWERED, record.phase, record.reason)
        row |= {"wave": answers[0].wave.wave_index}
        row |= {
            name: sum(getattr(one, name) for one in answers)
            for name in ("moved", "same", "different", "blind")
        }
        new = replace(record, story=(*record.story, row))
        self.by_id[record.plan.plan_id] = new
        return PersistPlan(new)

    def note_wave(self, record: PlanRecord, figures: dict[str, Any]) -> PlanRecord:
        """Add figures of the newest wave to the row of its start; the next change stores them."""
        story = list(record.story)
        began = (i for i, row in enumerate(story) if row["event"] == "wave_started")
        newest = max(began, default=None)
        if newest is None:
            return record
        story[newest] = {**story[newest], **figures}
        new = replace(record, story=tuple(story))
        self.by_id[record.plan.plan_id] = new
        return new

    def sweep(self, is_stale: Callable[[PlanRecord], bool], unix: float) -> list[PersistPlan]:
        """End proposals that have expired or whose base is stale."""
        changes = []
        for record in self.proposals:
            expires_at = record.plan.expires_at
            if expires_at is not None and unix >= expires_at:
                changes.append(self._expire(record, unix))
            elif is_stale(record):
                detail = f"based on epoch {record.plan.base_epoch}"
                changes.append(self.end(record, Reason.STALE_BASE, unix, detail))
        return changes

    def drop_excess(self, unix: float) -> list[PersistPlan]:
        """End the oldest proposals made by hand if there are too many of them.

        Proposals by hand are frequent, and each is kept until it expires.
        """
        waiting = [r for r in self.proposals if r.plan.kind is not PlanKind.AUTOMATIC]
        detail = f"{_MOST_PROPOSALS} newer proposals wait"
        excess = waiting[: max(0, len(waiting) - _MOST_PROPOSALS)]
        return [self._expire(record, unix, detail) for record in excess]

    def _expire(self, record: PlanRecord, unix: float, detail: str = "") -> PersistPlan:
        phase, reason = PlanPhase.EXPIRED, Reason.EXPIRED
        return self.change(record, "ended", unix, phase=phase, reason=reason, detail=detail)

    def same_request(self, plan_id: PlanId, digest: str | None) -> PlanRecord | None:
        """Return the record of this id; None if the id is new.

        Raises:
            Conflict: another request created the plan of this id.
        """
        record = self.by_id.get(plan_id)
        return None if record is None else require_same_request(record, digest)

    def _forget_old(self) -> None:
        kept = select_remembered(self.by_id.values())
        self.by_id = {record.plan.plan_id: record for record in kept}


def story_of(delivered: DeliveredGain, promised: Mapping[str, float]) -> dict[str, Any]:
    """Return the promised and the delivered gain as parts of a story row; None is unknown."""
    figures = {
        "promised_gain": promised.get("gain"),
        "promised_lower": promised.get("gain_lower"),
        "delivered_gain": delivered.gain,
        "delivered_lower": delivered.lower,
        "delivered_upper": delivered.upper,
        "steps": delivered.steps,
        **{
            f"{name}_{when}": getattr(speed, name)
            for when, speed in (("before", delivered.before), ("after", delivered.after))
            if speed is not None
            for name in ("step_s", "tokens_per_s")
        },
    }
    return figures | ({"detail": delivered.unknown_because} if delivered.unknown_because else {})


def _story_row(unix: float, event: str, phase: PlanPhase, reason: Reason) -> dict[str, Any]:
    return {"at": unix, "event": event, "phase": phase.value, "reason": reason.value}
