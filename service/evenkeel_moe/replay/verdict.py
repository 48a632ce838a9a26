"""Wraps a policy in the gates that follow planning: only plans that pay on later steps are adopted.

As in a controller, the policy plans on older steps and the newest steps decide. The plan that is
adopted is the plan that was scored.
"""

from dataclasses import replace

from evenkeel_moe.model.policy import Mode
from evenkeel_moe.planning.decision.gates import AfterInputs, GateSettings, decide_after
from evenkeel_moe.planning.decision.verdict import VerdictRules, held_out_steps, judge
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import Proposal
from evenkeel_moe.planning.schedule.relabel import price_of_moves
from evenkeel_moe.replay.walk import Planner, Replan, relabelled

LIFETIME_STEPS = 1000
"""Steps over which the cost of a copy is spread, as in the controller: cost / price per step."""


def with_verdict(planner: Planner) -> Planner:
    """Return a planner that adopts plans of `planner` only if they pass the gates after planning.

    The number of held-out steps is that of the controller. The policy plans on as many steps before
    them as it would see without a verdict; at the first plan there are fewer. It plans with the
    source ranks of the steps it plans on; its plan is scored with those of the held-out steps.
    Thresholds are the controller's defaults. A short window decides on fewer steps, which must be
    as certain as in a controller after a change of traffic (`VerdictRules.few_steps`).
    """
    settings = GateSettings()

    def plan(replan: Replan) -> Proposal | None:
        problem = replan.problem
        current = problem.current
        held_out = held_out_steps(len(problem.load), int(settings.min_held_out_steps))
        if current is None or held_out == 0:
            return None
        step = replan.step - held_out
        older = replan.setup.problem(max(0, step - len(problem.load)), step, current)
        part = replace(
            problem, load=older.load, source_load=older.source_load, objective=older.objective
        )
        proposal = planner(replace(replan, step=step, problem=part, history=replan.history[:step]))
        if proposal is None:
            return None
        target = relabelled(problem, proposal)
        objective = problem.objective
        price = price_of_moves(current, target, problem.topology, objective.cross_node_factor)
        scored, split = problem.load[-held_out:], replan.setup.split(step, replan.step)
        old = moe_time.step_times(scored, current, objective.cost, split).sum(axis=1)
        new = moe_time.step_times(scored, target, objective.cost, split).sum(axis=1)
        min_steps = min(settings.min_held_out_steps, held_out)
        decision = decide_after(
            AfterInputs(
                mode=Mode.AUTO,
                shape=problem.shape,
                base=current,
                target=target,
                verdict=judge(
                    old,
                    new,
                    copy_cost=objective.cost_per_move * LIFETIME_STEPS * float(price.sum()),
                    lifetime_steps=LIFETIME_STEPS,
                    cost_model=objective.cost.basis,
                    rules=VerdictRules(
                        min_steps=max(2, int(min_steps)),
                        few_steps=int(settings.min_held_out_steps),
                    ),
                    seed=problem.seed,
                ),
                objective=objective,
            ),
            replace(settings, min_held_out_steps=min_steps),
        )
        return replace(proposal, placement=target) if decision.passed else None

    return plan
