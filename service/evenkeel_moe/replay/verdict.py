"""Wraps a policy in the gates that follow planning: only plans that pay on later steps are adopted.

As in a controller, the policy plans on older steps and the newest steps decide, by the judgement of
a cycle. The plan that is adopted is the plan that was scored.
"""

import math
from dataclasses import replace

from evenkeel_moe.model.policy import Mode
from evenkeel_moe.planning.decision.cycle import (
    CycleInputs,
    WindowSplit,
    decide_target,
    judge_target,
)
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.decision.verdict import held_out_steps
from evenkeel_moe.planning.problem.placement_problem import Proposal
from evenkeel_moe.planning.schedule.relabel import relabel_proposal
from evenkeel_moe.planning.signals.change_detection import Change
from evenkeel_moe.replay.walk import Planner, Replan


def with_verdict(planner: Planner) -> Planner:
    """Return a planner that adopts plans of `planner` only if they pass the gates after planning.

    The number of held-out steps is that of the controller. The policy plans on as many steps before
    them as it would see without a verdict; at the first plan there are fewer. It plans with the
    source ranks of the steps it plans on; its plan is scored with those of the held-out steps.
    Thresholds are the controller's defaults. A short window decides on fewer steps, which must be
    as certain as in a controller after a change of traffic (`WindowSplit.least`).
    """
    settings = GateSettings()
    least = int(settings.min_held_out_steps)

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
        inputs = CycleInputs(
            load=problem.load,
            shape=problem.shape,
            topology=problem.topology,
            current=current,
            policy="",  # It has planned already; the judgement does not look at it.
            settings=settings,
            staging_bytes=(),
            now_unix=0.0,
            mode=Mode.AUTO,
            ranks_fresh=problem.shape.num_ranks,
            newest_step_age_s=0.0,
            objective=problem.objective,
            source_load=setup.split(cut, replan.step).source_load,
            seed=problem.seed,
        )
        split = WindowSplit(0, window - held_out, Change(0, math.nan), min(least, held_out))
        verdict, _ = judge_target(inputs, target, split)
        adopted = decide_target(inputs, target, verdict, split).passed
        return replace(proposal, placement=target) if adopted else None

    return plan
