"""Compares policies on one trace: walks each over it and collects the results."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evenkeel_moe.formats import Trace
from evenkeel_moe.formats.array_files import write_npz
from evenkeel_moe.formats.trace import assumed, missing_parts
from evenkeel_moe.model.cost import CostBasis
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.finding import Finding, Severity, judge_findings
from evenkeel_moe.planning.decision.kv_tradeoff import ReplicaTradeoff
from evenkeel_moe.planning.policies.registry import known_policies
from evenkeel_moe.replay.planners import VERDICT, warm_up
from evenkeel_moe.replay.replica_effect import ReplicaEffect, replica_effect
from evenkeel_moe.replay.replica_tradeoff import tradeoff_fields
from evenkeel_moe.replay.walk import Planner, Setup, Walk, replan_steps, walk_forward
from evenkeel_moe.replay.walk_metrics import WalkMetrics, measure_walk


def check_origin(
    trace: Trace, setup: Setup, policies: Iterable[str], accept: Collection[str] = ()
) -> Trace:
    """Return the trace with what planning on it assumes about the ranks that recorded it.

    That is where their tokens started, if a policy or a dispatcher needs it; and that their files
    are complete, if there are fewer of them than ranks to plan for. `accept` has codes of findings
    that a person has looked at.
    """
    found: list[Finding] = []
    files, ranks = trace.rank_files, setup.shape.num_ranks
    if files is not None and files < ranks:
        what = "the plan is for more ranks than have files in the recording"
        amount = f"{files} files, {ranks} ranks"
        advice = "Copy the files of all machines into the folder, unless fewer ranks served"
        found.append(missing_parts(Severity.DOUBT, what, amount=amount, advice=advice))
    users = ["nearest dispatch"] if setup.objective.dispatch is DispatchModel.NEAREST else []
    known = known_policies()
    for name in policies:
        entry = known.get(name.removesuffix(VERDICT))
        users += [name] if entry is not None and entry.inputs.source_ranks else []
    if setup.source is None and users:
        have = "has no source counts"
        if trace.source is not None:
            have = f"has source counts of {trace.source.shape[1]} ranks, not of {ranks}"
        evenly = "tokens are assumed to start evenly on all ranks"
        found.append(assumed(f"the trace {have}: {evenly}, which affects {' and '.join(users)}"))
    return replace(trace, findings=(*trace.findings, *judge_findings(found, accept)))


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of all policies on one trace."""

    trace: Trace
    setup: Setup
    walks: tuple[Walk, ...]
    results: tuple[WalkMetrics, ...]
    """The metrics of each walk."""
    replicas: ReplicaEffect | None
    """The effect of the replicas of the initial placement on the scored steps; None without
    replicas or load."""
    tradeoff: ReplicaTradeoff | None = None
    """Replicas against KV cache; None if not asked for."""

    @property
    def cost_model(self) -> CostBasis:
        """What all times rest on."""
        return self.setup.objective.cost.basis

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the trace and of the fleet by name."""
        setup, shape = self.setup, self.setup.shape
        slots = shape.num_slots
        if shape.pool_slots_per_rank is not None:  # The average of a layer.
            slots = shape.pool_slots_per_rank * shape.num_ranks // shape.num_layers
        return {
            "steps": len(setup.load),
            "layers": shape.num_layers,
            "experts": shape.num_logical_experts,
            "ranks": shape.num_ranks,
            "slots": slots,
            "window": setup.window_steps,
            "horizon": setup.horizon_steps,
            "replans": len(self.walks[0].steps),
        }

    def facts(self) -> dict[str, int]:
        """Return the same, with names for people."""
        words = {"window": "steps planned on", "horizon": "steps scored on"}
        if self.setup.shape.pooled:
            words["slots"] = "pooled slots"
        return {words.get(name, name): size for name, size in self.sizes().items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values: `results`, and the inputs they depend on."""
        return {
            "trace": self.trace.name,
            **self.sizes(),
            "pooled": self.setup.shape.pooled,
            "bytes_per_expert": self.setup.shape.bytes_per_expert,
            "findings": [asdict(finding) for finding in self.trace.findings],
            "cost_model": asdict(self.cost_model) | {"words": self.cost_model.words},
            "replicas": None if self.replicas is None else asdict(self.replicas),
            "results": [asdict(result) for result in self.results],
            **tradeoff_fields(self.tradeoff),
        }


def compare(
    trace: Trace,
    setup: Setup,
    planners: Mapping[str, Planner],
    tradeoff: ReplicaTradeoff | None = None,
    *,
    on_work: Callable[[str, int], None] = lambda name, replans: None,
    on_replan: Callable[[], None] = lambda: None,
) -> Comparison:
    """Walk every planner over the trace.

    Args:
        trace: the source of the loads; its name and findings are kept.
        setup: the loads and the fleet.
        planners: planners by name, in the order of the results.
        tradeoff: replicas against KV cache, to be shown with the results.
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
    results = tuple(measure_walk(walk, setup.shape.bytes_per_expert) for walk in walks)
    first = setup.window_steps
    effect = replica_effect(setup, first, first + replans * setup.horizon_steps)
    return Comparison(trace, setup, tuple(walks), results, effect, tradeoff)


def write_plans(path: Path, comparison: Comparison) -> None:
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
    write_npz(path, arrays)
