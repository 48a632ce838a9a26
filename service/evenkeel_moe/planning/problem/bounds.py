"""Lower bounds on the predicted MoE time of any placement."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.cost import TOKENS, CostModel
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.layer_threads import map_layers
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

_ROUNDING = 1e-12
"""Relative rounding error between sums taken in different orders."""
_MOST_GUESSES = 12
"""Enough to find the level up to a few copies even by halving."""
_FEW_COPIES = 2
"""So many are made one by one."""
_FEW_SLOTS = 64
"""Below it, finding the level takes as long as making the copies one by one."""


@kernel
def _copies_below(
    hot: NDArray[np.float64], copies: NDArray[np.float64], num_redundant: int, mean: float
) -> int:
    """Give experts the copies that bring all of them to a level which so many slots surely reach.

    Whoever always copies the hottest one first comes through this state: until then, only experts
    above the level get copies. That way alone takes as many searches as there are slots.

    Args:
        hot: (N,) loads of experts.
        copies: (N,) written.
        num_redundant: the further copies that may be made.
        mean: the lowest level of interest.

    Returns:
        The further copies that these are, at most `num_redundant`.
    """
    if num_redundant < _FEW_SLOTS or hot.shape[0] == 0:
        return 0
    total = hot.sum()
    # A level is sought by its inverse. n further copies can reach n over the sum: whole numbers
    # round up by less than 1 an expert. Rounded up by half a copy on average, they reach `guess`.
    reached = min(num_redundant / total, 1.0 / mean)
    missed = min((num_redundant + hot.shape[0]) / total, 1.0 / mean)
    guess = min((num_redundant + 0.5 * hot.shape[0]) / total, missed)
    for _ in range(_MOST_GUESSES):
        needed = 0
        for i in range(hot.shape[0]):
            needed += int(hot[i] * guess)
        if needed > num_redundant:
            missed = guess
        else:
            reached = guess
            if needed >= num_redundant - _FEW_COPIES or guess == missed:
                break
        # A copy more raises the inverse by this on average.
        guess += (num_redundant - needed) / total
        if not reached < guess < missed:
            guess = 0.5 * (reached + missed)
    level = (1.0 + _ROUNDING) / reached
    spent = 0
    for i in range(hot.shape[0]):
        copies[i] = max(1.0, np.ceil(hot[i] / level))
        spent += int(copies[i]) - 1
    if spent > num_redundant:  # Only rounding could do this.
        copies[:] = 1.0
        return 0
    return spent


@kernel
def _hottest_copy(
    load: NDArray[np.float64], layer: int, num_redundant: int, num_ranks: int
) -> NDArray[np.float64]:
    """Return the (T,) least loads of the hottest copy in one layer of (T, L, E) loads."""
    steps, _, experts = load.shape
    out = np.zeros(steps)
    hot = np.empty(experts)
    copies = np.empty(experts)
    for t in range(steps):
        # Only experts above the mean rank load can raise the bound above it; they are few.
        mean = load[t, layer].sum() / num_ranks
        count = 0
        for expert in range(experts):
            if load[t, layer, expert] > mean:
                hot[count] = load[t, layer, expert]
                copies[count] = 1.0
                count += 1
        level = mean
        made = _copies_below(hot[:count], copies[:count], num_redundant, mean)
        for spent in range(made, num_redundant + 1):
            best = -1
            level = mean
            for i in range(count):
                if hot[i] / copies[i] > level:
                    level = hot[i] / copies[i]
                    best = i
            if best < 0 or spent == num_redundant:
                break
            copies[best] += 1.0
        out[t] = level
    return out


def hottest_copy(
    load: NDArray[np.generic], num_redundant: int, num_ranks: int, threads: int = 1
) -> NDArray[np.float64]:
    """Return the least load of the hottest copy if each step could choose its own replicas.

    Args:
        load: (T, L, E) [tokens].
        num_redundant: redundant slots one layer may have.
        num_ranks: R.
        threads: layers are shared among so many.

    Returns:
        (T, L) float64 [tokens], at least the mean rank load.
    """
    if load.ndim != 3:
        raise ShapeMismatch(f"load must be (T, L, E), got {load.shape}")
    loads = np.ascontiguousarray(load, np.float64)
    out = np.empty(loads.shape[:2])

    def bound(layer: int) -> None:
        out[:, layer] = _hottest_copy(loads, layer, num_redundant, num_ranks)

    map_layers(bound, range(loads.shape[1]), threads)
    return out


def bound_times(
    load: NDArray[np.generic],
    num_ranks: int,
    num_redundant: int,
    cost: CostModel = TOKENS,
    threads: int = 1,
) -> NDArray[np.float64]:
    """Return a time of every step and layer that no placement and no dispatcher can beat.

    It is the larger of the fluid time (work spread freely) and the cost of the hottest copy on
    the cheapest rank: an expert with c copies puts at least 1/c of its tokens on one of them,
    however they are split.

    Returns:
        (T, L) float64 in the unit of the cost model.
    """
    copy = hottest_copy(load, num_redundant, num_ranks, threads)
    work = moe_time.replica_work(copy, cost.replica)
    # Without curves all ranks are alike, so one stands for all: there may be thousands.
    columns = 1 if cost.curves is None else num_ranks
    on_ranks = moe_time.rank_times(np.repeat(work[:, :, None], columns, axis=2), cost)
    return np.asarray(
        np.maximum(moe_time.fluid_times(load, num_ranks, cost), on_ranks.min(axis=2)), np.float64
    )


def lower_bound(problem: PlacementProblem) -> float:
    """Return a lower bound on the score of every placement of a problem: the sum of `bound_times`.

    It holds for all dispatchers.
    """
    shape, cost = problem.shape, problem.objective.cost
    redundant = shape.num_slots - shape.num_logical_experts
    return float(bound_times(problem.load, shape.num_ranks, redundant, cost, problem.threads).sum())
