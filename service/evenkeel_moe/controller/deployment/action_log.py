"""Logs and counts what the control machine decides, each thing once however often it is stored."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.plan import PlanRecord, WaveKey
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.protocol.leader.plan_records import ANSWERED, MEASURED

_log = structlog.get_logger(__name__)
_REMEMBERED = 1024
_ALERT_EVERY_S = 1.0
"""Least time between two alerts with one reason: a faulty rank must not fill the log."""


@dataclass(eq=False, repr=False)
class ActionLog:
    """The log lines and counters of one deployment's actions.

    Args:
        decisions: rows of the decision log in memory; new rows are appended.
    """

    control: DeploymentState
    clock: Clock
    metrics: ControllerMetrics
    decisions: deque[dict[str, Any]]
    _logged: deque[object] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), init=False)
    """Subjects of the last actions that were logged."""
    _last_decided: object = field(default=None, init=False)
    """Reason and plan of the newest decision; only a change is logged."""
    _alerts: dict[Reason, tuple[float, int]] = field(default_factory=dict, init=False)
    """For each reason when it was last logged, and how many alerts were left out since."""
    _wave_began: dict[WaveKey, float] = field(default_factory=dict, init=False)
    """Monotonic seconds at which the newest wave went out, until its end is logged."""

    def wave_begins(self, wave: WaveKey) -> None:
        """Note that a wave goes out."""
        # There is one wave at a time: if the former one is still here, its end will not be seen.
        self._wave_began = {wave: self.clock.monotonic()}

    def persisting(self, action: ctl.ControlAction) -> None:
        """Log and count an action that is about to be stored, unless that was done before."""
        subject = _subject(action)
        if subject is None or subject in self._logged:
            return
        self._logged.append(subject)
        match action:
            case ctl.PersistDecision(row):
                self._log_decision(dict(row))
            case ctl.PersistPlan(record):
                self._log_plan(record)

    def wave_ended(self, ended: ctl.WaveEnded) -> None:
        """Log how a wave ended, and count it if it was committed."""
        wave, committed = ended.wave, ended.committed
        began = self._wave_began.pop(wave, None)
        _log.info(
            "wave_ended",
            deployment=self.control.deployment,
            plan_id=wave.plan_id,
            wave=wave.wave_index,
            epoch=wave.base_epoch + wave.wave_index + committed,
            committed=committed,
            reason=ended.reason,
        )
        record = self.control.records.by_id.get(wave.plan_id)
        # The store may have lost that this replica counted it under an earlier term.
        counted = not ended.newly_counted or wave in self._logged
        if not committed or counted or record is None:
            return
        self._logged.append(wave)
        plan = record.plan
        per_rank = plan.target.slots_per_rank
        body = plan.waves[wave.wave_index]
        took_s = None if began is None else self.clock.monotonic() - began
        self.metrics.wave_committed(
            self.control.deployment, took_s, body.moves(per_rank), body.nbytes(per_rank)
        )

    def wave_health(self, health: ctl.WaveHealth) -> None:
        """Log that a wave waits, or runs again."""
        if health.reason is None:
            event = "wave_runs_again"
        else:
            event = "wave_stalled" if health.stalled else "wave_paused"
        _log.warning(
            event,
            deployment=self.control.deployment,
            plan_id=None if health.wave is None else health.wave.plan_id,
            reason=health.reason,
            detail=health.detail,
        )

    def alert(self, alert: ctl.Alert) -> None:
        """Log an alert, or count it if one with the same reason was logged a moment ago."""
        now = self.clock.monotonic()
        logged_at, left_out = self._alerts.get(alert.reason, (float("-inf"), 0))
        if now - logged_at < _ALERT_EVERY_S:
            self._alerts[alert.reason] = logged_at, left_out + 1
            return
        self._alerts[alert.reason] = now, 0
        _log.error(
            "alert",
            deployment=self.control.deployment,
            reason=alert.reason,
            detail=alert.detail,
            left_out=left_out,
        )

    def _log_decision(self, row: dict[str, Any]) -> None:
        self.decisions.append(row)
        self.metrics.decision(self.control.deployment, row["reason"])
        decided = row["reason"], row.get("plan_id")
        if decided != self._last_decided:
            _log.info("decision", deployment=self.control.deployment, **row)
        self._last_decided = decided

    def _log_plan(self, record: PlanRecord) -> None:
        row = dict(record.story[-1]) if record.story else {}
        row["happened"] = row.pop("event", "")
        _log.info(
            "plan",
            deployment=self.control.deployment,
            plan_id=record.plan.plan_id,
            kind=record.plan.kind,
            epoch=record.plan.base_epoch + record.waves_committed,
            **row,
        )
        # What is measured of a plan may be entered after its end.
        if record.phase.terminal and row["happened"] not in (ANSWERED, MEASURED):
            self.metrics.plan_ended(self.control.deployment, record.phase, record.reason)


def _subject(action: ctl.ControlAction) -> Mapping[str, Any] | tuple[object, ...] | None:
    """Return what identifies an action over retries. A plan's record may be megabytes: not that."""
    match action:
        case ctl.PersistPlan(record):
            return record.plan.plan_id, len(record.story), record.updated_at
        case ctl.PersistDecision(row):
            return row
    return None
