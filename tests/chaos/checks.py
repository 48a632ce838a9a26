"""Checks after a run. Each check returns a sentence for each violation that it finds."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenkeel_moe.engines.reference.fleet_report import FleetReport
from evenkeel_moe.engines.reference.lines import read_lines
from tests.chaos.arena import Struck
from tests.chaos.operator import PlanLife
from tests.chaos.processes import ControllerProcess
from tests.chaos.schedule import FaultKind

__all__ = [
    "SERVING_BOUND_S",
    "Gap",
    "bad_logs",
    "bad_plans",
    "bad_ranks",
    "bad_series",
    "excuses",
    "gaps",
    "too_many_fds",
]

SERVING_BOUND_S = 5.0
"""The longest allowed time between two steps that no injected stop of a rank explains.

A rank never waits for a controller or a store within a step. Every outage of those lasts longer
than this bound, so a step that waited for one would exceed it. Steps take 0.1 s; the rest of the
bound allows for fifteen processes on two cores."""
_AFTERMATH_S = 45.0
"""Seconds after a fault that it may still explain: Prepare and stall deadlines, a restart."""
_CAUSES = {
    "generation_changed": {kind for kind in FaultKind if kind.resizes} | {FaultKind.KILL_MOST},
    "weights_version_changed": set(),
    "cancelled": set(),
    "expired": set(),
    "checksum_mismatch": set(),
}
"""Reasons only these faults make true; of the others any failure may be the cause."""
_FAILURES = {kind for kind in FaultKind if not kind.is_ordered}
_SLACK_FDS = 12


@dataclass(frozen=True, slots=True)
class Gap:
    """Time between two steps of the group."""

    began: float
    seconds: float
    unexplained_s: float
    """The duration without the injected stops in it."""


def bad_ranks(report: FleetReport) -> Iterator[str]:
    """Check weights, maps and outputs of all who ended, and the epochs of each group."""
    yield from report.problems
    ended = (*report.codes, *report.retired)
    if any(ended):
        yield f"ranks ended with codes {report.codes}, after them retired ones {report.retired}"
    if len(report.checks) != len(ended):
        yield f"{len(report.checks)} of {len(ended)} ranks wrote their final check"
    last = max((check["group"] for check in report.checks), default=0)
    epochs = {check["epoch"] for check in report.checks if check["group"] == last}
    if len(epochs) > 1:
        yield f"ranks ended at epochs {sorted(epochs)}"
    rows = sum(check["mismatches"] for check in report.checks)
    if rows:
        yield f"{rows} rows were computed wrongly"


def bad_plans(plans: Sequence[PlanLife], struck: Sequence[Struck]) -> Iterator[str]:
    """Check that every plan has ended, and that faults explain its reason."""
    for plan in plans:
        if plan.accepted_at and not plan.ended_at:
            yield f"{plan.plan_id} never ended: {plan.phase} {plan.reason}"
        if _failed(plan) and not _explaining(plan, struck):
            kinds = sorted({s.kind for s in _near(plan, struck)})
            yield (
                f"{plan.plan_id} ended {plan.phase} {plan.reason}, which no fault explains: {kinds}"
            )


def excuses(plans: Sequence[PlanLife], struck: Sequence[Struck]) -> Counter[tuple[str, str]]:
    """Count the failed plans that faults explain, by (reason, kinds of these faults)."""
    found = Counter[tuple[str, str]]()
    for plan in plans:
        if _failed(plan) and (kinds := _explaining(plan, struck)):
            found[plan.reason, " ".join(sorted(kinds))] += 1
    return found


def _failed(plan: PlanLife) -> bool:
    return bool(plan.ended_at) and plan.phase not in ("committed", "forgotten", "outgrown")


def _near(plan: PlanLife, struck: Sequence[Struck]) -> list[Struck]:
    """Return the faults from shortly before a plan was asked for to its end."""
    return [s for s in struck if s.overlaps(plan.asked_at, plan.ended_at, _AFTERMATH_S)]


def _explaining(plan: PlanLife, struck: Sequence[Struck]) -> set[FaultKind]:
    """Return the kinds of faults near a failed plan that can cause its reason."""
    return {s.kind for s in _near(plan, struck)} & _CAUSES.get(plan.reason, _FAILURES)


def gaps(folder: Path, struck: Sequence[Struck]) -> list[Gap]:
    """Return all pauses of serving, the longest unexplained one first.

    A step ends when the last of its ranks has ended it, in whichever group.
    """
    found = []
    stops = [s for s in struck if s.kind.stops_serving]
    ended: dict[int, float] = {}
    for path in folder.glob("rank-*.jsonl"):
        for line in read_lines(path):
            if line["kind"] == "step":
                ended[line["step"]] = max(line["unix"], ended.get(line["step"], 0.0))
    times = [ended[step] for step in sorted(ended)]
    for before, after in zip(times, times[1:], strict=False):
        explained = sum(
            max(0.0, min(after, stop.ended or after) - max(before, stop.began)) for stop in stops
        )
        found.append(Gap(before, after - before, after - before - explained))
    return sorted(found, key=lambda gap: -gap.unexplained_s)


def bad_logs(controllers: Sequence[ControllerProcess]) -> Iterator[str]:
    """Report internal errors in the controllers' logs."""
    for controller in controllers:
        rows, noise = controller.rows()
        for row in rows:
            if row.get("event") in (
                "task_failed",
                "deployment_failed",
                "ended_deployment_failed",
                "failed_deployment_not_ended",
                "message_not_sent",
                "wave_map_unusable",
                "cycle_failed",
                "rank_stream_failed",
                "request_failed_by_defect",
            ):
                if row["event"] == "cycle_failed" and "exception" not in row:
                    continue
                yield f"{controller.name} logged {row['event']}: {str(row)[:1500]}"
        said = [line for line in noise if "Traceback" in line or "never retrieved" in line]
        if said:
            where = noise.index(said[0])
            yield f"{controller.name} printed: {' | '.join(noise[where : where + 12])[:1500]}"


def bad_series(name: str, series: dict[str, float], deployments: set[str]) -> Iterator[str]:
    """Series of deployments the replica no longer has."""
    labels = {match[1] for key in series if (match := re.search(r'deployment="([^"]*)"', key))}
    left = labels - deployments
    if left:
        yield f"{name} still shows series of {sorted(left)}; it has {sorted(deployments)}"
    if not series:
        yield f"{name} shows no metrics"


def too_many_fds(name: str, now: Counter[str], before: Counter[str]) -> Iterator[str]:
    """Descriptors against those after the start; "all" counts them."""
    if now["all"] > before["all"] + _SLACK_FDS:
        yield f"{name} holds {dict(now)} descriptors, {dict(before)} after the start"
