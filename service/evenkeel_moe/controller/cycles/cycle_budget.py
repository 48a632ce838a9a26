"""Limits the candidates a policy may evaluate, so that a cycle meets the planner's deadline."""

import time
from collections.abc import Callable

from evenkeel_moe.adapters.processes.planner_pool import DeadlineMissed, PlannerPool
from evenkeel_moe.planning.decision.cycle import CycleInputs, CycleResult, run_cycle

_SHARE = 0.25
"""Share of the deadline for the search: the planner may be shared, and a plan is more than that."""
_MIN_MEASURED_S = 0.05
"""Shorter cycles tell no rate, and cannot miss a deadline."""
_AFTER_A_MISS = 4
"""Divides the budget after a missed deadline."""
_FIRST_AFTER_A_MISS = 1_000_000
"""Budget of a policy that missed its deadline before its rate was known."""


class CycleBudget:
    """The evaluations each policy may make in one cycle of one deployment.

    The planner's seconds become a number of evaluations at the measured rate of the policy. A plan
    records the number it used, and the same number replays it on a machine of any speed.

    Args:
        deadline_s: seconds after which a cycle is given up.
        timed: told the seconds that the planner took for each cycle that it finished.
    """

    def __init__(self, deadline_s: float, timed: Callable[[float], object]) -> None:
        self._deadline_s = deadline_s
        self._timed = timed
        self._limits: dict[str, int] = {}
        self._missed = False
        """The newest cycle missed the deadline."""

    def limit(self, policy: str) -> int | None:
        """Return the evaluations a policy may make; None while its rate is not known."""
        return self._limits.get(policy)

    async def run(self, planner: PlannerPool, inputs: CycleInputs) -> CycleResult:
        """Run a cycle in the planner, and adjust the budget to it.

        After a missed deadline, cycles run in the background process until one of them is in time:
        a deployment that is too large for the deadline keeps the process of the others once.

        Raises:
            DeadlineMissed: the cycle took too long; the next one may evaluate less.
            Unavailable: the planner failed.
        """
        try:
            process = planner.background if self._missed else planner
            result, seconds = await process.run(_timed, inputs)
        except DeadlineMissed:
            self._missed = True
            before = self._limits.get(inputs.policy)
            less = _FIRST_AFTER_A_MISS if before is None else max(1, before // _AFTER_A_MISS)
            self._limits[inputs.policy] = less
            raise
        self._missed = False
        self._timed(seconds)
        used = result.numbers.get("evaluations")
        if used is not None:  # Else no policy planned.
            self._adjust(inputs.policy, used, seconds)
        return result

    def _adjust(self, policy: str, used: float, seconds: float) -> None:
        """Set the limit of a policy by a cycle in time, or drop it if the cycle tells no rate."""
        before, share_s = self._limits.pop(policy, 0), _SHARE * self._deadline_s
        if used > 0 and seconds >= _MIN_MEASURED_S:
            limit = max(1, int(used / seconds * share_s))
            # The seconds hold more than the search: after a short search the rate is too low.
            self._limits[policy] = limit if seconds > share_s else max(limit, before)


def _timed(inputs: CycleInputs) -> tuple[CycleResult, float]:
    """Run a cycle and time it in the planner's process: the wait for a free process is left out."""
    began = time.perf_counter()
    return run_cycle(inputs), time.perf_counter() - began
