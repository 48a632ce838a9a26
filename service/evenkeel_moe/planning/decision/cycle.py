"""One cycle of planning, start to end: gates, policy, fewest moves, held-out score, gates, waves.

Pure, so that it runs in another process and a recorded cycle can be run again. What it answers is
what will run: the target that was scored on later steps is, byte for byte, the one in the waves.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Wave
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.gates import (
    AfterInputs,
    BeforeInputs,
    Decision,
    GateMemory,
    GateSettings,
    decide_after,
    decide_before,
)
from evenkeel_moe.planning.decision.verdict import Verdict, VerdictRules, held_out_steps, judge
from evenkeel_moe.planning.policies.registry import resolve_policy
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    Proposal,
    origin_shares,
)
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import align_slots, count_moves, relabel
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.planning.signals.change_detection import Change, ChangeRules, find_change

__all__ = [
    "CycleInputs",
    "CycleResult",
    "Split",
    "decide_target",
    "judge_target",
    "plan_target",
    "run_cycle",
    "split_window",
]


@dataclass(frozen=True, slots=True)
class Split:
    """How a window is cut: planned on is load[begin:cut], scored on is load[cut:]."""

    begin: int
    cut: int
    change: Change
    """What was looked at to choose `begin`."""


@dataclass(frozen=True, eq=False, slots=True)
class CycleInputs:
    """All a cycle may look at."""

    load: NDArray[np.uint32]
    """(T, L, E) [tokens] complete steps, oldest first; T may be 0."""
    shape: ModelShape
    topology: Topology
    current: Placement
    policy: str
    settings: GateSettings
    staging_bytes: tuple[int, ...]
    """(R,) receive buffer of each rank."""
    now_unix: float
    mode: Mode
    ranks_fresh: int
    newest_step_age_s: float
    """NaN when no step was ever complete."""
    memory: GateMemory = GateMemory()
    manual: bool = False
    target: Placement | None = None
    """An explicit placement asked for instead of a policy's; judged all the same."""
    plan_in_progress: bool = False
    frozen_until_unix: float = 0.0
    held: bool = False
    last_plan_ended_unix: float | None = None
    failed_plans: int = 0
    """Automatic plans in a row, up to the last one, that were refused or failed."""
    steps_since_move: int | None = None
    """Newest steps of the window that ran under the present placement: a change of traffic among older ones has been
    answered. None where that is not known; any change then counts."""
    objective: Objective = Objective()
    replica_budget: int | None = None
    source_load: NDArray[np.float64] | None = None
    """(R, L, E) [tokens] source-side sums of about the whole window, the later steps included: a cycle takes from them
    only which share of an expert's tokens starts on which rank. None where ranks do not tell."""
    max_evaluations: int | None = None
    """Candidates the policy may look at; None leaves it to the policy."""
    recent_steps: int = 32
    """Steps since a change of traffic that are enough to plan on."""
    step_s: float | None = None
    """Seconds from one step to the next; None where not known."""
    seed: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class CycleResult:
    """What the cycle decided."""

    passed: bool
    """Whether there is a plan to be stored, proposed or started, as the mode says."""
    reason: Reason
    """Why it ended here; when passed, why it planned: MANUAL_REQUEST, LOAD_CHANGED, ..."""
    memory: GateMemory
    numbers: dict[str, float] = field(default_factory=dict)
    target: Placement | None = None
    """Set whenever a policy answered, also when a later gate closed."""
    waves: tuple[Wave, ...] = ()
    detail: str = ""
    """The error in words where one ended the cycle."""
    verdict: Verdict | None = None
    """What the later steps say; None when the cycle ended before, or there were none."""
    split: Split | None = None
    """What was planned and scored on; None when the cycle ended before it planned."""


def run_cycle(inputs: CycleInputs) -> CycleResult:
    """Decide, plan, judge and schedule.

    Returns:
        Always a Reason. Errors of a policy or schedule end the cycle as their own reason or
        PLANNER_FAILED, with the words in `detail`; nothing is raised for what data or operators did.
    """
    change = find_change(
        inputs.load.astype(np.float64),
        ChangeRules(threshold=max(inputs.settings.change_ratio, 1e-9)),
    )
    before = _before(inputs, change)
    if not before.passed:
        return CycleResult(False, before.reason, before.memory, before.numbers)
    split = split_window(inputs, change)
    planned_on, scored_on = inputs.load[split.begin : split.cut], inputs.load[split.cut :]
    try:
        target, numbers = plan_target(inputs, planned_on)
        verdict, judged = judge_target(inputs, target, scored_on)
    except EvenkeelError as error:
        reason = error.reason if error.reason is not Reason.INVALID_INPUT else Reason.PLANNER_FAILED
        return CycleResult(
            False, reason, before.memory, before.numbers, detail=str(error), split=split
        )
    after = decide_target(inputs, target, verdict)
    numbers = before.numbers | numbers | judged | after.numbers

    def end(
        passed: bool, reason: Reason, waves: tuple[Wave, ...] = (), detail: str = ""
    ) -> CycleResult:
        return CycleResult(
            passed, reason, before.memory, numbers, target, waves, detail, verdict, split
        )

    if not after.passed:
        return end(False, after.reason)
    try:
        waves = schedule_waves(
            inputs.current,
            target,
            inputs.shape,
            inputs.topology,
            inputs.staging_bytes,
            inputs.objective.limits,
        )
    except EvenkeelError as error:
        return end(False, error.reason, detail=str(error))
    numbers["waves"] = float(len(waves))
    return end(True, before.reason, waves)


def _before(inputs: CycleInputs, change: Change) -> Decision:
    """The gates before planning, with the balance of the window measured."""
    load = inputs.load
    mean = worst = changed = math.nan
    changed_steps = _unanswered_steps(inputs, change)
    if len(load):
        by_rank = metrics.rank_load(load, inputs.current, _split_model(inputs))
        mean, worst = metrics.balancedness_mean(by_rank), metrics.balancedness_worst(by_rank)
        if changed_steps:
            changed = metrics.balancedness_mean(by_rank[-changed_steps:])
    decision = decide_before(
        BeforeInputs(
            now_unix=inputs.now_unix,
            mode=inputs.mode,
            ranks_expected=inputs.shape.num_ranks,
            ranks_fresh=inputs.ranks_fresh,
            window_steps=len(load),
            newest_step_age_s=inputs.newest_step_age_s,
            balancedness_mean=mean,
            change_strength=change.strength,
            changed_steps=changed_steps,
            enough_changed_steps=inputs.recent_steps,
            balancedness_changed=changed,
            manual=inputs.manual,
            plan_in_progress=inputs.plan_in_progress,
            frozen_until_unix=inputs.frozen_until_unix,
            held=inputs.held,
            last_plan_ended_unix=inputs.last_plan_ended_unix,
            failed_plans=inputs.failed_plans,
            memory=inputs.memory,
        ),
        inputs.settings,
    )
    measured = {
        "balancedness_mean": mean,
        "balancedness_worst": worst,
        "window_steps": float(len(load)),
    }
    known = {name: value for name, value in measured.items() if math.isfinite(value)}
    return Decision(decision.passed, decision.reason, decision.numbers | known, decision.memory)


def _unanswered_steps(inputs: CycleInputs, change: Change) -> int:
    """Steps since a change that no plan has answered; 0 if there is none."""
    if change.first_step == 0:
        return 0
    steps = len(inputs.load) - change.first_step
    answered = inputs.steps_since_move is not None and steps > inputs.steps_since_move
    return 0 if answered else steps


def split_window(inputs: CycleInputs, change: Change) -> Split:
    """Cut the window: the newest `held_out_steps` are kept for scoring, the others are planned on.

    Steps before a change of traffic are left out, once there are `recent_steps` after it.
    """
    steps = len(inputs.load)
    begin = change.first_step if steps - change.first_step >= inputs.recent_steps else 0
    later = held_out_steps(steps - begin, int(inputs.settings.min_held_out_steps))
    return Split(begin, steps - later, change)


def plan_target(
    inputs: CycleInputs, load: NDArray[np.uint32]
) -> tuple[Placement, dict[str, float]]:
    """What the policy proposes, in the labels nearest to the present placement.

    Args:
        inputs: of the cycle.
        load: (T, L, E) [tokens] the steps to plan on. How much load an expert has comes from them alone; only the
            origin shares of its tokens come from all of the window, whose sums do not tell steps apart.

    Raises:
        InvalidInput, InfeasiblePlan: the policy is unknown or cannot answer.
    """
    if inputs.target is not None:
        inputs.target.check(inputs.shape, allow_duplicates=inputs.objective.allow_duplicates)
        return align_slots(inputs.current, inputs.target), {}
    source = None
    if inputs.source_load is not None:
        source = origin_shares(inputs.source_load, inputs.shape) * load.sum(
            axis=0, dtype=np.float64
        )
    problem = PlacementProblem(
        load=load.astype(np.float64),
        shape=inputs.shape,
        topology=inputs.topology,
        current=inputs.current,
        replica_budget=inputs.replica_budget,
        source_load=source,
        objective=inputs.objective,
        max_evaluations=inputs.max_evaluations,
        seed=inputs.seed,
    )
    proposal: Proposal = resolve_policy(inputs.policy)(problem)
    target = relabel(
        problem, proposal.placement, keep_nodes=proposal.numbers.get("keep_nodes", 0.0) > 0
    )
    numbers = {
        "copies_raw": float(count_moves(inputs.current, proposal.placement)),
        "evaluations": float(proposal.evaluations),
        "planned_on_steps": float(len(load)),
    }
    if proposal.lower_bound is not None and proposal.lower_bound > 0:
        numbers["gap_to_bound"] = metrics.score(problem, target) / proposal.lower_bound - 1.0
    return target, numbers


def judge_target(
    inputs: CycleInputs, target: Placement, scored_on: NDArray[np.uint32]
) -> tuple[Verdict | None, dict[str, float]]:
    """What the later steps say of a target, with named figures; None without later steps.

    Raises:
        InfeasiblePlan: the target misses an expert that has load.
    """
    if not len(scored_on):
        return None, {}
    split = _split_model(inputs)
    verdict = judge(
        metrics.step_times(scored_on, inputs.current, inputs.objective.costs, split).sum(axis=1),
        metrics.step_times(scored_on, target, inputs.objective.costs, split).sum(axis=1),
        copy_cost=inputs.objective.copy_cost * count_moves(inputs.current, target),
        lifetime_steps=inputs.objective.lifetime_steps,
        step_s=inputs.step_s,
        rules=VerdictRules(min_steps=max(2, int(inputs.settings.min_held_out_steps))),
        seed=inputs.seed,
    )
    expected = metrics.balancedness_mean(metrics.rank_load(scored_on, target, split))
    return verdict, {"balancedness_expected": expected} if math.isfinite(expected) else {}


def decide_target(inputs: CycleInputs, target: Placement, verdict: Verdict | None) -> Decision:
    """The gates that follow planning."""
    return decide_after(
        AfterInputs(
            mode=inputs.mode,
            shape=inputs.shape,
            base=inputs.current,
            target=target,
            verdict=verdict,
            limits=inputs.objective.limits,
            allow_duplicates=inputs.objective.allow_duplicates,
            manual=inputs.manual,
        ),
        inputs.settings,
    )


def _split_model(inputs: CycleInputs) -> SplitModel:
    return SplitModel(inputs.objective.dispatch, inputs.topology, inputs.source_load)
