"""Runs the controller's decisions over a recorded load, step by step: gates, plan, verdict, gates.

Every cycle sees what a controller would see at that step, and no later step. A plan that passes
takes effect a few steps after its cycle, as copies take time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.cycle import CycleInputs, change_of, run_cycle, split_window
from evenkeel_moe.planning.decision.gates import GateMemory, GateSettings
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.schedule.relabel import count_moves, relabel_proposal
from evenkeel_moe.replay.planners import EWMA_HALF_LIFE_WINDOWS, decayed_mean

EWMA = "ewma"
"""The baseline of `replay` behind the same gates: EPLB on a fading mean of the whole past."""
EWMA_WINDOW_STEPS = 100
"""The window whose eighth is its half-life."""
OBJECTIVE = Objective(copy_cost=200.0, lifetime_steps=1000)
"""The controller's defaults."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of the engine in steps of the controller, and the controller's settings."""

    step_s: float
    """Seconds from one step to the next."""
    cycle_steps: int
    """Steps from one cycle to the next."""
    delay_steps: int
    """Steps from a cycle to the step on which its plan takes effect."""
    window_steps: int = 256
    recent_steps: int = 32
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Gate settings besides the controller's defaults."""


@dataclass(frozen=True, eq=False, slots=True)
class Course:
    """The placements and times of one policy over a load of T steps."""

    steps: tuple[int, ...]
    """(n,) first step on which each placement was in force; the first is 0."""
    placements: tuple[Placement, ...]
    """(n,) the first is the engine's initial placement."""
    copies: tuple[int, ...]
    """(n,) experts copied between ranks to reach each placement; the first is 0."""
    times: NDArray[np.float64]
    """(T,) [tokens] predicted MoE time of each step, all layers."""
    reasons: tuple[tuple[int, str], ...]
    """(step, reason) of every cycle."""

    def in_force(self, step: int) -> Placement:
        """Return the placement in force at a step."""
        return self.placements[int(np.searchsorted(self.steps, step, side="right")) - 1]


def run_loop(load: NDArray[np.float64], shape: ModelShape, policy: str, pace: Pace) -> Course:
    """Run the controller's decisions with one policy over a load.

    Args:
        load: (T, L, E) [tokens].
        shape: the fleet.
        policy: a policy's name, or `EWMA`.
        pace: of the engine and the controller.
    """
    settings = GateSettings.from_thresholds(pace.thresholds)
    counts = load.astype(np.uint32)
    steps, placements, copies = [0], [Placement.initial(shape)], [0]
    memory, reasons = GateMemory(), []
    ended: float | None = None
    for now in range(pace.cycle_steps, len(load), pace.cycle_steps):
        if now < steps[-1]:
            continue  # A plan is in progress.
        current = placements[-1]
        inputs = CycleInputs(
            load=counts[max(0, now - pace.window_steps) : now],
            shape=shape,
            topology=Topology.single_node(shape.num_ranks),
            current=current,
            policy="eplb" if policy == EWMA else policy,
            settings=settings,
            staging_bytes=(1 << 30,) * shape.num_ranks,
            now_unix=now * pace.step_s,
            mode=Mode.AUTO,
            ranks_fresh=shape.num_ranks,
            newest_step_age_s=0.0,
            memory=memory,
            last_plan_ended_unix=ended,
            steps_since_move=None if len(steps) == 1 else now - steps[-1],
            objective=OBJECTIVE,
            recent_steps=pace.recent_steps,
            step_s=pace.step_s,
        )
        result = run_cycle(inputs if policy != EWMA else _with_ewma(inputs, load[:now]))
        memory = result.memory
        reasons.append((now, str(result.reason)))
        if not result.passed or result.target is None:
            continue
        first = now + pace.delay_steps
        if first >= len(load):
            break
        steps.append(first)
        placements.append(result.target)
        copies.append(count_moves(current, result.target))
        ended = first * pace.step_s
    edges = [*steps, len(load)]
    times = np.concatenate(
        [
            moe_time.step_times(load[first:last], placement).sum(axis=1)
            for placement, first, last in zip(placements, edges[:-1], edges[1:], strict=True)
        ]
    )
    return Course(tuple(steps), tuple(placements), tuple(copies), times, tuple(reasons))


def _with_ewma(inputs: CycleInputs, history: NDArray[np.float64]) -> CycleInputs:
    """Return the inputs with the plan of `EWMA`, made without the steps that the verdict judges on.

    Args:
        inputs: of the cycle.
        history: (T, L, E) [tokens] all steps so far.
    """
    split = split_window(inputs, change_of(inputs))
    known = history[: len(history) - (len(inputs.load) - split.cut)]
    mean = decayed_mean(known, EWMA_HALF_LIFE_WINDOWS * EWMA_WINDOW_STEPS)
    problem = PlacementProblem(
        load=mean[None], shape=inputs.shape, topology=inputs.topology, current=inputs.current
    )
    return replace(inputs, target=relabel_proposal(problem, plan_eplb(problem)))
