"""A policy behind the gates of gain, as a controller would run it: what does not pay on later steps is not done.

The newest steps decide, the policy plans on those before them. What is adopted is the plan that was scored.
"""

from dataclasses import replace

from evenkeel_moe.model.policy import Mode
from evenkeel_moe.planning.decision.gates import AfterInputs, GateSettings, decide_after
from evenkeel_moe.planning.decision.verdict import VerdictRules, held_out_steps, judge
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.placement_problem import Proposal
from evenkeel_moe.planning.schedule.relabel import count_moves, relabel
from evenkeel_moe.replay.walk import Planner, Replan

__all__ = ["behind_verdict"]

LIFETIME_STEPS = 1000
"""Steps a copy's price is spread over, as in the controller: price per step times this is what it costs once."""


def behind_verdict(planner: Planner) -> Planner:
    """The planner, with its answer adopted only if it passes the gates that follow planning.

    As many of the newest steps decide as in the controller. The policy plans on as many steps before them as it would
    see alone; at the first plan there are fewer. What it is told by source rank is of the steps it plans on, and scored
    is by the origins of the steps that decide. Thresholds are the controller's defaults, except that a short window may
    decide on fewer steps.
    """
    settings = GateSettings()

    def plan(replan: Replan) -> Proposal | None:
        problem = replan.problem
        current = problem.current
        later = held_out_steps(len(problem.load), int(settings.min_held_out_steps))
        if current is None or later == 0:
            return None
        step = replan.step - later
        older = replan.setup.problem(max(0, step - len(problem.load)), step, current)
        part = replace(
            problem,
            load=older.load,
            source_load=older.source_load,
            objective=older.objective,
        )
        proposal = planner(replace(replan, step=step, problem=part, history=replan.history[:step]))
        if proposal is None:
            return None
        keep_nodes = bool(proposal.numbers.get("keep_nodes", 0.0))
        target = relabel(problem, proposal.placement, keep_nodes=keep_nodes)
        scored, split = problem.load[-later:], replan.setup.split(step, replan.step)
        old = metrics.step_times(scored, current, problem.objective.costs, split).sum(axis=1)
        new = metrics.step_times(scored, target, problem.objective.costs, split).sum(axis=1)
        least = min(settings.min_held_out_steps, later)
        decision = decide_after(
            AfterInputs(
                mode=Mode.AUTO,
                shape=problem.shape,
                base=current,
                target=target,
                verdict=judge(
                    old,
                    new,
                    copy_cost=problem.objective.cost_per_move
                    * LIFETIME_STEPS
                    * count_moves(current, target),
                    lifetime_steps=LIFETIME_STEPS,
                    rules=VerdictRules(min_steps=max(2, int(least))),
                    seed=problem.seed,
                ),
                limits=problem.objective.limits,
                allow_duplicates=problem.objective.allow_duplicates,
            ),
            replace(settings, min_held_out_steps=least),
        )
        return replace(proposal, placement=target) if decision.passed else None

    return plan
