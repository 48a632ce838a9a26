"""One cycle of planning, start to end: gates, policy, fewest moves, held-out score, gates, waves.

Pure, so that it runs in another process and a recorded cycle can be run again. What it answers is
what will run: the target that was scored on later steps is, byte for byte, the one in the waves.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenkeel.errors import EvenkeelError, Reason
from evenkeel.model.placement import Placement
from evenkeel.model.plan import PlanLimits, Wave
from evenkeel.model.policy import Mode
from evenkeel.model.topology import ModelShape, Topology
from evenkeel.planning import metrics
from evenkeel.planning.gates import (
    AfterInputs,
    BeforeInputs,
    Decision,
    GateMemory,
    GateSettings,
    HeldOut,
    decide_after,
    decide_before,
    load_change,
)
from evenkeel.planning.policies import resolve_policy
from evenkeel.planning.problem import CostCurves, DispatchModel, PlacementProblem, Proposal
from evenkeel.planning.relabel import align_slots, count_moves, relabel
from evenkeel.planning.split import SplitModel
from evenkeel.planning.waves import schedule_waves

__all__ = ["CycleInputs", "CycleResult", "held_out_gain", "run_cycle"]


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
    limits: PlanLimits = PlanLimits()
    allow_duplicates: bool = False
    replica_budget: int | None = None
    dispatch: DispatchModel = DispatchModel.EVEN
    costs: CostCurves | None = None
    source_load: NDArray[np.float64] | None = None
    copy_cost: float = 0.0
    """Price of one copy between ranks in score units: seconds with curves, else tokens."""
    lifetime_steps: int = 1000
    """Steps a placement is expected to last: what a copy's price is spread over."""
    recent_steps: int = 32
    """Steps per block in which a change of traffic is looked for."""
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


def run_cycle(inputs: CycleInputs) -> CycleResult:
    """Decide, plan, judge and schedule.

    Returns:
        Always a Reason. Errors of a policy or schedule end the cycle as their own reason or
        PLANNER_FAILED, with the words in `detail`; nothing is raised for what data or operators did.
    """
    before = _before(inputs)
    if not before.passed:
        return CycleResult(False, before.reason, before.memory, before.numbers)
    planned_on, scored_on = _split(inputs, before.reason)
    try:
        target, numbers = _target(inputs, planned_on)
    except EvenkeelError as error:
        reason = error.reason if error.reason is not Reason.INVALID_INPUT else Reason.PLANNER_FAILED
        return CycleResult(False, reason, before.memory, before.numbers, detail=str(error))
    numbers = before.numbers | numbers
    after, judged = _after(inputs, target, planned_on, scored_on)
    numbers |= after.numbers | judged
    if not after.passed:
        return CycleResult(False, after.reason, before.memory, numbers, target)
    try:
        waves = schedule_waves(
            inputs.current, target, inputs.shape, inputs.topology, inputs.staging_bytes, inputs.limits
        )
    except EvenkeelError as error:
        return CycleResult(False, error.reason, before.memory, numbers, target, detail=str(error))
    numbers["waves"] = float(len(waves))
    return CycleResult(True, before.reason, before.memory, numbers, target, waves)


def held_out_gain(
    before: NDArray[np.float64], after: NDArray[np.float64], *, seed: int = 0, resamples: int = 500
) -> HeldOut:
    """How much of the MoE time a plan saves on steps it was not planned on.

    Args:
        before, after: (T,) predicted time of each later step under the present and the proposed placement.
        seed: of the bootstrap.

    Returns:
        The gain 1 - sum(after)/sum(before) and its 5 % quantile over circular moving blocks of about sqrt(T)
        steps: neighbouring steps are alike, so single steps would make it look more certain than it is.
    """
    steps = len(before)
    total = float(before.sum())
    if steps == 0 or total <= 0:
        return HeldOut(math.nan, math.nan, steps)
    block = max(1, round(math.sqrt(steps)))
    starts = np.random.default_rng(seed).integers(0, steps, (resamples, -(-steps // block)))
    picked = ((starts[:, :, None] + np.arange(block)) % steps).reshape(resamples, -1)[:, :steps]
    gains = 1.0 - after[picked].sum(axis=1) / np.maximum(before[picked].sum(axis=1), 1e-300)
    return HeldOut(1.0 - float(after.sum()) / total, float(np.quantile(gains, 0.05)), steps)


def _before(inputs: CycleInputs) -> Decision:
    """The gates before planning, with the balance of the window measured."""
    load = inputs.load
    mean = worst = recent = change = math.nan
    if len(load):
        by_rank = metrics.rank_load(load, inputs.current, _split_model(inputs))
        mean, worst = metrics.balancedness_mean(by_rank), metrics.balancedness_worst(by_rank)
        recent = metrics.balancedness_mean(by_rank[-inputs.recent_steps :])
        change = load_change(load, inputs.recent_steps)
    decision = decide_before(
        BeforeInputs(
            now_unix=inputs.now_unix,
            mode=inputs.mode,
            ranks_expected=inputs.shape.num_ranks,
            ranks_fresh=inputs.ranks_fresh,
            window_steps=len(load),
            newest_step_age_s=inputs.newest_step_age_s,
            balancedness_mean=mean,
            balancedness_recent=recent,
            change=change,
            manual=inputs.manual,
            plan_in_progress=inputs.plan_in_progress,
            frozen_until_unix=inputs.frozen_until_unix,
            held=inputs.held,
            last_plan_ended_unix=inputs.last_plan_ended_unix,
            memory=inputs.memory,
        ),
        inputs.settings,
    )
    measured = {"balancedness_mean": mean, "balancedness_worst": worst, "window_steps": float(len(load))}
    known = {name: value for name, value in measured.items() if math.isfinite(value)}
    return Decision(decision.passed, decision.reason, decision.numbers | known, decision.memory)


def _split(inputs: CycleInputs, why: Reason) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """(planned on, scored on): the newest third is kept for scoring; after a change only newest steps count."""
    load = inputs.load[-inputs.recent_steps :] if why is Reason.LOAD_CHANGED else inputs.load
    later = max(1, len(load) // 3)
    if len(load) >= 2 * inputs.settings.min_held_out_steps:
        later = max(later, int(inputs.settings.min_held_out_steps))
    if len(load) == 1:
        return load, load[:0]
    return load[:-later], load[-later:]


def _target(inputs: CycleInputs, load: NDArray[np.uint32]) -> tuple[Placement, dict[str, float]]:
    """What the policy proposes, in the labels nearest to the present placement.

    Raises:
        InvalidInput, InfeasiblePlan: the policy is unknown or cannot answer.
    """
    if inputs.target is not None:
        inputs.target.check(inputs.shape, allow_duplicates=inputs.allow_duplicates)
        return align_slots(inputs.current, inputs.target), {}
    problem = PlacementProblem(
        load=load.astype(np.float64),
        shape=inputs.shape,
        topology=inputs.topology,
        current=inputs.current,
        replica_budget=inputs.replica_budget,
        source_load=inputs.source_load,
        costs=inputs.costs,
        dispatch=inputs.dispatch,
        limits=inputs.limits,
        cost_per_move=inputs.copy_cost / inputs.lifetime_steps,
        seed=inputs.seed,
        allow_duplicates=inputs.allow_duplicates,
    )
    proposal: Proposal = resolve_policy(inputs.policy)(problem)
    target = relabel(problem, proposal.placement, keep_nodes=proposal.numbers.get("keep_nodes", 0.0) > 0)
    numbers = {
        "copies_raw": float(count_moves(inputs.current, proposal.placement)),
        "evaluations": float(proposal.evaluations),
        "planned_on_steps": float(len(load)),
    }
    if proposal.lower_bound is not None and proposal.lower_bound > 0:
        numbers["gap_to_bound"] = metrics.score(problem, target) / proposal.lower_bound - 1.0
    return target, numbers


def _after(
    inputs: CycleInputs, target: Placement, planned_on: NDArray[np.uint32], scored_on: NDArray[np.uint32]
) -> tuple[Decision, dict[str, float]]:
    """The gates after planning, and what the plan is expected to bring on the later steps."""
    split = _split_model(inputs)
    held_out = None
    judged: dict[str, float] = {}
    saved = 0.0
    scored = scored_on if len(scored_on) else planned_on
    if len(scored):
        old = metrics.step_times(scored, inputs.current, inputs.costs, split).sum(axis=1)
        new = metrics.step_times(scored, target, inputs.costs, split).sum(axis=1)
        saved = float((old - new).mean())
        if len(scored_on):
            held_out = held_out_gain(old, new, seed=inputs.seed)
        expected = metrics.balancedness_mean(metrics.rank_load(scored, target, split))
        if math.isfinite(expected):
            judged["balancedness_expected"] = expected
    decision = decide_after(
        AfterInputs(
            mode=inputs.mode,
            shape=inputs.shape,
            base=inputs.current,
            target=target,
            held_out=held_out,
            saved_per_step=saved,
            move_cost=inputs.copy_cost * count_moves(inputs.current, target),
            limits=inputs.limits,
            allow_duplicates=inputs.allow_duplicates,
            manual=inputs.manual,
        ),
        inputs.settings,
    )
    return decision, judged


def _split_model(inputs: CycleInputs) -> SplitModel:
    return SplitModel(inputs.dispatch, inputs.topology, inputs.source_load)
