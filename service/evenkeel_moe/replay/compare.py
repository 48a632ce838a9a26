"""Compares policies on one trace: walks each over it and collects the results."""

import io
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.formats import Trace
from evenkeel_moe.formats.trace import assumed
from evenkeel_moe.formats.writing import write_file
from evenkeel_moe.model.cost import CostBasis
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.finding import Finding, FindingCode, Severity, judge_findings
from evenkeel_moe.replay.budget import BudgetPoint, budget_curve, budgets_to_try
from evenkeel_moe.replay.planners import VERDICT, warm_up
from evenkeel_moe.replay.replica_effect import ReplicaEffect, replica_effect
from evenkeel_moe.replay.walk import Planner, Setup, Walk, replan_steps, walk_forward
from evenkeel_moe.replay.walk_metrics import WalkMetrics, measure_walk


def load_by_source(
    trace: Trace, ranks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Return the (T, L, E) load, and the (T, R, L, E) load by source rank if the trace has it."""
    source = trace.source
    if source is None or source.shape[1] != ranks:
        return trace.counts.astype(np.float64), None
    return trace.counts.astype(np.float64), source.astype(np.float64)


def check_origin(
    trace: Trace, setup: Setup, policies: Iterable[str], accept: Collection[str] = ()
) -> Trace:
    """Return the trace with what planning on it assumes about the ranks that recorded it.

    `accept` has codes of findings that a person has looked at.
    """
    assumed_too = judge_findings(_origin_findings(trace, setup, policies), accept)
    return replace(trace, findings=(*trace.findings, *assumed_too))


def _origin_findings(trace: Trace, setup: Setup, policies: Iterable[str]) -> tuple[Finding, ...]:
    """Return what the plan assumes about the ranks that recorded the trace.

    That is where their tokens started, if a policy or a dispatcher needs it; and that their files
    are complete, if there are fewer of them than ranks to plan for.
    """
    files, ranks = trace.rank_files, setup.shape.num_ranks
    fewer: tuple[Finding, ...] = ()
    if files is not None and files < ranks:
        fewer = (
            Finding(
                FindingCode.PARTS_MISSING,
                Severity.DOUBT,
                "the plan is for more ranks than have files in the recording",
                amount=f"{files} files, {ranks} ranks",
                advice="Copy the files of all machines into the folder, unless fewer ranks served",
            ),
        )
    users = ["nearest dispatch"] if setup.objective.dispatch is DispatchModel.NEAREST else []
    users += [name for name in policies if name.removesuffix(VERDICT) == "libra"]
    if setup.source is not None or not users:
        return fewer
    have = "has no source counts"
    if trace.source is not None:
        have = f"has source counts of {trace.source.shape[1]} ranks, not of {setup.shape.num_ranks}"
    evenly = "tokens are assumed to start evenly on all ranks"
    affected = " and ".join(users)
    return (*fewer, assumed(f"the trace {have}: {evenly}, which affects {affected}"))


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of all policies on one trace."""

    name: str
    layer_ids: tuple[int, ...]
    setup: Setup
    bytes_per_expert: int
    walks: tuple[Walk, ...]
    results: tuple[WalkMetrics, ...]
    """The metrics of each walk."""
    budget: tuple[BudgetPoint, ...] = ()
    """Empty unless asked for."""
    findings: tuple[Finding, ...] = ()
    replicas: ReplicaEffect | None = None
    """The effect of the replicas of the initial placement on the scored steps; None without
    replicas or load."""

    @property
    def cost_model(self) -> CostBasis:
        """What all times rest on."""
        return self.setup.objective.cost.basis

    @property
    def slots(self) -> int:
        """Slots of a layer over all ranks; the average of a layer where they are pooled."""
        shape = self.setup.shape
        pool = shape.pool_slots_per_rank
        return shape.num_slots if pool is None else pool * shape.num_ranks // shape.num_layers

    def facts(self) -> dict[str, int]:
        """Return the sizes of the trace and of the fleet, to be shown to people."""
        shape = self.setup.shape
        return {
            "steps": len(self.setup.load),
            "layers": shape.num_layers,
            "experts": shape.num_logical_experts,
            "ranks": shape.num_ranks,
            "pooled slots" if shape.pooled else "slots": self.slots,
            "steps planned on": self.setup.window_steps,
            "steps scored on": self.setup.horizon_steps,
            "replans": len(self.walks[0].steps),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values: `results`, and the inputs they depend on."""
        shape = self.setup.shape
        answer: dict[str, Any] = {
            "trace": self.name,
            "steps": len(self.setup.load),
            "layers": shape.num_layers,
            "experts": shape.num_logical_experts,
            "ranks": shape.num_ranks,
            "slots": self.slots,
            "pooled": shape.pooled,
            "window": self.setup.window_steps,
            "horizon": self.setup.horizon_steps,
            "replans": len(self.walks[0].steps),
            "bytes_per_expert": self.bytes_per_expert,
            "findings": [asdict(finding) for finding in self.findings],
            "cost_model": asdict(self.cost_model) | {"words": self.cost_model.words},
            "replicas": None if self.replicas is None else asdict(self.replicas),
            "results": [asdict(result) for result in self.results],
        }
        if self.budget:
            answer["budget"] = [asdict(point) for point in self.budget]
        return answer


def compare(
    trace: Trace,
    setup: Setup,
    planners: Mapping[str, Planner],
    bytes_per_expert: int,
    *,
    budget: bool = False,
    on_work: Callable[[str, int], None] = lambda name, replans: None,
    on_replan: Callable[[], None] = lambda: None,
) -> Comparison:
    """Walk every planner over the trace.

    Args:
        trace: the source of the loads; its name and findings are kept.
        setup: the loads and the fleet.
        planners: planners by name, in the order of the results.
        bytes_per_expert: size of all tensors of one expert.
        budget: True to walk the replica budgets of `budget_curve` too.
        on_work: called before each piece of work with its name and its replans (0 for warming up).
        on_replan: called after each replan.

    Raises:
        InvalidInput: too few steps.
        EvenkeelError: a policy failed.
    """
    replans = len(replan_steps(len(setup.load), setup.window_steps, setup.horizon_steps))
    warm_up(planners, setup, lambda name: on_work(f"{name}: first call", 0))
    walks: list[Walk] = []
    for name, planner in planners.items():
        on_work(name, replans)
        walks.append(walk_forward(name, planner, setup, on_replan=on_replan))
    points: tuple[BudgetPoint, ...] = ()
    if budget:
        shape = setup.shape
        budgets = budgets_to_try(shape.num_logical_experts, shape.num_ranks, shape.num_redundant)
        on_work("replica budgets", replans * len(budgets))
        points = budget_curve(setup, budgets, bytes_per_expert, on_replan=on_replan)
    return Comparison(
        trace.name,
        trace.layer_ids,
        setup,
        bytes_per_expert,
        tuple(walks),
        tuple(measure_walk(walk, bytes_per_expert) for walk in walks),
        points,
        trace.findings,
        replica_effect(
            setup, setup.window_steps, setup.window_steps + replans * setup.horizon_steps
        ),
    )


def save_plans(path: Path, comparison: Comparison) -> None:
    """Write every plan to an npz file, so that other tools can score it.

    The arrays are `<policy>_steps` and `<policy>_phy2log`. Plan i of a policy applied to the
    `horizon` steps from `steps[i]`, and was scored on them.

    Raises:
        InvalidInput: the file cannot be written.
    """
    arrays: dict[str, Any] = {}
    for walk in comparison.walks:
        rows = np.stack([placement.phy2log for placement in walk.placements])
        arrays[f"{walk.policy}_steps"] = walk.steps.astype(np.int64)
        arrays[f"{walk.policy}_phy2log"] = rows.astype(np.int32)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_file(path, buffer.getvalue())
