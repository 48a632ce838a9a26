"""Carries out what the control machine decides: stores, sends, starts cycles, tells people."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.driver import ActionStage
from evenkeel_moe.errors import Conflict, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.plan import PlanRecord, WaveKey
from evenkeel_moe.ports import Clock, DeploymentStore
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.messages import ControllerMessage, Prepare

__all__ = ["ControlHands", "Links", "StoreHealth"]

_log = structlog.get_logger(__name__)
_RETRY_S = 1.0
_KEPT = 1024
_ALERT_EVERY_S = 1.0
"""Alerts for one reason: a rank that talks nonsense must not fill the log with it."""


class StoreHealth:
    """Whether the store answers, as its callers last saw it."""

    def __init__(self, clock: Clock, metrics: ControllerMetrics) -> None:
        self.fault = ""
        """What is wrong; empty when nothing is."""
        self._clock = clock
        self._metrics = metrics
        self._failed_at = float("-inf")
        metrics.store_degraded(False)

    @property
    def resting(self) -> bool:
        """It failed a moment ago: a call now would only wait for the next timeout."""
        return bool(self.fault) and self._clock.monotonic() - self._failed_at < _RETRY_S

    def failed(self, error: Unavailable) -> None:
        """A call went unanswered."""
        if not self.fault:
            _log.error("store_lost", error=str(error))
            self._metrics.store_degraded(True)
        self.fault = str(error)
        self._failed_at = self._clock.monotonic()

    def answered(self) -> None:
        """A call was answered. A fault is not over with it: reads are answered where a write that needs replicas is not."""
        self._metrics.store_answered(self._clock.unix())

    def recovered(self) -> None:
        """The store's own check passed: whatever was wrong is over."""
        if self.fault:
            _log.info("store_back")
            self._metrics.store_degraded(False)
        self.fault = ""
        self.answered()


class Links(Protocol):
    """What the hands reach of their deployment."""

    @property
    def machine_term(self) -> int:
        """Term to write under: the machine's."""
        ...

    def send(self, rank: int, stream: int, message: ControllerMessage) -> None:
        """Send on a stream if it is there."""
        ...

    def turn_away(self, stream: int, reason: Reason, detail: str) -> None:
        """Refuse a stream and close it."""
        ...

    def expect_wave(self, prepare: Prepare) -> None:
        """A wave goes out."""
        ...

    def raise_term(self, at_least: int) -> None:
        """Take the lease anew."""
        ...

    def fenced(self, why: str) -> None:
        """The store knows a later term than the machine's."""
        ...

    def begin_cycle(self, action: ctl.RunCycle) -> None:
        """Plan in the background; ends in CycleDecided."""
        ...


class ControlHands:
    """The hands of one deployment's machine."""

    def __init__(
        self,
        deployment: DeploymentId,
        store: DeploymentStore,
        health: StoreHealth,
        clock: Clock,
        metrics: ControllerMetrics,
        links: Links,
        find_plan: Callable[[str], PlanRecord | None],
    ) -> None:
        self.deployment = deployment
        self.decisions: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        """Decision rows, newest last, for when the store cannot be asked."""
        self._store = store
        self._health = health
        self._clock = clock
        self._metrics = metrics
        self._links = links
        self._find_plan = find_plan
        self._told: deque[object] = deque(maxlen=_KEPT)
        """Subjects of the last actions that were logged."""
        self._last_reason: object = None
        self._alerted: dict[Reason, tuple[float, int]] = {}
        """When each reason was last logged, and how often it was left out since."""
        self._wave_began: dict[WaveKey, float] = {}
        self._fenced_term = 0

    def stage(self, action: ctl.ControlAction) -> ActionStage:
        """Persists first; sends only when they are stored, but for questions: ranks hear their leader while the store is away."""
        if isinstance(action, ctl.PersistAction):
            return ActionStage.PERSIST
        return (
            ActionStage.SEND
            if isinstance(action, ctl.SendToRank) and action.decides
            else ActionStage.OTHER
        )

    async def persist(self, actions: Sequence[ctl.ControlAction]) -> Sequence[object]:
        """Store all, in order; PersistFailed for those that may not be, LeaseLost when another leads."""
        for action in actions:
            self._tell(action)
        if self._health.resting:
            return (_failed(actions, self._health.fault),)
        for position, action in enumerate(actions):
            try:
                await self._write(action)
            except Unavailable as error:
                self._health.failed(error)
                return (_failed(actions[position:], str(error)),)
            except Conflict as error:
                self._fenced_term = self._links.machine_term
                self._links.fenced(str(error))
                return (ctl.LeaseLost(),)
        self._health.answered()
        return ()

    async def _write(self, action: ctl.ControlAction) -> None:
        store, deployment, term = self._store, self.deployment, self._links.machine_term
        match action:
            case ctl.PersistPlan(record):
                await store.store_plan(record, term)
            case ctl.PersistEpoch(epoch=epoch, placement=placement):
                await store.store_epoch(deployment, epoch, placement, term)
            case ctl.PersistDocument(name, body):
                await store.store_document(deployment, name, body, term)
            case ctl.PersistDecision(row):
                await store.append_decision(deployment, row)
            case ctl.PersistIntent(wave, base_epoch):
                body = {**_wave_form(wave), "base_epoch": base_epoch}
                await store.store_document(deployment, "intent", body, term)
            case ctl.PersistOutcome(wave, committed, reason):
                body = {**_wave_form(wave), "committed": committed, "reason": reason}
                await store.store_document(deployment, "outcome", body, term)

    def perform(self, action: ctl.ControlAction) -> None:
        """Send, close, start a cycle, or tell people."""
        match action:
            case ctl.SendToRank() if self._links.machine_term <= self._fenced_term:
                return  # R13: another leads, and the machine has not heard of it yet.
            case ctl.SendToRank(rank, stream, message):
                if isinstance(message, Prepare):
                    if message.wave not in self._wave_began:
                        # One wave at a time: another's end was not seen here, and will not be.
                        self._wave_began = {message.wave: self._clock.monotonic()}
                        self._links.expect_wave(message)  # Once: it goes to every rank, and again.
                self._links.send(rank, stream, message)
            case ctl.CloseStream(_, stream, reason, detail):
                self._links.turn_away(stream, reason, detail)
            case ctl.RunCycle():
                self._links.begin_cycle(action)
            case ctl.RaiseTerm(at_least):
                self._links.raise_term(at_least)
            case ctl.WaveHealth(wave, stalled, reason, detail):
                said = (
                    "wave_runs_again"
                    if reason is None
                    else "wave_stalled"
                    if stalled
                    else "wave_paused"
                )
                plan_id = None if wave is None else wave.plan_id
                _log.warning(
                    said, deployment=self.deployment, plan_id=plan_id, reason=reason, detail=detail
                )
            case ctl.Alert(reason, detail):
                self._alert(reason, detail)

    def _alert(self, reason: Reason, detail: str) -> None:
        now = self._clock.monotonic()
        said_at, unsaid = self._alerted.get(reason, (float("-inf"), 0))
        if now - said_at < _ALERT_EVERY_S:
            self._alerted[reason] = said_at, unsaid + 1
            return
        self._alerted[reason] = now, 0
        _log.error(
            "alert", deployment=self.deployment, reason=reason, detail=detail, left_out=unsaid
        )

    # --- logs and counters --------------------------------------------------------------------------

    def _tell(self, action: ctl.ControlAction) -> None:
        """Log and count an action once, however often it must be stored."""
        subject = _subject(action)
        if subject is None or subject in self._told:
            return
        self._told.append(subject)
        match action:
            case ctl.PersistDecision(row):
                self._tell_decision(dict(row))
            case ctl.PersistPlan(record):
                self._tell_plan(record)
            case ctl.PersistOutcome(wave, committed, reason):
                self._tell_wave(wave, committed, reason)

    def _tell_decision(self, row: dict[str, Any]) -> None:
        self.decisions.append(row)
        self._metrics.decision(self.deployment, row["reason"])
        if row["reason"] != self._last_reason or row.get("plan_id"):
            _log.info("decision", deployment=self.deployment, **row)
        self._last_reason = row["reason"]

    def _tell_plan(self, record: PlanRecord) -> None:
        row = dict(record.story[-1]) if record.story else {}
        row["happened"] = row.pop("event", "")
        _log.info(
            "plan",
            deployment=self.deployment,
            plan_id=record.plan.plan_id,
            kind=record.plan.kind,
            epoch=record.plan.base_epoch + record.waves_committed,
            **row,
        )
        if record.phase.terminal:
            self._metrics.plan_ended(self.deployment, record.phase, record.reason)

    def _tell_wave(self, wave: WaveKey, committed: bool, reason: Reason) -> None:
        began = self._wave_began.pop(wave, None)
        _log.info(
            "wave_ended",
            deployment=self.deployment,
            plan_id=wave.plan_id,
            wave=wave.wave_index,
            epoch=wave.base_epoch + wave.wave_index + committed,
            committed=committed,
            reason=reason,
        )
        record = self._find_plan(wave.plan_id)
        if not committed or began is None or record is None:
            return
        plan = record.plan
        per_rank = plan.target.slots_per_rank
        body = plan.waves[wave.wave_index]
        moves = sum(t.src_slot // per_rank != t.dst_slot // per_rank for t in body.transfers)
        self._metrics.wave_committed(
            self.deployment, self._clock.monotonic() - began, moves, body.nbytes(per_rank)
        )


def _subject(action: ctl.ControlAction) -> object:
    """What tells an action from others, however often it is tried; not the record itself, which may be megabytes."""
    match action:
        case ctl.PersistPlan(record):
            return record.plan.plan_id, len(record.story), record.updated_at
        case ctl.PersistDecision(row):
            return row
        case ctl.PersistOutcome(wave):
            return wave
    return None


def _failed(actions: Sequence[ctl.ControlAction], detail: str) -> ctl.PersistFailed:
    return ctl.PersistFailed(tuple(a for a in actions if isinstance(a, ctl.PersistAction)), detail)


def _wave_form(wave: WaveKey) -> dict[str, Any]:
    return {
        "generation": wave.generation,
        "plan_id": wave.plan_id,
        "wave_index": wave.wave_index,
        "weights_version": wave.weights_version,
        "plan_base_epoch": wave.base_epoch,
    }
