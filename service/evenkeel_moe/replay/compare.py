"""Compare policies on one trace: walk each, summarise, keep what the page and the files need."""

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.formats import Trace
from evenkeel_moe.formats.writing import write_file
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.problem.objective import CostCurves, DispatchModel
from evenkeel_moe.replay.budget import BudgetPoint, budget_curve, budgets_to_try
from evenkeel_moe.replay.figures import Figures, summarise
from evenkeel_moe.replay.planners import VERDICT, warm_up
from evenkeel_moe.replay.walk import Planner, Setup, Walk, replan_steps, walk_forward

__all__ = ["Comparison", "Fleet", "compare", "load_of", "origin_notes", "save_plans"]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet a trace is replayed on, as a person states it."""

    ranks: int
    slots: int
    """Slots of one layer over all ranks."""
    nodes: int = 1
    expert_groups: int = 1
    bytes_per_expert: int = 3 * 7168 * 2048
    """Default: a DeepSeek-V3 expert in FP8."""
    pooled: bool = False
    """Slots are pooled over layers: `slots` is then the average of a layer."""
    rank_speeds: tuple[float, ...] | None = None
    """(R,) relative speeds; None for equal ranks."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.slots < 1 or self.slots % self.ranks:
            raise ShapeMismatch(f"{self.slots} slots do not divide over {self.ranks} ranks")
        if self.nodes < 1 or self.ranks % self.nodes:
            raise ShapeMismatch(f"{self.ranks} ranks do not divide over {self.nodes} nodes")
        speeds = self.rank_speeds
        if speeds is not None and (
            len(speeds) != self.ranks
            or not all(0 < s < float("inf") and 1 / s < float("inf") for s in speeds)
        ):
            raise ShapeMismatch(
                f"{self.ranks} positive rank speeds are needed, got {len(speeds)}: {list(speeds)}"
            )

    def shape(self, trace: Trace) -> ModelShape:
        """The deployment this fleet is for the model of a trace.

        Raises:
            ShapeMismatch: a rank has more slots than there are experts; none could hold anything.
        """
        per_rank = self.slots // self.ranks
        if per_rank > trace.num_experts:
            raise ShapeMismatch(
                f"{self.slots} slots on {self.ranks} ranks are {per_rank} a rank, the model has {trace.num_experts} experts;"
                f" at most {trace.num_experts * self.ranks} slots can be used"
            )
        row = min(trace.num_experts, 2 * per_rank) if self.pooled else per_rank
        return ModelShape(
            num_layers=trace.num_layers,
            num_logical_experts=trace.num_experts,
            num_ranks=self.ranks,
            slots_per_rank=row,
            top_k=trace.top_k or 1,
            bytes_per_expert=self.bytes_per_expert,
            num_expert_groups=self.expert_groups,
            pool_slots_per_rank=per_rank * trace.num_layers if self.pooled else None,
        )

    def topology(self) -> Topology:
        """Nodes of consecutive ranks."""
        return Topology(tuple(rank * self.nodes // self.ranks for rank in range(self.ranks)))

    def costs(self) -> CostCurves | None:
        """Seconds per token: one over the speed."""
        return (
            None
            if self.rank_speeds is None
            else CostCurves.linear(1.0 / np.array(self.rank_speeds))
        )


def load_of(trace: Trace, ranks: int) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """(T, L, E) loads, and by source rank where the trace has them for as many ranks."""
    source = trace.source
    if source is None or source.shape[1] != ranks:
        return trace.counts.astype(np.float64), None
    return trace.counts.astype(np.float64), source.astype(np.float64)


def origin_notes(trace: Trace, setup: Setup, policies: Iterable[str]) -> tuple[str, ...]:
    """What is assumed of where tokens start, if anything asks for it and the trace does not say."""
    asking = ["nearest dispatch"] if setup.objective.dispatch is DispatchModel.NEAREST else []
    asking += [name for name in policies if name.removesuffix(VERDICT) == "libra"]
    if setup.source is not None or not asking:
        return ()
    have = "has no source counts"
    if trace.source is not None:
        have = f"has source counts of {trace.source.shape[1]} ranks, not of {setup.shape.num_ranks}"
    return (
        f"the trace {have}: tokens are taken to start evenly on all ranks, which matters to {' and '.join(asking)}",
    )


@dataclass(frozen=True, eq=False)
class Comparison:
    """All policies on one trace."""

    name: str
    layer_ids: tuple[int, ...]
    setup: Setup
    bytes_per_expert: int
    walks: tuple[Walk, ...]
    figures: tuple[Figures, ...]
    budget: tuple[BudgetPoint, ...] = ()
    """Empty unless asked for."""
    notes: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        """Slots of a layer over all ranks, on average where they are pooled."""
        shape = self.setup.shape
        pool = shape.pool_slots_per_rank
        return shape.num_slots if pool is None else pool * shape.num_ranks // shape.num_layers

    def facts(self) -> dict[str, int]:
        """What was replayed on what."""
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
        """For JSON: `results`, and what they rest on."""
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
            "notes": list(self.notes),
            "results": [figures.as_dict() for figures in self.figures],
        }
        if self.budget:
            answer["budget"] = [point.as_dict() for point in self.budget]
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
        trace: where the loads came from; names and notes are kept.
        setup: the loads and the fleet.
        planners: by name, in the order of the answer.
        bytes_per_expert: every tensor of one expert.
        budget: also walk the replica budgets of `budget_curve`.
        on_work: called with a name and its number of replans before each piece of work, 0 replans for warming up.
        on_replan: called after each replan.

    Raises:
        InvalidInput: too few steps.
        EvenkeelError: a policy refused.
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
    figures = tuple(summarise(walk, bytes_per_expert) for walk in walks)
    notes = trace.notes + origin_notes(trace, setup, planners)
    return Comparison(
        trace.name, trace.layer_ids, setup, bytes_per_expert, tuple(walks), figures, points, notes
    )


def save_plans(path: Path, comparison: Comparison) -> None:
    """Write every plan, so that anybody can score it again: `<policy>_steps` and `<policy>_phy2log`.

    Plan i of a policy is in force, and was scored, from its step up to `horizon` steps later.

    Raises:
        InvalidInput: the file cannot be written.
    """
    arrays: dict[str, Any] = {}
    for walk in comparison.walks:
        arrays[f"{walk.policy}_steps"] = walk.steps.astype(np.int64)
        arrays[f"{walk.policy}_phy2log"] = np.stack([p.phy2log for p in walk.placements]).astype(
            np.int32
        )
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_file(path, buffer.getvalue())
