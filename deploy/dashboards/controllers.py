"""The row Controllers of the dashboard of the fleet: store, planner and processes."""

from typing import Any

from deploy.chart_values import bound
from deploy.dashboards.parts import BY, GREEN, ONE, RED, line_panel, thresholds

_ALL = '{namespace=~"$namespace"}'
_RATE = "[$__rate_interval]"
_OURS = f"and on (namespace, job, instance) evenkeel_build_info{_ALL}"
"""Many programs export `process_...`: only the controllers are meant."""


def controller_panels() -> list[Any]:
    """Return the panels."""
    return [*_store(), *_planner(), *_processes()]


def _quantile(metric: str, selector: str, by: str) -> str:
    buckets = f"sum by ({by}, le) (rate({metric}_bucket{selector}{_RATE}))"
    return f"histogram_quantile(0.95, {buckets})"


def _store() -> list[Any]:
    calls = "evenkeel_store_operation_duration_seconds"
    return [
        line_panel(
            "Store: time since its last answer",
            "By controller.",
            {"{{instance}}": f"time() - evenkeel_store_answered_timestamp_seconds{_ALL}"},
            unit="s",
        ),
        line_panel(
            "Store: time of a call",
            "95 % of the calls of the last minutes are faster, by kind of call. A lease is lost if"
            " its calls take longer than a third of leader.lease_s.",
            {"{{operation}}": _quantile(calls, _ALL, "operation")},
            unit="s",
        ),
    ]


def _planner() -> list[Any]:
    where = f"{{{ONE}}}"
    cycle = _quantile("evenkeel_cycle_duration_seconds", where, BY)
    planner = _quantile("evenkeel_planner_duration_seconds", where, BY)
    return [
        line_panel(
            "Time of a cycle",
            "95 % of the cycles are faster: from the beginning to the reason, the wait for a"
            " planner included. The ten slowest deployments.",
            {"{{deployment}}": f"topk(10, {cycle})"},
            unit="s",
        ),
        line_panel(
            "Time of the planner",
            "95 % of the plans and verdicts are faster; a cycle beyond planner.deadline_s is given"
            " up and is not counted here. The ten slowest deployments.",
            {"{{deployment}}": f"topk(10, {planner})"},
            unit="s",
        ),
    ]


def _processes() -> list[Any]:
    ends = f"min by (kind) (evenkeel_certificate_expiry_timestamp_seconds{_ALL})"
    soon = bound("certificateExpirySeconds")
    return [
        line_panel(
            "Processor of the controllers",
            "Cores that the controller's process uses, without the planner's processes.",
            {"{{instance}}": f"rate(process_cpu_seconds_total{_ALL}{_RATE}) {_OURS}"},
            span=8,
        ),
        line_panel(
            "Memory of the controllers",
            "Resident memory of the controller's process, without the planner's processes.",
            {"{{instance}}": f"process_resident_memory_bytes{_ALL} {_OURS}"},
            unit="bytes",
            span=8,
        ),
        line_panel(
            "Streams of ranks",
            "Open on each controller. Ranks connect to the one that leads their deployment.",
            {"{{instance}}": f"evenkeel_grpc_streams{_ALL}"},
            span=8,
        ),
        line_panel(
            "Certificates: time left",
            "Until the first certificate of each kind expires; empty without TLS. The line is the"
            " threshold of EvenkeelCertificateExpiring.",
            {"{{kind}}": f"{ends} - time()"},
            unit="s",
            least=None,
            colors=thresholds((None, RED), (soon, GREEN)),
        ),
    ]
