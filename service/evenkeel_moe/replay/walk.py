"""Walks a policy over a trace: plan on the past window, score on the steps that follow, repeat.

A placement is never scored on a step it was planned on. Each plan starts from the placement that
the previous one left: policies see it as the current placement, and copies are counted from it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import EvenkeelError, InvalidInput
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import count_moves, relabel_proposal

MIN_REPLANS = 4
"""With fewer, the first plan (from the initial placement) would dominate the result."""


@dataclass(frozen=True, eq=False, slots=True)
class Setup:
    """A recorded load and the fleet on which it is replayed."""

    load: NDArray[np.float64]
    """(T, L, E) [tokens]."""
    shape: ModelShape
    topology: Topology
    window_steps: int
    """Steps a policy sees at each replan."""
    horizon_steps: int
    """Steps a plan is scored on, and the distance between replans."""
    source: NDArray[np.float64] | None = None
    """(T, R, L, E) [tokens] by source rank; None if not recorded for this number of ranks."""
    objective: Objective = Objective()
    """Without `copy_cost`, which `copy_price` sets at each replan."""
    copy_price: float = 0.0
    """The time one copy must save per step, as a share of the time of a perfectly split layer.
    keel's own price, which depends on the slots of a rank and their tokens, is used if higher."""
    max_evaluations: int | None = None
    seed: int = 0

    def problem(self, first: int, last: int, current: Placement | None) -> PlacementProblem:
        """Return the problem for a policy that plans on the steps first..last-1 of the trace."""
        load = self.load[first:last]
        copy_cost = 0.0
        if self.copy_price:
            fluid = moe_time.fluid_times(load, self.shape.num_ranks, self.objective.cost)
            copy_cost = self.copy_price * float(fluid.mean()) * self.objective.lifetime_steps
        return PlacementProblem(
            load=load,
            shape=self.shape,
            topology=self.topology,
            current=current,
            source_load=self.split(first, last).source_load,
            objective=replace(self.objective, copy_cost=copy_cost),
            max_evaluations=self.max_evaluations,
            seed=self.seed,
        )

    def split(self, first: int, last: int) -> SplitModel:
        """Return the model that splits the tokens of the steps first..last-1 over replicas."""
        source = None if self.source is None else self.source[first:last].sum(axis=0)
        return SplitModel(self.objective.dispatch, self.topology, source)


@dataclass(frozen=True, eq=False, slots=True)
class Replan:
    """The input of a planner, which looks at nothing from `step` on."""

    index: int
    """0 for the first plan."""
    step: int
    """First step on which the plan will be scored."""
    problem: PlacementProblem
    """The window before `step`, and the current placement."""
    setup: Setup

    @property
    def history(self) -> NDArray[np.float64]:
        """(step, L, E) [tokens] - all load before `step`."""
        return self.setup.load[: self.step]


Planner = Callable[[Replan], Proposal | None]
"""A policy as the walk calls it; the answer None keeps the current placement."""


@dataclass(frozen=True, eq=False, slots=True)
class Walk:
    """The course of one policy over a trace with n replans."""

    policy: str
    steps: NDArray[np.int64]
    """(n,) first step on which each plan was scored."""
    placements: tuple[Placement, ...]
    """(n,) placements from each of those steps on, after relabelling."""
    copies_raw: NDArray[np.int64]
    """(n,) copies between ranks of the proposals as they are, without relabelling."""
    copies: NDArray[np.int64]
    """(n,) copies between ranks after relabelling, the first from the initial placement."""
    plan_s: NDArray[np.float64]
    """(n,) seconds of planning, without relabelling."""
    rank_load: NDArray[np.float64]
    """(n * horizon, L, R) [tokens] on the scored steps."""
    times: NDArray[np.float64]
    """(n * horizon, L) predicted time of each step and layer [s], [tokens] without cost curves."""
    fluid: NDArray[np.float64]
    """(n * horizon, L) the same if tokens could be split freely."""


def replan_steps(num_steps: int, window_steps: int, horizon_steps: int) -> NDArray[np.int64]:
    """Return the (n,) steps at which new plans take effect; only whole horizons count.

    Raises:
        InvalidInput: fewer than `MIN_REPLANS` fit.
    """
    count = max(0, (num_steps - window_steps) // horizon_steps)
    if count < MIN_REPLANS:
        raise InvalidInput(
            f"{num_steps} steps allow {count} replans: ({num_steps} - window {window_steps}) // "
            f"horizon {horizon_steps} = {count}, at least {MIN_REPLANS} are needed; "
            "record more steps, or shorten the window or the horizon"
        )
    return window_steps + horizon_steps * np.arange(count, dtype=np.int64)


def walk_forward(
    name: str, planner: Planner, setup: Setup, *, on_replan: Callable[[], None] = lambda: None
) -> Walk:
    """Walk one policy over the trace, starting from the initial placement.

    Args:
        name: name of the policy.
        planner: called once per horizon.
        setup: trace and fleet.
        on_replan: called after each replan.

    Raises:
        InvalidInput: too few steps for `MIN_REPLANS` replans.
        EvenkeelError: the policy failed or broke an invariant; the message names it and the step.
    """
    steps = replan_steps(len(setup.load), setup.window_steps, setup.horizon_steps)
    current, cost = Placement.initial(setup.shape), setup.objective.cost
    placements: list[Placement] = []
    copies = np.zeros((2, len(steps)), np.int64)
    plan_s = np.zeros(len(steps))
    loads: list[NDArray[np.float64]] = []
    times: list[NDArray[np.float64]] = []
    for index, step in enumerate(steps.tolist()):
        problem = setup.problem(step - setup.window_steps, step, current)
        try:
            begun = time.perf_counter()
            proposal = planner(Replan(index, step, problem, setup))
            plan_s[index] = time.perf_counter() - begun
            if proposal is not None:
                target = relabel_proposal(problem, proposal)
                copies[:, index] = (
                    count_moves(current, proposal.placement),
                    count_moves(current, target),
                )
                current = target
        except EvenkeelError as error:
            raise type(error)(f"policy {name} at step {step}: {error}", error.reason) from error
        placements.append(current)
        last = step + setup.horizon_steps
        load, split = setup.load[step:last], setup.split(step, last)
        loads.append(metrics.rank_load(load, current, split))
        times.append(moe_time.step_times(load, current, cost, split))
        on_replan()
    return Walk(
        policy=name,
        steps=steps,
        placements=tuple(placements),
        copies_raw=copies[0],
        copies=copies[1],
        plan_s=plan_s,
        rank_load=np.concatenate(loads),
        times=np.concatenate(times),
        fluid=moe_time.fluid_times(setup.load[steps[0] : last], setup.shape.num_ranks, cost),
    )
