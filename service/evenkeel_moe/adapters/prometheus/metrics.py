"""Prometheus: what the controller counted, and the newest state of each deployment.

Counters and histograms grow as things happen. Gauges are never set one by one: each `refresh`
replaces a deployment's whole view, so a rank that left, a plan that ended or a value that became
unknown has no series any more instead of a stale one or a zero.

Only the replica that leads a deployment tells of it; the others say no more than that they do not.

Labels are bounded by what a deployment declares (ranks) and by closed lists (phases, reasons). Layers are
labels for the few worst only, and by rank only where asked for and under a cap. Experts are never labels;
the matrices are a REST resource.
"""

import platform
from collections.abc import Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from evenkeel_moe import __version__
from evenkeel_moe.adapters.prometheus.metric_families import (
    DeploymentGauges,
    PhaseBalance,
    View,
    families,
)
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.ports import DeploymentStatus

__all__ = ["ControllerMetrics"]

_WAVE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STALL_BUCKETS_S = (1e-5, 1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.05, 0.1, 0.5, 1.0)


class ControllerMetrics(Collector):
    """Every series of one controller process.

    Calls come from the event loop; the scrape comes from the metrics server's thread and sees the
    views of one moment, because a refresh replaces the mapping instead of changing it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        # The `_created` twin of each counter doubles the series and nothing of ours reads it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._views: Mapping[str, View] = {}
        self._leading: Mapping[str, bool] = {}
        self._answered_at: float | None = None
        by_deployment = ["deployment"]
        self._steps = Counter(
            "evenkeel_report_steps_total",
            "Steps accepted from rank reports.",
            by_deployment,
            registry=registry,
        )
        self._steps_of: dict[str, Counter] = {}
        """Each deployment's own, as long as it has one."""
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
            "1 while the store is out of reach or refuses writes: loads are kept in memory only and nothing is decided.",
            registry=registry,
        )
        self._evicts = Gauge(
            "evenkeel_store_may_evict",
            "1 while the store's maxmemory-policy lets it drop our records when memory is short, 0 with noeviction.",
            ["policy"],
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
        counter = self._steps_of.get(deployment)
        if counter is None:  # To look one up costs more than to count.
            counter = self._steps_of[deployment] = self._steps.labels(deployment)
        counter.inc(steps)

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

    def store_policies(self, policies: Collection[str]) -> None:
        """Say by which policies the store makes room; empty: nobody knows."""
        self._evicts.clear()
        for policy in policies:
            self._evicts.labels(policy).set(0 if policy == "noeviction" else 1)

    def store_answered(self, at_unix: float) -> None:
        """Say when the store last answered [Unix s]."""
        self._answered_at = at_unix

    # --- what is so now -------------------------------------------------------------------------

    def refresh(
        self,
        status: DeploymentStatus,
        per_phase: PhaseBalance,
        figures: DeploymentGauges = DeploymentGauges(),  # noqa: B008 - frozen
    ) -> None:
        """Replace all gauges of a deployment led here; what is None has no series afterwards."""
        name = status.deployment
        before = self._views.get(name)
        self._views = {**self._views, name: View(status, dict(per_phase), figures)}
        self._leading = {**self._leading, name: True}
        if before is not None:
            here = {rank.rank for rank in status.ranks}
            for rank in before.status.ranks:
                if rank.rank not in here:
                    self._dropped.remove_by_labels({"deployment": name, "rank": str(rank.rank)})

    def follow(self, deployment: str) -> None:
        """Another replica leads, or none: its state is not ours to tell. What was counted here stays."""
        self._views = {name: view for name, view in self._views.items() if name != deployment}
        self._leading = {**self._leading, deployment: False}

    def forget(self, deployment: str) -> None:
        """Remove every series of a deployment that left."""
        key = DeploymentId(deployment)
        self._views = {name: view for name, view in self._views.items() if name != key}
        self._leading = {name: leads for name, leads in self._leading.items() if name != key}
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
        self._steps_of.pop(deployment, None)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The gauges; called by the registry at each scrape."""
        leading = GaugeMetricFamily(
            "evenkeel_leading",
            "1 on the replica that leads a deployment, 0 on others that know it.",
            labels=["deployment"],
        )
        for name, leads in list(self._leading.items()):
            leading.add_metric([name], 1 if leads else 0)
        answered = GaugeMetricFamily(
            "evenkeel_store_answered_timestamp_seconds", "When the store last answered."
        )
        if self._answered_at is not None:
            answered.add_metric([], self._answered_at)
        yield leading
        yield answered
        yield from families(list(self._views.values()))
