"""One cycle of planning: gates, policy, fewest moves, score on later steps, gates, waves.

It is pure, so that it runs in another process and a recorded cycle can be run again. Its answer is
exactly what will run: the target in the waves is, byte for byte, the one scored on later steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Wave
from evenkeel_moe.model.policy import Mode, OptionValue
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
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, origin_shares
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import align_slots, count_moves, relabel
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.planning.signals.change_detection import Change, ChangeRules, detect_change


@dataclass(frozen=True, slots=True)
class WindowSplit:
    """The two parts of a window: load[begin:cut] is planned on, load[cut:] is scored on."""

    begin: int
    cut: int
    change: Change
    """The change of traffic by which `begin` was chosen."""


@dataclass(frozen=True, eq=False, slots=True)
class CycleInputs:
    """Everything a cycle may look at."""

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
    """NaN if no step was ever complete."""
    memory: GateMemory = GateMemory()
    manual: bool = False
    target: Placement | None = None
    """An explicit placement to use instead of the policy's; it is judged in the same way."""
    plan_in_progress: bool = False
    frozen_until_unix: float = 0.0
    held: bool = False
    last_plan_ended_unix: float | None = None
    failed_plans: int = 0
    """Automatic plans in a row, up to the newest, that were refused or failed."""
    steps_since_move: int | None = None
    """Newest steps of the window that ran under the present placement; a plan has already answered
    a change of traffic before them. None if unknown: any change then counts."""
    objective: Objective = Objective()
    replica_budget: int | None = None
    source_load: NDArray[np.float64] | None = None
    """(R, L, E) [tokens] sums by source rank over about the whole window, later steps included.
    A cycle only takes from them which share of the tokens of an expert starts on which rank. None
    if ranks do not report it."""
    max_evaluations: int | None = None
    """Candidates the policy may evaluate; None leaves it to the policy."""
    policy_options: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=dict)
    """Options by policy; those of other policies are for shadows and comparisons."""
    recent_steps: int = 32
    """Steps since a change of traffic that are enough to plan on."""
    step_s: float | None = None
    """Seconds from one step to the next; None if unknown."""
    seed: int = 0

    @property
    def token_split(self) -> SplitModel:
        """The model of the dispatcher."""
        return SplitModel(self.objective.dispatch, self.topology, self.source_load)


@dataclass(frozen=True, eq=False, slots=True)
class CycleResult:
    """The outcome of a cycle."""

    passed: bool
    """True if there is a plan to be stored, proposed or started, as the mode says."""
    reason: Reason
    """The cause of the end; if it passed, of planning: MANUAL_REQUEST, LOAD_CHANGED, ..."""
    memory: GateMemory
    numbers: dict[str, float] = field(default_factory=dict)
    target: Placement | None = None
    """Set whenever a policy answered, also if a later gate closed."""
    waves: tuple[Wave, ...] = ()
    detail: str = ""
    """The text of the error that ended the cycle, if any."""
    verdict: Verdict | None = None
    """The verdict of the later steps; None if there were none, or the cycle ended before."""
    split: WindowSplit | None = None
    """The steps planned and scored on; None if the cycle ended before it planned."""


def run_cycle(inputs: CycleInputs) -> CycleResult:
    """Decide, plan, judge and schedule.

    Returns:
        Always a Reason. Errors of a policy or of the schedule end the cycle with their own reason
        or PLANNER_FAILED and their text in `detail`. Nothing is raised for bad data or requests.
    """
    change = change_of(inputs)
    try:
        before = _decide_to_plan(inputs, change)
    except EvenkeelError as error:  # The window or the cost model does not fit the placement.
        return CycleResult(False, _reason_of(error), inputs.memory, detail=str(error))
    if not before.passed:
        return CycleResult(False, before.reason, before.memory, before.numbers)
    split = split_window(inputs, change)
    planned_on, scored_on = inputs.load[split.begin : split.cut], inputs.load[split.cut :]
    try:
        target, numbers = plan_target(inputs, planned_on)
        verdict, judged = judge_target(inputs, target, scored_on)
    except EvenkeelError as error:
        return CycleResult(
            False, _reason_of(error), before.memory, before.numbers, detail=str(error), split=split
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


def _reason_of(error: EvenkeelError) -> Reason:
    """Return the reason with which an error ends a cycle."""
    return error.reason if error.reason is not Reason.INVALID_INPUT else Reason.PLANNER_FAILED


def change_of(inputs: CycleInputs) -> Change:
    """Return the newest change of traffic in the window, under the threshold of the gates."""
    threshold = max(inputs.settings.change_ratio, 1e-9)
    return detect_change(inputs.load.astype(np.float64), ChangeRules(threshold=threshold))


def _decide_to_plan(inputs: CycleInputs, change: Change) -> Decision:
    """Measure the balance of the window and apply the gates before planning."""
    load = inputs.load
    mean = worst = changed = math.nan
    changed_steps = _unanswered_steps(inputs, change)
    if len(load):
        by_rank = metrics.rank_load(load, inputs.current, inputs.token_split)
        mean, worst = metrics.balancedness_mean(by_rank), metrics.balancedness_worst(by_rank)
        if changed_steps:
            changed = metrics.balancedness_mean(by_rank[-changed_steps:])
    time = _time_balance(inputs, changed_steps)
    decision = decide_before(
        BeforeInputs(
            now_unix=inputs.now_unix,
            mode=inputs.mode,
            ranks_expected=inputs.shape.num_ranks,
            ranks_fresh=inputs.ranks_fresh,
            window_steps=len(load),
            newest_step_age_s=inputs.newest_step_age_s,
            balancedness_mean=mean,
            time_balance=None if time is None else time.window,
            change_strength=change.strength,
            changed_steps=changed_steps,
            enough_changed_steps=inputs.recent_steps,
            balancedness_changed=changed,
            time_balance_changed=math.nan if time is None else time.changed,
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
    if time is not None:
        measured |= {"time_balance": time.window, "time_balance_worst": time.worst}
    known = {name: value for name, value in measured.items() if math.isfinite(value)}
    return Decision(decision.passed, decision.reason, decision.numbers | known, decision.memory)


class _TimeBalance(NamedTuple):
    """Time balance of the present placement; NaN without load."""

    window: float
    worst: float
    """Of the worst layer."""
    changed: float
    """Since a change of traffic; NaN also without one."""


def _time_balance(inputs: CycleInputs, changed_steps: int) -> _TimeBalance | None:
    """Return the time balance; None if the cost model is by tokens."""
    cost, load = inputs.objective.cost, inputs.load
    if cost.by_tokens:
        return None
    if not len(load):
        return _TimeBalance(math.nan, math.nan, math.nan)
    times = moe_time.step_times(load, inputs.current, cost, inputs.token_split)
    fluid = moe_time.fluid_times(load, inputs.shape.num_ranks, cost)
    changed = slice(len(load) - changed_steps, None)
    return _TimeBalance(
        moe_time.balance_of(times, fluid),
        moe_time.worst_balance_of(times, fluid),
        moe_time.balance_of(times[changed], fluid[changed]),
    )


def _unanswered_steps(inputs: CycleInputs, change: Change) -> int:
    """Return the number of steps since a change that no plan has answered; 0 if there is none."""
    if change.first_step == 0:
        return 0
    steps = len(inputs.load) - change.first_step
    answered = inputs.steps_since_move is not None and steps > inputs.steps_since_move
    return 0 if answered else steps


def split_window(inputs: CycleInputs, change: Change) -> WindowSplit:
    """Divide the window into steps to plan on and, after them, steps to score on.

    The newest `held_out_steps` are scored on. Steps before a change of traffic are left out once
    there are `recent_steps` after it.
    """
    steps = len(inputs.load)
    begin = change.first_step if steps - change.first_step >= inputs.recent_steps else 0
    later = held_out_steps(steps - begin, int(inputs.settings.min_held_out_steps))
    return WindowSplit(begin, steps - later, change)


def plan_target(
    inputs: CycleInputs, load: NDArray[np.uint32]
) -> tuple[Placement, dict[str, float]]:
    """Ask the policy for a placement and rename its ranks to be nearest to the present one.

    Args:
        inputs: of the cycle.
        load: (T, L, E) [tokens] the steps to plan on. They alone say how much load an expert has.
            Only the origin shares of its tokens come from the whole window, because its sums by
            source rank do not distinguish steps.

    Raises:
        InvalidInput, InfeasiblePlan: the policy is unknown or cannot answer.
    """
    if inputs.target is not None:
        objective = inputs.objective
        inputs.target.check(
            inputs.shape,
            allow_duplicates=objective.allow_duplicates,
            fill_slots=objective.fill_slots,
        )
        return align_slots(inputs.current, inputs.target), {}
    source = None
    if inputs.source_load is not None:
        shares = origin_shares(inputs.source_load, inputs.shape)
        source = shares * load.sum(axis=0, dtype=np.float64)
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
    proposal = resolve_policy(inputs.policy, inputs.policy_options.get(inputs.policy))(problem)
    target = relabel(
        problem, proposal.placement, keep_nodes=proposal.numbers.get("keep_nodes", 0.0) > 0
    )
    numbers = {
        "copies_raw": float(count_moves(inputs.current, proposal.placement)),
        "evaluations": float(proposal.evaluations),
        "planned_on_steps": float(len(load)),
    }
    if proposal.lower_bound is not None and proposal.lower_bound > 0:
        numbers["gap_to_bound"] = moe_time.score(problem, target) / proposal.lower_bound - 1.0
    return target, numbers


def judge_target(
    inputs: CycleInputs, target: Placement, scored_on: NDArray[np.uint32]
) -> tuple[Verdict | None, dict[str, float]]:
    """Judge a target on later steps.

    Returns:
        The verdict, None without later steps, and named figures.

    Raises:
        InfeasiblePlan: the target misses an expert that has load.
    """
    if not len(scored_on):
        return None, {}
    objective, split = inputs.objective, inputs.token_split
    verdict = judge(
        moe_time.step_times(scored_on, inputs.current, objective.cost, split).sum(axis=1),
        moe_time.step_times(scored_on, target, objective.cost, split).sum(axis=1),
        copy_cost=objective.copy_cost * count_moves(inputs.current, target),
        lifetime_steps=objective.lifetime_steps,
        step_s=inputs.step_s,
        cost_model=objective.cost.basis,
        rules=VerdictRules(min_steps=max(2, int(inputs.settings.min_held_out_steps))),
        seed=inputs.seed,
    )
    expected = metrics.balancedness_mean(metrics.rank_load(scored_on, target, split))
    return verdict, {"balancedness_expected": expected} if math.isfinite(expected) else {}


def decide_target(inputs: CycleInputs, target: Placement, verdict: Verdict | None) -> Decision:
    """Apply the gates after planning."""
    return decide_after(
        AfterInputs(
            mode=inputs.mode,
            shape=inputs.shape,
            base=inputs.current,
            target=target,
            verdict=verdict,
            limits=inputs.objective.limits,
            allow_duplicates=inputs.objective.allow_duplicates,
            fill_slots=inputs.objective.fill_slots,
            manual=inputs.manual,
        ),
        inputs.settings,
    )
