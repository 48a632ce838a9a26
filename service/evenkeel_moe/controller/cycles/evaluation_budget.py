"""How many candidates a policy may look at: the planner's seconds, turned into evaluations at the rate it was seen to make."""

import time

from evenkeel_moe.adapters.processes.planner_pool import DeadlineMissed, PlannerPool
from evenkeel_moe.planning.decision.cycle import CycleInputs, CycleResult, run_cycle

__all__ = ["Effort"]

_SHARE = 0.25
"""Of the deadline: the planner may be shared, and a plan is more than its search."""
_WORTH_MEASURING_S = 0.05
"""Shorter cycles are no search that could miss a deadline, and tell no rate."""
_AFTER_A_MISS = 4
_FIRST_AFTER_A_MISS = 1_000_000
"""Evaluations where a policy missed its deadline before its rate was known."""


class Effort:
    """What each policy may evaluate in one cycle of one deployment.

    A plan records what it used; the same number replays it on a machine of any speed.

    Args:
        deadline_s: after which a cycle is given up.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._most: dict[str, int] = {}

    def most(self, policy: str) -> int | None:
        """Evaluations the policy may make, beside its own bound; None while no rate is known."""
        return self._most.get(policy)

    async def run(self, planner: PlannerPool, inputs: CycleInputs) -> CycleResult:
        """A cycle in the planner, and what it teaches.

        Raises:
            DeadlineMissed: the next cycle may evaluate less.
            Unavailable: the planner failed.
        """
        try:
            result, seconds = await planner.run(_timed, inputs)
        except DeadlineMissed:
            before = self._most.get(inputs.policy)
            less = _FIRST_AFTER_A_MISS if before is None else max(1, before // _AFTER_A_MISS)
            self._most[inputs.policy] = less
            raise
        used = result.numbers.get("evaluations", 0.0)
        if used > 0 and seconds >= _WORTH_MEASURING_S:
            self._most[inputs.policy] = max(1, int(used / seconds * _SHARE * self._deadline_s))
        return result


def _timed(inputs: CycleInputs) -> tuple[CycleResult, float]:
    """The cycle and its seconds, in the planner's process: to wait for a free one is no part of its rate."""
    began = time.perf_counter()
    return run_cycle(inputs), time.perf_counter() - began
