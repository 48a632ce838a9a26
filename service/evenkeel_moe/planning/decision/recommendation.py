"""The recommendation for a deployment: policies and numbers of replicas compared without a move.

All are planned on the older part of the window and scored on the newer one, with the functions that
a cycle uses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.cost import CostBasis
from evenkeel_moe.model.finding import doubts
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.quantities import bytes_text, duration_text
from evenkeel_moe.planning.decision.cycle import (
    CycleInputs,
    WindowSplit,
    change_of,
    decide_target,
    failure_of,
    judge_target,
    plan_target,
    split_window,
)
from evenkeel_moe.planning.decision.replica_levels import (
    LevelInputs,
    LevelPart,
    Redundancy,
    compare_levels,
    extra_replicas,
)
from evenkeel_moe.planning.decision.verdict import Call, Verdict
from evenkeel_moe.planning.policies.registry import find_policy
from evenkeel_moe.planning.problem.objective import PRICE_MARGIN
from evenkeel_moe.planning.schedule.relabel import count_moves


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """The plan one policy would make, as a cycle would judge it."""

    policy: str
    reason: Reason
    """PLAN_STARTED if all gates after planning would open in `auto`; else the gate that closed, or
    the error."""
    copies: int | None = None
    """Copies between ranks; None if it could not plan."""
    nbytes: int | None = None
    """None also if an expert's size is not known."""
    balancedness_expected: float | None = None
    """Mean over layers on the later steps; None without load."""
    verdict: Verdict | None = None
    """None if it could not plan or there were no later steps."""
    detail: str = ""
    """The text of its error."""


def score_shadows(
    inputs: CycleInputs, split: WindowSplit, policies: Sequence[str]
) -> tuple[PolicyScore, ...]:
    """Score policies on the steps that a cycle planned and scored on.

    The error of a policy is reported in its own row.
    """
    return tuple(_score(inputs, split, name) for name in policies)


def _score(inputs: CycleInputs, split: WindowSplit, name: str) -> PolicyScore:
    # The evaluation budget was measured for the cycle's own policy, not for another.
    asked = replace(
        inputs, policy=name, target=None, mode=Mode.AUTO, manual=False, max_evaluations=None
    )
    try:
        target, _ = plan_target(asked, split)
        verdict, judged = judge_target(asked, target, split)
    except Exception as error:  # A policy on trial may fail in any way; the others go on.
        reason, detail = failure_of(error)
        return PolicyScore(name, reason, detail=detail)
    decision = decide_target(asked, target, verdict, split)
    copies = count_moves(inputs.current, target)
    return PolicyScore(
        name,
        decision.reason,
        copies,
        inputs.shape.bytes_of(copies),
        judged.get("balancedness_expected"),
        verdict,
    )


# --- redundancy -----------------------------------------------------------------------------------


def _redundancy(inputs: CycleInputs, split: WindowSplit, free_bytes: int | None) -> Redundancy:
    """Compare numbers of replicas on the steps that the policies were planned and scored on."""
    part = LevelPart(
        inputs.load[split.begin : split.cut], inputs.load[split.cut :], inputs.token_split
    )
    return compare_levels(
        LevelInputs(
            shape=inputs.shape,
            topology=inputs.topology,
            cost=inputs.objective.cost,
            parts=(part,),
            min_steps=max(2, int(inputs.settings.min_held_out_steps)),
            lifetime_steps=inputs.objective.lifetime_steps,
            min_gain=inputs.settings.min_gain,
            free_bytes=free_bytes,
            step_s=inputs.step_s,
            craft=find_policy("craft").read(inputs.policy_options.get("craft", {})),
        )
    )


# --- the recommendation ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Advice to an operator, with the figures it rests on."""

    call: Call
    """The verdict on the deployment's own policy."""
    reason: Reason
    """The reason with which a cycle in `auto` would have ended after planning; INSUFFICIENT_DATA or
    IMPLAUSIBLE_COUNTS if nothing was planned."""
    words: tuple[str, ...]
    """The arithmetic, one sentence each."""
    window_steps: int
    planned_on_steps: int
    scored_on_steps: int
    steps_since_change: int | None
    """None if traffic did not change inside the window, or the window is too short to tell."""
    policies: tuple[PolicyScore, ...] = ()
    """The deployment's own policy first."""
    redundancy: Redundancy | None = None
    """None if there were too few steps."""
    cost_model: CostBasis = CostBasis()
    """What all predicted times rest on."""


def unfit_window(cycle: CycleInputs) -> tuple[Reason, tuple[str, ...]] | None:
    """Return why nothing may be planned on a window, with its sentences; None if it may."""
    steps, least = len(cycle.load), cycle.settings.min_window_steps
    if wrong := doubts(cycle.findings):
        return Reason.IMPLAUSIBLE_COUNTS, (*(each.words for each in wrong), "Nothing was planned.")
    if steps < max(least, 2) or not cycle.load.any():
        routed = "" if cycle.load.any() else ", and no token was routed"
        words = (
            f"The window holds {steps} complete steps, {least:g} are needed{routed}:"
            " nothing was planned."
        )
        return Reason.INSUFFICIENT_DATA, (words,)
    return None


def recommend(cycle: CycleInputs, compare: Sequence[str], free_bytes: int | None) -> Recommendation:
    """Score policies and numbers of replicas on the window, without starting a plan.

    Args:
        cycle: its `policy` is the deployment's own.
        compare: further policies.
        free_bytes: of the rank with least; None if some rank has not reported it.
    """
    steps, least = len(cycle.load), cycle.settings.min_window_steps
    basis = cycle.objective.cost.basis
    change = change_of(cycle)
    since = steps - change.first_step if change.first_step else None
    unfit = unfit_window(cycle)
    if unfit is not None:
        return Recommendation(
            Call.INSUFFICIENT_EVIDENCE, *unfit, steps, 0, 0, since, cost_model=basis
        )
    split = split_window(cycle, change)
    scores = score_shadows(cycle, split, list(dict.fromkeys((cycle.policy, *compare))))
    redundancy = _redundancy(cycle, split, free_bytes)
    own = scores[0]
    planned_on = split.steps_planned_on(cycle.policy_inputs)
    few_steps = (
        f"The plan rests on fewer steps than min_window_steps ({least:g}), a limit for the window."
    )
    return Recommendation(
        call=own.verdict.call if own.verdict is not None else Call.INSUFFICIENT_EVIDENCE,
        reason=own.reason,
        words=(
            (f"Planned on {planned_on} steps, scored on the {steps - split.cut} after them."),
            *([few_steps] if split.cut - split.begin < least else []),
            f"Cost model: {basis.words}.",
            *_plan_words(cycle, own),
            *_replica_words(cycle, redundancy, free_bytes),
        ),
        window_steps=steps,
        planned_on_steps=planned_on,
        scored_on_steps=steps - split.cut,
        steps_since_change=since,
        policies=scores,
        redundancy=redundancy,
        cost_model=basis,
    )


def _plan_words(cycle: CycleInputs, own: PolicyScore) -> list[str]:
    """Return the sentences about the plan of the deployment's own policy."""
    verdict = own.verdict
    if verdict is None or own.copies is None:
        return [f"{own.policy} has no plan: {own.reason}{': ' if own.detail else ''}{own.detail}."]
    if own.copies == 0:
        return [f"{own.policy} would leave every expert where it is."]
    size = "of unknown size"
    if own.nbytes is not None:
        size = (
            f"each of {bytes_text(cycle.shape.bytes_per_expert)}, in all {bytes_text(own.nbytes)}"
        )
    made = f"{own.policy} would make {own.copies} copies between ranks, {size}."
    if math.isnan(verdict.gain_lower):
        few = f"{verdict.steps} of the later steps had load, and at least 2 are needed"
        return [made, f"What it saves is unknown: {few}: {verdict.call}."]
    unit, moe_time = cycle.objective.cost.unit, verdict.cost_model.moe_time
    each = verdict.copy_cost / own.copies
    paid = (
        f"are paid back after {_rounded(verdict.payback_steps)} steps"
        + (f" ({duration_text(verdict.payback_s)})" if verdict.payback_s is not None else "")
        if verdict.saved_per_step > 0
        else "are never paid back"
    )
    calibration = verdict.calibration
    plans = "plan" if calibration.plans == 1 else f"{calibration.plans} plans"
    calibrated = (
        f"The cost model predicts {verdict.gain_modelled:.2%}; what the last measured {plans}"
        f" delivered corrects that by the factor {calibration.factor:.2f}."
    )
    return [
        *([calibrated] if calibration.plans else []),
        made,
        (
            f"It saves {verdict.gain:.2%} of predicted {moe_time}; in the next window the saving is"
            f" from {verdict.gain_lower:.2%} to {verdict.gain_upper:.2%} (94 % interval)."
        ),
        (
            f"{own.copies} copies x {each:.3g} {unit} = {verdict.copy_cost:.4g} {unit} against"
            f" {verdict.saved_per_step:.4g} {unit} saved a step: the copies {paid},"
            f" and cost {_price(verdict.cost)} of the time of {verdict.lifetime_steps} steps."
        ),
        f"{_net_words(verdict.gain, verdict.cost)}: {verdict.call}.",
        *(
            [f"A lower bound above {PRICE_MARGIN:g} times the price of the copies would be needed."]
            if verdict.call is not Call.RECOMMEND and verdict.cost < verdict.gain_lower
            else []
        ),
    ]


def _price(cost: float) -> str:
    """Return the price of copies as a share with two digits; a smaller one is no 0."""
    return f"{cost:.2%}" if round(cost, 4) > 0 or cost <= 0 else "less than 0.01%"


def _net_words(gain: float, cost: float) -> str:
    """Return the net gain as a difference of figures that add up as they are printed."""
    shown, price = round(gain, 4), round(cost, 4)
    if price == 0:
        return f"The price of the copies is below 0.01%, so the net gain is {shown:.2%}"
    return f"Net gain {shown:.2%} - {price:.2%} = {shown - price:.2%}"


def _rounded(steps: float) -> str:
    """Return a number of steps with at most two significant digits."""
    return f"{float(f'{steps:.2g}'):,.4g}" if steps < 10 else f"{float(f'{steps:.2g}'):,.0f}"


def _replica_words(cycle: CycleInputs, redundancy: Redundancy, free_bytes: int | None) -> list[str]:
    """Return the sentences about the number of replicas."""
    present, advised = redundancy.present, redundancy.advised
    if advised == present:
        why = "no other number tried pays, by the lower end of its interval"
        if all(math.isnan(level.gain) for level in redundancy.levels):
            why = "what another number would save is unknown, as no later step had load"
        return [f"{extra_replicas(present, 'per layer')}: {why}."]
    level = next(level for level in redundancy.levels if level.replicas_per_layer == advised)
    kind, least = "more" if advised > present else "fewer", cycle.settings.min_gain
    why = (
        f"No larger number that fits saves {least:.1%} more, by the lower end of its interval."
        if advised > present
        else f"It is the smallest number that costs less than {least:.1%}, by the lower end."
    )
    words = [
        (
            f"{extra_replicas(advised, 'per layer')} instead of {present} would"
            f" {'save' if level.gain >= 0 else 'cost'} {abs(level.gain):.2%} of predicted"
            f" {cycle.objective.cost.basis.moe_time}; the saving is from"
            f" {level.gain_lower:.2%} to {level.gain_upper:.2%}."
        ),
        why,
    ]
    if level.extra_bytes_per_rank is not None:
        shape, difference = cycle.shape, abs(advised - present)
        free = "unknown" if free_bytes is None else bytes_text(free_bytes)
        words.append(
            f"{difference} {kind} x {shape.num_layers} layers / {shape.num_ranks} ranks x"
            f" {bytes_text(shape.bytes_per_expert)} ="
            f" {bytes_text(abs(level.extra_bytes_per_rank))} {kind} on a rank;"
            f" free on the fullest: {free}."
        )
    return words
