"""Who is compared: every policy by name, and the baselines a policy has to beat.

| baseline | what it does |
|---|---|
| initial | experts in order, spread evenly; never moves anything |
| once | EPLB on the first window, then never again |
| ewma | EPLB at every replan, on a mean of the whole past in which old steps fade |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.craft.policy import CraftOptions, factor_by_memory, plan_craft
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.policies.registry import FORMS, POLICIES
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Policy, Proposal
from evenkeel_moe.replay.verdict import behind_verdict
from evenkeel_moe.replay.walk import Planner, Replan, Setup

__all__ = ["BASELINES", "VERDICT", "choose_planners", "craft_within", "faded_mean", "warm_up"]

EWMA_HALF_LIFE_WINDOWS = 0.125
"""Windows after which a step counts half in `ewma`: the strongest of 1/16..1 on recorded traffic that changes, within
0.5 % of the best on traffic that does not."""


def _initial(replan: Replan) -> Proposal | None:
    return None


def _once(replan: Replan) -> Proposal | None:
    return plan_eplb(replan.problem) if replan.index == 0 else None


def _ewma(replan: Replan) -> Proposal | None:
    half_life = EWMA_HALF_LIFE_WINDOWS * replan.setup.window_steps
    return plan_eplb(replace(replan.problem, load=faded_mean(replan.history, half_life)[None]))


def faded_mean(history: NDArray[np.float64], half_life_steps: float) -> NDArray[np.float64]:
    """(T, L, E) -> (L, E) [tokens]: the mean over steps, a step weighing half as much each half life earlier."""
    age = np.arange(len(history) - 1, -1, -1, dtype=np.float64)
    weights = 0.5 ** (age / half_life_steps)
    return np.asarray(np.tensordot(weights / weights.sum(), history, axes=1), np.float64)


BASELINES: Mapping[str, Planner] = {"initial": _initial, "once": _once, "ewma": _ewma}


def _of_policy(policy: Policy) -> Planner:
    return lambda replan: policy(replan.problem)


def craft_within(options: CraftOptions, free_bytes_per_rank: int | None = None) -> Policy:
    """CRAFT with its choice of replicas.

    Args:
        options: the rule that chooses.
        free_bytes_per_rank: memory of a rank for replicas, over all layers; None leaves what the slots hold.
    """

    def plan(problem: PlacementProblem) -> Proposal:
        shape = problem.shape
        if free_bytes_per_rank is not None:
            held = shape.pool_slots_per_rank or shape.slots_per_rank * shape.num_layers
            one_each = -(-shape.num_logical_experts * shape.num_layers // shape.num_ranks)
            fits = one_each + factor_by_memory(free_bytes_per_rank, shape.bytes_per_expert)
            problem = replace(problem, shape=replace(shape, pool_slots_per_rank=min(held, fits)))
        return plan_craft(problem, options)

    return plan


VERDICT = "+verdict"
"""Suffix of a policy that acts only where later steps say that it pays."""


def choose_planners(
    names: Sequence[str], *, baselines: bool = True, policies: Mapping[str, Policy] = POLICIES
) -> dict[str, Planner]:
    """Planners by name, in the order asked for, baselines first.

    A name may end in `+verdict`: the same policy, its plans adopted only if held-out steps agree.

    Raises:
        InvalidInput: a name nobody has, or one given twice.
    """
    wanted = [*(name for name in BASELINES if baselines and name not in names), *names]
    if not wanted:
        raise InvalidInput("no policies to compare: name some, or keep the baselines")
    twice = sorted({name for name in wanted if wanted.count(name) > 1})
    planners = {name: _planner(name, policies) for name in wanted}
    unknown = [name for name, planner in planners.items() if planner is None]
    if twice:
        raise InvalidInput(f"policies named twice: {', '.join(twice)}")
    if unknown:
        known = ", ".join([*BASELINES, *sorted({*policies, *FORMS})])
        raise InvalidInput(
            f"unknown policies {', '.join(unknown)}; known: {known}; any of them with {VERDICT}",
            Reason.UNKNOWN_POLICY,
        )
    return {name: planner for name, planner in planners.items() if planner is not None}


def _planner(name: str, policies: Mapping[str, Policy]) -> Planner | None:
    if name.endswith(VERDICT):
        inner = _planner(name.removesuffix(VERDICT), policies)
        return None if inner is None or name.count(VERDICT) > 1 else behind_verdict(inner)
    if name in BASELINES:
        return BASELINES[name]
    policy = policies.get(name) or FORMS.get(name)
    return None if policy is None else _of_policy(policy)


def warm_up(
    planners: Mapping[str, Planner], setup: Setup, on_policy: Callable[[str], None]
) -> None:
    """Let every planner plan two steps once, untimed: kernels compile or load at their first call."""
    for name, planner in planners.items():
        on_policy(name)
        last = min(setup.window_steps, 2)
        for current in (None, _current(setup)):
            problem = replace(setup.problem(0, last, current), max_evaluations=200)
            planner(Replan(0, last, problem, setup.load[:last], setup))


def _current(setup: Setup) -> Placement:
    return Placement.initial(setup.shape)
