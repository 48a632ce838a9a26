"""Prometheus metrics: the events the controller counted, and the newest state of each deployment.

Counters and histograms grow as events happen. Gauges are never set one by one: each `refresh`
replaces the whole view of a deployment. A rank that left, a plan that ended or a value that became
unknown then has no series, instead of a stale or a zero one.

Only the replica that leads a deployment exports its gauges. The others export only that they do
not lead it.

Labels are bounded by what a deployment declares (ranks) and by closed lists (phases, reasons). Only
the few worst layers are labels; their series by rank are optional and capped. Experts are never
labels: the matrices are a REST resource.
"""

import platform
from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from evenkeel_moe import __version__
from evenkeel_moe.adapters.prometheus.metric_families import Series, View, families
from evenkeel_moe.errors import Reason
from evenkeel_moe.peer_budget import refusals
from evenkeel_moe.ports.status import DeploymentStatus

_WAVE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STALL_BUCKETS_S = (1e-5, 1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.05, 0.1, 0.5, 1.0)
_CYCLE_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STORE_BUCKETS_S = (5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_COUNTERS: Mapping[tuple[str, ...], Mapping[str, str]] = {
    (): {
        "evenkeel_report_steps_total": "Steps accepted from rank reports.",
        "evenkeel_moves_total": "Expert copies between ranks in committed waves.",
        "evenkeel_migrated_bytes_total": "Bytes of expert weights copied between ranks in committed"
        " waves.",
        "evenkeel_deployment_failures_total": "Errors that ended a deployment on this controller"
        " replica; it starts again after a pause.",
        "evenkeel_ranks_displaced_total": "Processes of ranks that lost their place to another"
        " process while they were connected.",
    },
    ("reason",): {
        "evenkeel_report_steps_rejected_total": "Steps of rank reports put in quarantine, by"
        " reason.",
        "evenkeel_decisions_total": "Cycles of the control loop, by the reason they ended with.",
    },
    ("rank",): {
        "evenkeel_report_steps_dropped_total": "Steps a rank's recorder dropped before reporting"
        " them.",
    },
    ("phase", "reason"): {
        "evenkeel_plans_ended_total": "Plans that reached a terminal phase.",
    },
}
"""Labels after `deployment` -> name -> help text."""
_REPLICA_COUNTERS = (
    (
        "evenkeel_store_unreadable_records_total",
        "kind",
        "Stored records that this controller replica skipped because it could not read them.",
    ),
    (
        "evenkeel_deployments_refused_total",
        "limit",
        "Hellos that were refused because of too many deployments or ranks, or too little memory.",
    ),
)
"""Name, label, help text."""

_HISTOGRAMS: Mapping[tuple[float, ...], Mapping[str, str]] = {
    _WAVE_BUCKETS_S: {
        "evenkeel_wave_duration_seconds": "Time from the first Prepare of a wave to its commit.",
    },
    _STALL_BUCKETS_S: {
        "evenkeel_swap_stall_seconds": "Time for which a swap delayed the step, per rank and wave.",
    },
    _CYCLE_BUCKETS_S: {
        "evenkeel_cycle_duration_seconds": "Time from the beginning of a cycle to its reason, the"
        " wait for a planner included.",
        "evenkeel_planner_duration_seconds": "Time that the planner took for a cycle or a manual"
        " plan that it finished.",
    },
}
"""Upper bounds of the buckets -> name -> help text."""


class ControllerMetrics(Collector):
    """All series of one controller process.

    The event loop calls the methods. The scrape runs on the thread of the metrics server and sees
    the views of one moment, because a refresh replaces the mapping instead of changing it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        # The `_created` twin of each counter doubles the series, and nothing of ours reads it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._views: Mapping[str, View | None] = {}
        """The newest view of each deployment; None: it is not led here."""
        self._answered_at: float | None = None
        self._counters = {
            name: Counter(name, text, ["deployment", *labels], registry=registry)
            for labels, group in _COUNTERS.items()
            for name, text in group.items()
        }
        self._histograms = {
            name: Histogram(name, text, ["deployment"], buckets=bounds, registry=registry)
            for bounds, group in _HISTOGRAMS.items()
            for name, text in group.items()
        }
        self._counted: dict[str, set[int]] = {}
        """Deployments whose events are counted, with the ranks that dropped steps."""
        self._degraded = Gauge(
            "evenkeel_store_degraded",
            "1 while the store is out of reach or refuses writes: loads are kept in memory only"
            " and nothing is decided.",
            registry=registry,
        )
        self._evicts = Gauge(
            "evenkeel_store_may_evict",
            "1 while the store's maxmemory-policy lets it drop Evenkeel's records when memory is"
            " short, 0 with noeviction.",
            ["policy"],
            registry=registry,
        )
        self._unreadable, self._refused = (
            Counter(name, text, [label], registry=registry)
            for name, label, text in _REPLICA_COUNTERS
        )
        Gauge(
            "evenkeel_build_info",
            "The running version; always 1.",
            ["version", "python_version"],
            registry=registry,
        ).labels(__version__, platform.python_version()).set(1)
        self._store_calls = Histogram(
            "evenkeel_store_operation_duration_seconds",
            "Time of a call of the store, also of one that failed: lease, read, write or ping.",
            ["operation"],
            buckets=_STORE_BUCKETS_S,
            registry=registry,
        )
        self._streams = Gauge(
            "evenkeel_grpc_streams",
            "Streams of ranks that are open on this controller replica.",
            registry=registry,
        )
        self._certificates = Gauge(
            "evenkeel_certificate_expiry_timestamp_seconds",
            "When a certificate of this controller replica expires: grpc, grpc_client_ca or rest.",
            ["kind"],
            registry=registry,
        )
        registry.register(self)

    # --- events -----------------------------------------------------------------------------------

    def reports_received(self, deployment: str, steps: int) -> None:
        """Count steps accepted from reports."""
        self._count("evenkeel_report_steps_total", steps, deployment)

    def reports_rejected(self, deployment: str, reason: str, steps: int) -> None:
        """Count steps put in quarantine; `reason` is from the closed list."""
        self._count("evenkeel_report_steps_rejected_total", steps, deployment, reason)

    def steps_dropped(self, deployment: str, rank: int, steps: int) -> None:
        """Count steps that a rank reports as dropped."""
        self._counted.get(deployment, set()).add(rank)
        self._count("evenkeel_report_steps_dropped_total", steps, deployment, rank)

    def decision(self, deployment: str, reason: str) -> None:
        """Count one finished cycle; `reason` is from the closed list."""
        self._count("evenkeel_decisions_total", 1, deployment, reason)

    def wave_committed(
        self, deployment: str, seconds: float | None, moves: int, nbytes: int | None
    ) -> None:
        """Count one committed wave: its duration [s], copies between ranks and known bytes.

        The duration is None for a wave that began under another leader.
        """
        if seconds is not None:
            self._observe("evenkeel_wave_duration_seconds", deployment, seconds)
        self._count("evenkeel_moves_total", moves, deployment)
        if nbytes is not None:
            self._count("evenkeel_migrated_bytes_total", nbytes, deployment)

    def swap_stall(self, deployment: str, seconds: float) -> None:
        """Record how long one rank's step waited for one swap [s]."""
        self._observe("evenkeel_swap_stall_seconds", deployment, seconds)

    def cycle_ended(self, deployment: str, seconds: float) -> None:
        """Record how long a cycle took [s], however it ended."""
        self._observe("evenkeel_cycle_duration_seconds", deployment, seconds)

    def planner_ran(self, deployment: str, seconds: float) -> None:
        """Record how long the planner took for a cycle or a manual plan [s]."""
        self._observe("evenkeel_planner_duration_seconds", deployment, seconds)

    def store_called(self, operation: str, seconds: float) -> None:
        """Record how long the store took for one call [s]; `operation` is from a closed list."""
        self._store_calls.labels(operation).observe(seconds)

    def watch_streams(self, count: Callable[[], int]) -> None:
        """Let each scrape ask for the number of open streams; `count` runs on another thread."""
        self._streams.set_function(count)

    def plan_ended(self, deployment: str, phase: str, reason: str) -> None:
        """Count a plan that reached a terminal phase."""
        self._count("evenkeel_plans_ended_total", 1, deployment, phase, reason)

    def rank_displaced(self, deployment: str) -> None:
        """Count a process that lost its place to another one."""
        self._count("evenkeel_ranks_displaced_total", 1, deployment)

    def deployment_added(self, deployment: str) -> None:
        """Count the events of a deployment from now on, until it is forgotten.

        What alerts watch begins at 0: the first event must be seen as a rise.
        """
        self._counted.setdefault(deployment, set())
        for name in ("deployment_failures", "ranks_displaced", "report_steps"):
            self._count(f"evenkeel_{name}_total", 0, deployment)
        self._count("evenkeel_decisions_total", 0, deployment, Reason.PLANNER_FAILED)
        self._histograms["evenkeel_swap_stall_seconds"].labels(deployment)

    def deployment_failed(self, deployment: str) -> None:
        """Count an error that ended a deployment, and remove its gauges."""
        self._count("evenkeel_deployment_failures_total", 1, deployment)
        self.follow(deployment)

    def store_degraded(self, degraded: bool) -> None:
        """Set whether the store is out of reach."""
        self._degraded.set(1 if degraded else 0)

    def deployment_refused(self, limit: str) -> None:
        """Count a Hello for a deployment above a limit; `limit` is the name of a setting."""
        self._refused.labels(limit).inc()

    def record_unreadable(self, kind: str) -> None:
        """Count a stored record that cannot be read."""
        self._unreadable.labels(kind).inc()

    def store_policies(self, policies: Collection[str]) -> None:
        """Set the store's eviction policies; empty: unknown."""
        self._evicts.clear()
        for policy in policies:
            self._evicts.labels(policy).set(0 if policy == "noeviction" else 1)

    def certificate_ends(self, kind: str, at_unix: float) -> None:
        """Set the end of a certificate [Unix s]; `kind` is from a closed list."""
        self._certificates.labels(kind).set(at_unix)

    def store_answered(self, at_unix: float) -> None:
        """Set the time at which the store last answered [Unix s]."""
        self._answered_at = at_unix

    def _count(self, name: str, amount: int, deployment: str, *labels: object) -> None:
        # A cycle may end after its deployment left, and would bring its series back for good.
        if deployment in self._counted:
            self._counters[name].labels(deployment, *map(str, labels)).inc(amount)

    def _observe(self, name: str, deployment: str, seconds: float) -> None:
        if deployment in self._counted:
            self._histograms[name].labels(deployment).observe(seconds)

    # --- current state ----------------------------------------------------------------------------

    def refresh(self, status: DeploymentStatus, more: Iterable[Series] = ()) -> None:
        """Replace all gauges of a deployment led here; a value of None removes its series.

        Args:
            status: of the deployment.
            more: gauges that the status does not hold.
        """
        name = status.deployment
        self._views = {**self._views, name: View(status, tuple(more))}
        counted = self._counted.get(name, set())
        for rank in counted - {one.rank for one in status.ranks}:
            counted.remove(rank)
            self._counters["evenkeel_report_steps_dropped_total"].remove(name, str(rank))

    def follow(self, deployment: str) -> None:
        """Remove the gauges of a deployment not led here; what this replica counted stays."""
        self._views = {**self._views, deployment: None}

    def forget(self, deployment: str) -> None:
        """Remove every series of a deployment that left."""
        self._counted.pop(deployment, None)
        self._views = {name: view for name, view in self._views.items() if name != deployment}
        for metric in (*self._counters.values(), *self._histograms.values()):
            metric.remove_by_labels({"deployment": deployment})

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges and what peers were refused; the registry calls it at each scrape."""
        leading = GaugeMetricFamily(
            "evenkeel_leading",
            "1 on the controller replica that leads a deployment, 0 on others that know it.",
            labels=["deployment"],
        )
        views = self._views
        for name, view in views.items():
            leading.add_metric([name], 0 if view is None else 1)
        answered = GaugeMetricFamily(
            "evenkeel_store_answered_timestamp_seconds", "When the store last answered."
        )
        if self._answered_at is not None:
            answered.add_metric([], self._answered_at)
        refused = CounterMetricFamily(
            "evenkeel_peers_refused",
            "Peers that were refused something or ended, by the name of the log line.",
            labels=["event"],
        )
        for event, count in list(refusals.items()):
            refused.add_metric([event], count)
        yield leading
        yield answered
        yield refused
        yield from families([view for view in views.values() if view is not None])
