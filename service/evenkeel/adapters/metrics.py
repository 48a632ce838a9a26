"""Prometheus: what the controller counted, and the newest state of each deployment.

Counters and histograms grow as things happen. Gauges are never set one by one: each `refresh`
replaces a deployment's whole view, so a rank that left, a plan that ended or a value that became
unknown has no series any more instead of a stale one or a zero.

Labels are bounded by what a deployment declares (ranks) and by closed lists (phases, reasons). Layers
and experts are never labels; the matrices are a REST resource.
"""

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from evenkeel import __version__
from evenkeel.model.ids import DeploymentId
from evenkeel.model.load import Phase
from evenkeel.ports import DeploymentStatus, RankStatus

__all__ = ["ControllerMetrics", "PhaseBalance"]

PhaseBalance = Mapping[Phase, tuple[float | None, float | None]]
"""Balancedness (mean, worst layer) of each phase's window; None where the window holds no load."""

_WAVE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STALL_BUCKETS_S = (1e-5, 1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.05, 0.1, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class _View:
    """All that the gauges of one deployment are made of."""

    status: DeploymentStatus
    per_phase: PhaseBalance


class ControllerMetrics(Collector):
    """Every series of one controller process.

    Calls come from the event loop; the scrape comes from the metrics server's thread and sees the
    views of one moment, because a refresh replaces the mapping instead of changing it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        # The `_created` twin of each counter doubles the series and nothing of ours reads it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._views: Mapping[str, _View] = {}
        by_deployment = ["deployment"]
        self._steps = Counter(
            "evenkeel_report_steps_total",
            "Steps accepted from rank reports.",
            by_deployment,
            registry=registry,
        )
        self._rejected = Counter(
            "evenkeel_report_steps_rejected_total",
            "Steps of rank reports put in quarantine, by reason.",
            ["deployment", "reason"],
            registry=registry,
        )
        self._dropped = Counter(
            "evenkeel_report_steps_dropped_total",
            "Steps a rank's recorder dropped before it could report them.",
            ["deployment", "rank"],
            registry=registry,
        )
        self._decisions = Counter(
            "evenkeel_decisions_total",
            "Cycles of the control loop, by the reason they ended with.",
            ["deployment", "reason"],
            registry=registry,
        )
        self._waves = Histogram(
            "evenkeel_wave_duration_seconds",
            "Time from the first Prepare of a wave to its commit.",
            by_deployment,
            buckets=_WAVE_BUCKETS_S,
            registry=registry,
        )
        self._stalls = Histogram(
            "evenkeel_swap_stall_seconds",
            "Time a swap held up the step, per rank and wave.",
            by_deployment,
            buckets=_STALL_BUCKETS_S,
            registry=registry,
        )
        self._moves = Counter(
            "evenkeel_moves_total",
            "Expert copies between ranks in committed waves.",
            by_deployment,
            registry=registry,
        )
        self._bytes = Counter(
            "evenkeel_migrated_bytes_total",
            "Bytes of expert weights copied between ranks in committed waves.",
            by_deployment,
            registry=registry,
        )
        self._plans = Counter(
            "evenkeel_plans_ended_total",
            "Plans that reached a terminal phase.",
            ["deployment", "phase", "reason"],
            registry=registry,
        )
        self._degraded = Gauge(
            "evenkeel_store_degraded",
            "1 while the store is out of reach: loads are kept in memory only and nothing is decided.",
            registry=registry,
        )
        Gauge(
            "evenkeel_build_info",
            "The running version; always 1.",
            ["version", "python_version"],
            registry=registry,
        ).labels(__version__, platform.python_version()).set(1)
        registry.register(self)

    # --- things that happened -------------------------------------------------------------------

    def reports_received(self, deployment: str, steps: int) -> None:
        """Count steps accepted from reports."""
        self._steps.labels(deployment).inc(steps)

    def reports_rejected(self, deployment: str, reason: str, steps: int) -> None:
        """Count steps put in quarantine; `reason` is from the closed list."""
        self._rejected.labels(deployment, str(reason)).inc(steps)

    def steps_dropped(self, deployment: str, rank: int, steps: int) -> None:
        """Count steps a rank says it had to drop."""
        self._dropped.labels(deployment, str(rank)).inc(steps)

    def decision(self, deployment: str, reason: str) -> None:
        """Count one finished cycle; `reason` is from the closed list."""
        self._decisions.labels(deployment, str(reason)).inc()

    def wave_committed(self, deployment: str, seconds: float, moves: int, nbytes: int) -> None:
        """Count one committed wave: its duration [s], copies between ranks and their bytes."""
        self._waves.labels(deployment).observe(seconds)
        self._moves.labels(deployment).inc(moves)
        self._bytes.labels(deployment).inc(nbytes)

    def swap_stall(self, deployment: str, seconds: float) -> None:
        """Count how long one rank's step waited for one swap [s]."""
        self._stalls.labels(deployment).observe(seconds)

    def plan_ended(self, deployment: str, phase: str, reason: str) -> None:
        """Count a plan that reached a terminal phase."""
        self._plans.labels(deployment, str(phase), str(reason)).inc()

    def store_degraded(self, degraded: bool) -> None:
        """Say whether the store is out of reach."""
        self._degraded.set(1 if degraded else 0)

    # --- what is so now -------------------------------------------------------------------------

    def refresh(self, status: DeploymentStatus, per_phase: PhaseBalance) -> None:
        """Replace all gauges of one deployment; what is None has no series afterwards."""
        before = self._views.get(status.deployment)
        self._views = {**self._views, status.deployment: _View(status, dict(per_phase))}
        if before is not None:
            here = {rank.rank for rank in status.ranks}
            for rank in before.status.ranks:
                if rank.rank not in here:
                    self._dropped.remove_by_labels({"deployment": status.deployment, "rank": str(rank.rank)})

    def forget(self, deployment: str) -> None:
        """Remove every series of a deployment that left."""
        key = DeploymentId(deployment)
        self._views = {name: view for name, view in self._views.items() if name != key}
        for metric in (
            self._steps,
            self._rejected,
            self._dropped,
            self._decisions,
            self._waves,
            self._stalls,
            self._moves,
            self._bytes,
            self._plans,
        ):
            metric.remove_by_labels({"deployment": deployment})

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The gauges; called by the registry at each scrape."""
        views = list(self._views.values())
        yield from _balance_families(views)
        yield from _rank_families(views)
        yield from _deployment_families(views)
        yield from _plan_families(views)


def _family(name: str, help_text: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, labels=labels)


def _balance_families(views: list[_View]) -> Iterable[GaugeMetricFamily]:
    mean = _family(
        "evenkeel_balancedness_mean_ratio",
        "Mean over max of rank load per step and layer, averaged over the window; 1 is perfect.",
        ["deployment", "phase"],
    )
    worst = _family(
        "evenkeel_balancedness_worst_ratio",
        "Balancedness of the worst layer, averaged over the steps of the window; 1 is perfect.",
        ["deployment", "phase"],
    )
    for view in views:
        for phase, (mean_value, worst_value) in view.per_phase.items():
            labels = [view.status.deployment, str(phase)]
            if mean_value is not None:
                mean.add_metric(labels, mean_value)
            if worst_value is not None:
                worst.add_metric(labels, worst_value)
    return [mean, worst]


def _rank_families(views: list[_View]) -> Iterable[GaugeMetricFamily]:
    by_rank = ["deployment", "rank"]
    info = _family(
        "evenkeel_rank_info",
        "Where a rank runs; always 1. Join it to put a node on a rank's series.",
        [*by_rank, "node", "gpu_uuid"],
    )
    share = _family(
        "evenkeel_rank_load_share_ratio",
        "Share of the window's tokens a rank carries; one over the number of ranks is balanced.",
        by_rank,
    )
    epoch = _family("evenkeel_rank_epoch", "Epoch of the maps a rank serves with.", by_rank)
    fresh = _family("evenkeel_rank_fresh", "1 while a rank's heartbeat lease holds, else 0.", by_rank)
    seen = _family("evenkeel_rank_last_seen_timestamp_seconds", "When a rank was last heard.", by_rank)
    pace = _family(
        "evenkeel_rank_compute_seconds_per_token",
        "MoE compute per token before the collective, median over the window.",
        by_rank,
    )
    for view in views:
        for rank in view.status.ranks:
            labels = [view.status.deployment, str(rank.rank)]
            info.add_metric([*labels, rank.node, rank.gpu_uuid], 1)
            _add_rank(rank, labels, share, epoch, fresh, seen, pace)
    return [info, share, epoch, fresh, seen, pace]


def _add_rank(
    rank: RankStatus,
    labels: list[str],
    share: GaugeMetricFamily,
    epoch: GaugeMetricFamily,
    fresh: GaugeMetricFamily,
    seen: GaugeMetricFamily,
    pace: GaugeMetricFamily,
) -> None:
    epoch.add_metric(labels, rank.epoch)
    fresh.add_metric(labels, 1 if rank.fresh else 0)
    seen.add_metric(labels, rank.last_seen_unix)
    if rank.load_share is not None:
        share.add_metric(labels, rank.load_share)
    if rank.seconds_per_token is not None:
        pace.add_metric(labels, rank.seconds_per_token)


def _deployment_families(views: list[_View]) -> Iterable[GaugeMetricFamily]:
    one = ["deployment"]
    info = _family(
        "evenkeel_deployment_info",
        "Mode, policy and leader of a deployment; always 1.",
        [*one, "mode", "policy", "leader"],
    )
    state = _family(
        "evenkeel_deployment_state",
        "State of a deployment and why; always 1, one series at a time.",
        [*one, "state", "reason"],
    )
    epoch = _family("evenkeel_epoch", "Epoch of the committed placement.", one)
    term = _family("evenkeel_term", "Leadership number the deployment is led under.", one)
    window = _family("evenkeel_window_steps", "Complete steps in the fullest window.", one)
    step = _family("evenkeel_newest_step", "Newest step that every rank reported.", one)
    decided = _family("evenkeel_last_decision_timestamp_seconds", "When the last cycle ended.", one)
    held = _family("evenkeel_held", "1 while automatic plans wait for resume after a rollback.", one)
    frozen = _family("evenkeel_frozen_until_timestamp_seconds", "When the freeze in force ends.", one)
    for status in (view.status for view in views):
        labels = [str(status.deployment)]
        info.add_metric([*labels, status.mode, status.policy, status.leader], 1)
        state.add_metric([*labels, status.state, status.reason], 1)
        epoch.add_metric(labels, status.epoch)
        term.add_metric(labels, status.term)
        window.add_metric(labels, status.window_steps)
        held.add_metric(labels, 1 if status.held else 0)
        if status.step is not None:
            step.add_metric(labels, status.step)
        if status.last_decision is not None:
            decided.add_metric(labels, float(status.last_decision["at"]))
        if status.frozen_until_unix is not None:
            frozen.add_metric(labels, status.frozen_until_unix)
    return [info, state, epoch, term, window, step, decided, held, frozen]


def _plan_families(views: list[_View]) -> Iterable[GaugeMetricFamily]:
    one = ["deployment"]
    created = _family(
        "evenkeel_plan_created_timestamp_seconds",
        "When the active plan was made; its age is time() minus this.",
        one,
    )
    phase = _family(
        "evenkeel_plan_phase",
        "Phase of the active plan; always 1, one series at a time.",
        [*one, "phase", "reason"],
    )
    done = _family("evenkeel_staging_done_bytes", "Bytes of the current wave staged so far.", one)
    planned = _family("evenkeel_staging_planned_bytes", "Bytes the current wave stages in all.", one)
    for status in (view.status for view in views):
        if status.active_plan is None:
            continue
        labels = [str(status.deployment)]
        created.add_metric(labels, status.active_plan.plan.created_at)
        phase.add_metric([*labels, str(status.active_plan.phase), str(status.active_plan.reason)], 1)
        done.add_metric(labels, status.staging_bytes_done)
        planned.add_metric(labels, status.staging_bytes_total)
    return [created, phase, done, planned]
