"""One cycle of planning: gates, policy, fewest moves, score on later steps, gates, waves.

It is pure, so that it runs in another process and a recorded cycle can be run again. Its answer is
exactly what will run: the target in the waves is, byte for byte, the one scored on later steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from traceback import walk_tb

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Wave
from evenkeel_moe.model.policy import OptionValue
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.decision.calibration import NOT_CALIBRATED, Calibration
from evenkeel_moe.planning.decision.gates import (
    Decision,
    GateInputs,
    GateMemory,
    MeasuredWindow,
    decide_after,
    decide_before,
)
from evenkeel_moe.planning.decision.verdict import Verdict, held_out_steps, judge
from evenkeel_moe.planning.decision.window_balance import time_balance, token_balance
from evenkeel_moe.planning.policies.policy_entry import PolicyInputs
from evenkeel_moe.planning.policies.registry import find_policy
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    Proposal,
    origin_shares,
)
from evenkeel_moe.planning.problem.survival import survival_numbers
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import (
    align_slots,
    count_moves,
    price_of_moves,
    relabel_proposal,
)
from evenkeel_moe.planning.schedule.waves import schedule_waves
from evenkeel_moe.planning.signals.change_detection import (
    Change,
    ChangeRules,
    detect_change,
    forget_old_means,
)

_SHOWN = ("replicas", "replication_factor", "filled_slots")
"""Figures of a policy that its plan tells."""
_ONE_LAYER = 2.0
"""A layer counts as changed, if the others did not, at this multiple of the change ratio. On steady
recorded traffic the largest of up to 26 layers is 1.7 times the difference of all of them."""


@dataclass(frozen=True, slots=True)
class WindowSplit:
    """The two parts of a window: load[:cut] is planned on, load[cut:] is scored on."""

    begin: int
    """First step of the traffic that is planned for; 0 if it did not change."""
    cut: int
    change: Change
    """The change of traffic by which `begin` was chosen."""
    least: int
    """Fewest steps that the verdict may judge on: where there cannot be more, those there are.
    Their interval is then wider (`few_steps` of `judge`), so that only large gains are
    certain."""

    def planned_on(self, load: NDArray[np.generic], policy: PolicyInputs) -> NDArray[np.float64]:
        """Return the (T, L, E) [tokens] that a policy plans on, at most `cut` steps of the window.

        Where the policy asks for it, `forget_old_means` moves the steps before `begin` to it.
        """
        if self.begin and policy.moves_old_steps:
            planned = forget_old_means(load[: self.cut], self.change)
        else:
            planned = load[: self.cut].astype(np.float64)
        return planned if policy.plan_steps is None else planned[-policy.plan_steps :]

    def steps_planned_on(self, policy: PolicyInputs) -> int:
        """Return the steps of the present traffic, as they were, among those planned on."""
        first = self.begin if policy.moves_old_steps else 0
        return min(self.cut - first, policy.plan_steps or self.cut)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class CycleInputs(GateInputs):
    """Everything a cycle may look at."""

    load: NDArray[np.generic]
    """(T, L, E) [tokens] complete steps, oldest first; T may be 0."""
    topology: Topology
    policy: str
    staging_bytes: tuple[int, ...]
    """(R,) receive buffer of each rank."""
    target: Placement | None = None
    """An explicit placement to use instead of the policy's; it is judged in the same way."""
    replica_budget: int | None = None
    source_load: NDArray[np.float64] | None = None
    """(R, L, E) [tokens] sums by source rank over about the whole window, later steps included.
    A cycle only takes from them which share of the tokens of an expert starts on which rank. None
    if ranks do not report it."""
    max_evaluations: int | None = None
    """Candidates the policy may evaluate; None leaves it to the policy."""
    threads: int = 1
    """Threads that the policy may use."""
    policy_options: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=dict)
    """Options by policy; those of other policies are for shadows and comparisons."""
    step_s: float | None = None
    """Seconds from one step to the next; None if unknown."""
    calibration: Calibration = NOT_CALIBRATED
    """By what earlier plans delivered."""
    seed: int = 0

    @property
    def own_options(self) -> Mapping[str, OptionValue]:
        """The options of `policy`."""
        return self.policy_options.get(self.policy, {})

    @property
    def policy_inputs(self) -> PolicyInputs:
        """The inputs that `policy` reads under its options.

        Raises:
            InvalidInput: there is no such policy, or it has no such option.
        """
        return find_policy(self.policy).inputs_with(self.own_options)

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
        or PLANNER_FAILED and their text in `detail`. Nothing is raised for bad data or requests, or
        by a policy.
    """
    change = change_of(inputs)
    try:
        before = _decide_to_plan(inputs, change)
    except EvenkeelError as error:  # The window or the cost model does not fit the placement.
        reason, detail = failure_of(error)
        return CycleResult(False, reason, inputs.memory, detail=detail)
    if not before.passed:
        return CycleResult(False, before.reason, before.memory, before.numbers)
    split = split_window(inputs, change)
    try:
        target, numbers = plan_target(inputs, split)
        verdict, judged = judge_target(inputs, target, split)
    except Exception as error:  # A policy of another package may fail in any way.
        reason, detail = failure_of(error)
        return CycleResult(False, reason, before.memory, before.numbers, detail=detail, split=split)
    after = decide_target(inputs, target, verdict, split)
    numbers = before.numbers | numbers | judged | after.numbers

    def end(
        passed: bool, reason: Reason, waves: tuple[Wave, ...] = (), detail: str = ""
    ) -> CycleResult:
        memory = before.memory
        if passed:
            since = len(inputs.load) - split.begin if split.begin else 0
            memory = replace(memory, change_steps=since)
        return CycleResult(passed, reason, memory, numbers, target, waves, detail, verdict, split)

    if not after.passed:
        return end(False, after.reason)
    try:
        waves = schedule_waves(
            inputs.current, target, inputs.shape, inputs.topology, inputs.staging_bytes
        )
    except EvenkeelError as error:
        return end(False, error.reason, detail=str(error))
    # Steps of a layer may take more copies than the gates have counted.
    exceeded = inputs.objective.limits.exceeded(waves, inputs.shape.slots_per_rank)
    if exceeded is not None:
        return end(False, Reason.LIMIT_EXCEEDED, detail=f"the plan {exceeded}")
    numbers["waves"] = float(len(waves))
    return end(True, before.reason, waves)


def failure_of(error: Exception) -> tuple[Reason, str]:
    """Return the reason with which a raised error ends a cycle, and its text.

    The text of an error that is not ours ends with the module and the line that raised it. REST
    shows the text, so it has no path of the machine.
    """
    if not isinstance(error, EvenkeelError):
        *_, (frame, line) = walk_tb(error.__traceback__)
        where = f"{frame.f_globals.get('__name__')}:{line}"
        return Reason.PLANNER_FAILED, f"{type(error).__name__}: {error} ({where})"
    invalid = error.reason is Reason.INVALID_INPUT
    return Reason.PLANNER_FAILED if invalid else error.reason, str(error)


def change_of(inputs: CycleInputs) -> Change:
    """Return the newest change of traffic in the window, under the threshold of the gates."""
    threshold = max(inputs.settings.change_ratio, 1e-9)
    rules = ChangeRules(
        threshold=threshold,
        layer_threshold=_ONE_LAYER * threshold,
        # A number of steps, whatever the length of the window.
        shortest=min(0.5, max(inputs.settings.min_changed_steps, 2.0) / max(len(inputs.load), 1)),
    )
    return detect_change(inputs.load.astype(np.float64), rules)


def _decide_to_plan(inputs: CycleInputs, change: Change) -> Decision:
    """Measure the balance of the window and apply the gates before planning."""
    load, split = inputs.load, inputs.token_split
    changed_steps = len(load) - change.first_step if change.first_step else 0
    tokens = token_balance(load, inputs.current, split, changed_steps)
    time = time_balance(load, inputs.current, inputs.objective, split, changed_steps)
    window = MeasuredWindow(len(load), tokens, time, change.strength, changed_steps)
    decision = decide_before(inputs, window)
    if not inputs.ranks_fresh:  # The window tells of the past.
        return decision
    measured = {
        "balancedness_mean": tokens.window,
        "balancedness_worst": tokens.worst,
        "window_steps": float(len(load)),
    }
    if time is not None:
        measured |= {"time_balance": time.window, "time_balance_worst": time.worst}
    known = {name: value for name, value in measured.items() if math.isfinite(value)}
    return Decision(decision.passed, decision.reason, known | decision.numbers, decision.memory)


def split_window(inputs: CycleInputs, change: Change) -> WindowSplit:
    """Divide the window into steps to plan on and, after them, steps to score on.

    The newest `held_out_steps` of those since a change are scored on; half of them, if they are
    few.

    The change was looked for in all steps, those that are scored on included: in the others alone
    it would be found later by as many steps. On stationary noise this does not let more plans
    through that cost time in the steps after the window (docs/verdict.md).
    """
    steps, least = len(inputs.load), int(inputs.settings.min_held_out_steps)
    since = steps - change.first_step
    few = change.first_step > 0 and since < 2 * least
    later = since // 2 if few else held_out_steps(since, least)
    least = min(least, later) if change.first_step else least
    return WindowSplit(change.first_step, steps - later, change, least)


def plan_target(inputs: CycleInputs, split: WindowSplit) -> tuple[Placement, dict[str, float]]:
    """Ask the policy for a placement and rename its ranks to be nearest to the present one.

    Args:
        inputs: of the cycle.
        split: tells the steps to plan on. They alone say how much load an expert has. Only the
            origin shares of its tokens come from the whole window, because its sums by source rank
            do not distinguish steps.

    Raises:
        InvalidInput, InfeasiblePlan: the policy is unknown or cannot answer, or its answer breaks
            an invariant of the deployment.
    """
    if inputs.target is not None:
        objective = inputs.objective
        inputs.target.check(
            inputs.shape,
            allow_duplicates=objective.allow_duplicates,
            fill_slots=objective.fill_slots,
        )
        return align_slots(inputs.current, inputs.target), {}
    uses = inputs.policy_inputs
    proposal, target = ask_policy(inputs, split.planned_on(inputs.load, uses))
    numbers = {name: proposal.numbers[name] for name in _SHOWN if name in proposal.numbers} | {
        "copies_raw": float(count_moves(inputs.current, proposal.placement)),
        "evaluations": float(proposal.evaluations),
        "planned_on_steps": float(split.steps_planned_on(uses)),
    }
    numbers |= survival_numbers(proposal.numbers)
    return target, numbers


def ask_policy(inputs: CycleInputs, load: NDArray[np.float64]) -> tuple[Proposal, Placement]:
    """Return what the policy proposes for (T, L, E) loads, and the relabelled placement.

    Raises:
        InvalidInput, InfeasiblePlan: as `plan_target`.
    """
    source = None
    if inputs.source_load is not None:
        source = origin_shares(inputs.source_load, inputs.shape) * load.sum(axis=0)
    problem = PlacementProblem(
        load=load,
        shape=inputs.shape,
        topology=inputs.topology,
        current=inputs.current,
        replica_budget=inputs.replica_budget,
        source_load=source,
        objective=inputs.objective,
        max_evaluations=inputs.max_evaluations,
        threads=inputs.threads,
        seed=inputs.seed,
    )
    proposal = find_policy(inputs.policy).with_options(inputs.own_options)(problem)
    return proposal, relabel_proposal(problem, proposal)


def judge_target(
    inputs: CycleInputs, target: Placement, split: WindowSplit
) -> tuple[Verdict | None, dict[str, float]]:
    """Judge a target on later steps.

    Returns:
        The verdict, None without later steps, and named figures.

    Raises:
        InfeasiblePlan: the target misses an expert that has load.
    """
    scored_on = inputs.load[split.cut :]
    if not len(scored_on):
        return None, {}
    objective, tokens = inputs.objective, inputs.token_split
    price = price_of_moves(inputs.current, target, inputs.topology, objective.cross_node_factor)
    verdict = judge(
        moe_time.step_times(scored_on, inputs.current, objective.cost, tokens).sum(axis=1),
        moe_time.step_times(scored_on, target, objective.cost, tokens).sum(axis=1),
        copy_cost=objective.copy_cost * float(price.sum()),
        lifetime_steps=objective.lifetime_steps,
        step_s=inputs.step_s,
        cost_model=objective.cost.basis,
        calibration=inputs.calibration,
        min_steps=max(2, split.least),
        few_steps=int(inputs.settings.min_held_out_steps),
        seed=inputs.seed,
    )
    expected = metrics.balancedness_mean(metrics.rank_load(scored_on, target, tokens))
    return verdict, {"balancedness_expected": expected} if math.isfinite(expected) else {}


def decide_target(
    inputs: CycleInputs, target: Placement, verdict: Verdict | None, split: WindowSplit
) -> Decision:
    """Apply the gates after planning."""
    settings = replace(inputs.settings, min_held_out_steps=split.least)
    return decide_after(replace(inputs, settings=settings), target, verdict)
