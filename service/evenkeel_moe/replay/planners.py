"""Chooses what is compared: policies by name, and the baselines they have to beat.

| baseline | what it does |
|---|---|
| initial | experts in order, spread evenly; never moves anything |
| once | EPLB on the first window, then never again |
| ewma | EPLB at every replan, on the exponentially weighted mean of the whole past |

Each may be wrapped in the gates that follow planning, so that only plans that pay on later steps
are adopted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.planning.decision.cycle import (
    CycleInputs,
    WindowSplit,
    decide_target,
    judge_target,
)
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.decision.verdict import held_out_steps
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.policies.registry import known_policies
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Policy, Proposal
from evenkeel_moe.planning.schedule.relabel import relabel_proposal
from evenkeel_moe.planning.signals.change_detection import Change
from evenkeel_moe.replay.walk import Planner, Replan, Setup

EWMA_HALF_LIFE_WINDOWS = 0.125
"""Half-life of a step's weight in `ewma`, in windows. Of 1/16..1 it is the best on recorded traffic
that changes, and within 0.5 % of the best on traffic that does not."""


def _initial(replan: Replan) -> Proposal | None:
    return None


def _once(replan: Replan) -> Proposal | None:
    return plan_eplb(replan.problem) if replan.index == 0 else None


def _ewma(replan: Replan) -> Proposal | None:
    half_life = EWMA_HALF_LIFE_WINDOWS * replan.setup.window_steps
    return plan_eplb(replace(replan.problem, load=decayed_mean(replan.history, half_life)[None]))


def decayed_mean(history: NDArray[np.float64], half_life_steps: float) -> NDArray[np.float64]:
    """Return the (L, E) mean [tokens] of a (T, L, E) history; weights halve with each half-life."""
    age = np.arange(len(history) - 1, -1, -1, dtype=np.float64)
    weights = 0.5 ** (age / half_life_steps)
    return np.asarray(np.tensordot(weights / weights.sum(), history, axes=1), np.float64)


BASELINES: Mapping[str, Planner] = {"initial": _initial, "once": _once, "ewma": _ewma}


def _of_policy(policy: Policy) -> Planner:
    return lambda replan: policy(replan.problem)


VERDICT = "+verdict"
"""Suffix of a policy whose plans are adopted only if held-out steps show that they pay."""


def choose_planners(
    names: Sequence[str], *, baselines: bool = True, policies: Mapping[str, Policy] | None = None
) -> dict[str, Planner]:
    """Return planners by name: first the baselines, then `names` in their order.

    A name that ends in `+verdict` is the same policy wrapped by `with_verdict`.

    Args:
        policies: to choose from; None for all that are known.

    Raises:
        InvalidInput: a name is unknown or given twice, or there is nothing to compare.
    """
    policies = known_policies() if policies is None else policies
    wanted = [*(name for name in BASELINES if baselines and name not in names), *names]
    if not wanted:
        raise InvalidInput("no policies to compare: name at least one, or keep the baselines")
    twice = sorted({name for name in wanted if wanted.count(name) > 1})
    planners = {name: _planner(name, policies) for name in wanted}
    unknown = [name for name, planner in planners.items() if planner is None]
    if twice:
        raise InvalidInput(f"policies named twice: {', '.join(twice)}")
    if unknown:
        known = ", ".join([*BASELINES, *sorted(policies)])
        raise InvalidInput(
            f"unknown policies {', '.join(unknown)}; known: {known}",
            Reason.UNKNOWN_POLICY,
        )
    return {name: planner for name, planner in planners.items() if planner is not None}


def _planner(name: str, policies: Mapping[str, Policy]) -> Planner | None:
    if name.endswith(VERDICT):
        inner = _planner(name.removesuffix(VERDICT), policies)
        return None if inner is None or name.count(VERDICT) > 1 else with_verdict(inner)
    if name in BASELINES:
        return BASELINES[name]
    policy = policies.get(name)
    return None if policy is None else _of_policy(policy)


def warm_up(
    planners: Mapping[str, Planner], setup: Setup, on_policy: Callable[[str], None]
) -> None:
    """Call every planner once on two steps, because kernels compile or load at their first call."""
    last = min(setup.window_steps, 2)
    setup = replace(setup, max_evaluations=200)
    for name, planner in planners.items():
        on_policy(name)
        for current in (None, Placement.initial(setup.shape)):
            planner(Replan(0, last, setup.problem(0, last, current), setup))


def cycle_inputs(
    problem: PlacementProblem,
    current: Placement,
    policy: str,
    source_load: NDArray[np.float64] | None = None,
) -> CycleInputs:
    """Return the inputs of a cycle in `auto`, with default thresholds, whose ranks all live."""
    return CycleInputs(
        load=problem.load,
        shape=problem.shape,
        topology=problem.topology,
        current=current,
        policy=policy,
        settings=GateSettings(),
        staging_bytes=(),
        now_unix=0.0,
        mode=Mode.AUTO,
        ranks_fresh=problem.shape.num_ranks,
        newest_step_age_s=0.0,
        objective=problem.objective,
        max_evaluations=problem.max_evaluations,
        source_load=source_load,
        seed=problem.seed,
    )


def with_verdict(planner: Planner) -> Planner:
    """Return a planner that adopts plans of `planner` only if they pass the gates after planning.

    As in a controller, the policy plans on older steps and the newest steps decide, by the
    judgement of a cycle. The plan that is adopted is the plan that was scored.

    The number of held-out steps is that of the controller. The policy plans on as many steps before
    them as it would see without a verdict; at the first plan there are fewer. It plans with the
    source ranks of the steps it plans on; its plan is scored with those of the held-out steps.
    Thresholds are the controller's defaults. A short window decides on fewer steps, which must be
    as certain as in a controller after a change of traffic (`WindowSplit.least`).
    """
    least = int(GateSettings().min_held_out_steps)

    def plan(replan: Replan) -> Proposal | None:
        problem, setup, window = replan.problem, replan.setup, len(replan.problem.load)
        current, held_out = problem.current, held_out_steps(window, least)
        if current is None or held_out == 0:
            return None
        cut = replan.step - held_out
        older = setup.problem(max(0, cut - window), cut, current)
        proposal = planner(replace(replan, step=cut, problem=older))
        if proposal is None:
            return None
        target = relabel_proposal(problem, proposal)
        # The policy has planned already; the judgement does not look at it.
        inputs = cycle_inputs(problem, current, "", setup.split(cut, replan.step).source_load)
        split = WindowSplit(0, window - held_out, Change(0, math.nan), min(least, held_out))
        verdict, _ = judge_target(inputs, target, split)
        adopted = decide_target(inputs, target, verdict, split).passed
        return replace(proposal, placement=target) if adopted else None

    return plan
