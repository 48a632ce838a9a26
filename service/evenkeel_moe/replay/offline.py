"""Plans one placement for an engine to start with, and judges it on steps it was not planned on.

The engine loads its weights straight into the slots of the file, so no copy is priced, and the plan
need not stay near the placement that it is compared with.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats import PlacementFormat
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.finding import Finding, doubts
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.verdict import MIN_STEPS, Call, Verdict, held_out_steps, judge
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.placement_problem import Policy
from evenkeel_moe.planning.problem.survival import survival_numbers
from evenkeel_moe.planning.problem.token_split import SplitModel, slot_load
from evenkeel_moe.planning.schedule.relabel import count_moves, relabel_proposal
from evenkeel_moe.replay.planners import VERDICT, choose_planners
from evenkeel_moe.replay.walk import Replan, Setup


@dataclass(frozen=True, eq=False, slots=True)
class OfflinePlan:
    """A placement, and what it does on the steps that were held out."""

    placement: Placement
    planned_on: int
    """Oldest steps of the trace, on which the plan was made."""
    verdict: Verdict
    balancedness_before: float
    """Mean over held-out steps and layers under the placement that it is compared with; NaN without
    such steps or load."""
    balancedness_after: float
    findings: tuple[Finding, ...] = ()
    """Of the recording; with a doubt among them the verdict is uncertain."""
    survival: Mapping[str, float] = field(default_factory=dict)
    """`survival_numbers` of the plan; empty if nothing had to survive."""

    @property
    def words(self) -> str:
        """The verdict in sentences."""
        verdict = self.verdict
        if math.isnan(verdict.gain):
            seen = f"there are {verdict.steps} steps with load to judge it on"
        else:
            does = "saves" if verdict.gain >= 0 else "costs"
            seen = (
                f"on {verdict.steps} steps that the plan had not seen, the plan {does}"
                f" {abs(verdict.gain):.1%} of {verdict.cost_model.moe_time}"
            )
        if not math.isnan(verdict.gain_lower):
            seen += (
                f"; in the next {verdict.steps} steps the saving is from {verdict.gain_lower:.1%}"
                f" to {verdict.gain_upper:.1%}"
            )
        grave = sorted({each.code for each in doubts(self.findings)})
        if grave:
            accepted = " ".join(f"--accept {code}" for code in grave)
            return (
                "It cannot be told whether it pays, because the recording is in doubt. If its"
                f" counts are right all the same, give {accepted}. On the counts as they are:"
                f" {seen}."
            )
        if verdict.call is Call.RECOMMEND:
            return f"It pays: {seen}."
        if verdict.call is Call.NOT_NOW:
            return f"It does not pay: {seen}. Start the engine without the file."
        return f"It cannot be told whether it pays: {seen}. Record more steps."

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        figures = asdict(self.verdict)
        figures["cost_model"] |= {"words": self.verdict.cost_model.words}
        return {
            "planned_on_steps": self.planned_on,
            "balancedness_before": self.balancedness_before,
            "balancedness_after": self.balancedness_after,
            "replicas": int((self.placement.logcnt - 1).sum()),
            "words": self.words,
            **self.survival,
            "findings": [asdict(finding) for finding in self.findings],
            "verdict": figures,
        }


def engine_start(format_: PlacementFormat, shape: ModelShape) -> Placement:
    """Return the placement with which the reader of a format starts without a file.

    Source: vLLM `build_initial_global_physical_to_logical_map`, SGLang `init_trivial`,
    TensorRT-LLM `get_layer_initial_global_assignments`, vllm-ascend `generate_global_placement`.
    """
    experts, ranks, slots = shape.num_logical_experts, shape.num_ranks, shape.num_slots
    local = np.arange(shape.slots_per_rank)
    if format_ is PlacementFormat.TRTLLM:
        first = np.arange(ranks) * experts // ranks
        row = (first[:, None] + local).reshape(-1) % experts
    elif format_ is PlacementFormat.ASCEND:
        groups = [list(group) for group in np.array_split(np.arange(experts), ranks)]
        for extra in range(slots - experts):
            group = groups[-(extra % ranks + 1)]
            group.append((group[-1] + 1) % experts)
        row = np.concatenate(groups)
    else:
        row = np.arange(slots) % experts
    return Placement(np.tile(row.astype(np.int32), (shape.num_layers, 1)), ranks, experts)


def plan_offline(
    policy: str,
    setup: Setup,
    start: Placement,
    *,
    held_out: int | None = None,
    policies: Mapping[str, Policy] | None = None,
    one_row: bool = False,
    findings: tuple[Finding, ...] = (),
) -> OfflinePlan:
    """Plan on the older steps of a trace, and judge the plan on the newest.

    Args:
        policy: name of a policy.
        setup: trace and fleet; its window is not read.
        start: the placement to compare with.
        held_out: newest steps to judge on; None takes as many as a controller would.
        policies: to choose from; None for all that are known.
        one_row: True to plan one row for all layers, on the sum of their loads.
        findings: of the recording; with a doubt among them nothing is recommended.

    Raises:
        InvalidInput: the policy is unknown, or no step is left to plan on.
        ShapeMismatch: `start` belongs to another deployment.
        EvenkeelError: the policy failed.
    """
    if policy.endswith(VERDICT):
        raise InvalidInput(f"{policy}: every plan is judged here, leave {VERDICT} out")
    check_fits("the placement to compare with", start, setup.shape)
    steps = len(setup.load)
    planned_on = steps_to_plan_on(steps, held_out)
    on = _summed(setup) if one_row else setup
    placement, survival = plan_steps(policy, on, 0, planned_on, None, policies)
    if placement is None:
        placement = start
    elif one_row:
        rows = np.tile(placement.phy2log, (setup.shape.num_layers, 1))
        placement = Placement(rows, placement.num_ranks, placement.num_logical_experts)
    cost, load, split = (
        setup.objective.cost,
        setup.load[planned_on:],
        setup.split(planned_on, steps),
    )
    times, balance = [np.zeros(0)] * 2, [math.nan] * 2
    if planned_on < steps:
        both = (start, placement)
        times = [moe_time.step_times(load, one, cost, split).sum(axis=1) for one in both]
        balance = [metrics.balancedness_mean(metrics.rank_load(load, one, split)) for one in both]
    verdict = judge(*times, cost_model=cost.basis, seed=setup.seed)
    if doubts(findings):
        verdict = replace(verdict, call=Call.INSUFFICIENT_EVIDENCE)
    before, after = balance
    return OfflinePlan(placement, planned_on, verdict, before, after, findings, survival)


def steps_to_plan_on(steps: int, held_out: int | None) -> int:
    """Return how many of the oldest steps are planned on; the newest are kept to judge the plan on.

    `held_out` is the number of those; None takes as many as a controller would.

    Raises:
        InvalidInput: none is left to plan on.
    """
    kept = held_out_steps(steps, MIN_STEPS) if held_out is None else held_out
    if kept >= steps:
        raise InvalidInput(f"{kept} of {steps} steps are held out: none is left to plan on")
    return steps - kept


def _summed(setup: Setup) -> Setup:
    """Return the same fleet with one layer, whose load is the sum of all layers."""
    return replace(
        setup,
        load=setup.load.sum(axis=1, keepdims=True),
        shape=replace(setup.shape, num_layers=1),
        source=None if setup.source is None else setup.source.sum(axis=2, keepdims=True),
    )


def replica_mass(load: NDArray[np.float64], placement: Placement) -> NDArray[np.float64]:
    """Return the share of a layer's tokens that each slot should get, for engines that draw by it.

    The split is the one with the smallest largest rank load for the sum of all steps.

    Args:
        load: (T, L, E) [tokens].
        placement: (L, S) slots.

    Returns:
        (L, S) float64 in [0, 1], 1 in sum over a layer; an even split in a layer without load.
    """
    total = load.sum(axis=0)
    idle = total.sum(axis=1) == 0
    total[idle] = 1.0
    slots = slot_load(total[None], placement, SplitModel(DispatchModel.OPTIMAL))[0]
    return np.asarray(slots / total.sum(axis=1, keepdims=True), np.float64)


def plan_newest(
    policy: str, setup: Setup, current: Placement | None, policies: Mapping[str, Policy]
) -> tuple[Placement, dict[str, float]]:
    """Plan on the last `setup.window_steps` steps of a trace.

    Args:
        policy: a policy or a baseline.
        setup: trace and fleet.
        current: current placement; None at a cold start.
        policies: to choose from; None for all that are known.

    Returns:
        The placement, and its metrics on the window: `balancedness_mean`, `time_over_fluid`,
        `replicas` over all layers, `copies` from `current` if given, and `survival_numbers`.
        Metrics without a value are left out.

    Raises:
        InvalidInput: the policy is unknown, or a verdict has no current placement to compare with.
        ShapeMismatch: `current` belongs to another deployment.
        EvenkeelError: the policy failed.
    """
    if current is None and policy.endswith(VERDICT):
        raise InvalidInput(
            f"{policy} compares its plan with the current placement: give it with --current"
        )
    if current is not None:
        check_fits("the current placement", current, setup.shape)
    first, last = len(setup.load) - setup.window_steps, len(setup.load)
    kept = current or Placement.initial(setup.shape)
    planned, survival = plan_steps(policy, setup, first, last, current, policies)
    target = planned or kept
    load, split = setup.load[first:], setup.split(first, last)
    numbers = {
        "balancedness_mean": metrics.balancedness_mean(metrics.rank_load(load, target, split)),
        "time_over_fluid": moe_time.time_over_fluid(load, target, setup.objective.cost, split),
        "replicas": float((target.logcnt - 1).sum()),
        **survival,
    }
    if current is not None:
        numbers["copies"] = float(count_moves(current, target))
    return target, {name: value for name, value in numbers.items() if math.isfinite(value)}


def plan_steps(
    policy: str,
    setup: Setup,
    first: int,
    last: int,
    current: Placement | None,
    policies: Mapping[str, Policy] | None,
) -> tuple[Placement | None, dict[str, float]]:
    """Return the plan on the steps first..last-1, and its `survival_numbers`.

    The plan is None if the policy keeps the placement.
    """
    planner = choose_planners([policy], baselines=False, policies=policies)[policy]
    problem = setup.problem(first, last, current)
    proposal = planner(Replan(0, last, problem, setup))
    if proposal is None:
        return None, {}
    return relabel_proposal(problem, proposal), survival_numbers(proposal.numbers)


def check_fits(what: str, placement: Placement, shape: ModelShape) -> None:
    """Check that a placement that somebody named is of the fleet.

    Raises:
        ShapeMismatch: it is not.
    """
    if placement.sizes != shape.sizes:
        raise ShapeMismatch(
            f"{what} has (L, S, R, E) = {placement.sizes}, the fleet has {shape.sizes}"
        )
