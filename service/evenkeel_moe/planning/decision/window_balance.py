"""Measures the balance of the present placement on a window, and around a change of traffic."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.token_split import SplitModel


class WindowBalance(NamedTuple):
    """One measure of balance on parts of a window; NaN without steps or load."""

    window: float
    worst: float
    """Of the worst layer."""
    changed: float
    """Since a change of traffic; NaN also without one."""
    before: float
    """On as many steps just before the change; NaN also without one."""


UNKNOWN = WindowBalance(math.nan, math.nan, math.nan, math.nan)


def token_balance(
    load: NDArray[np.generic], current: Placement, split: SplitModel, changed_steps: int
) -> WindowBalance:
    """Return balancedness, the mean of the layers.

    Args:
        load: (T, L, E) [tokens] the window.
        current: the present placement.
        split: the model of the dispatcher.
        changed_steps: newest steps since traffic changed; 0 if it did not.
    """
    if not len(load):
        return UNKNOWN
    by_rank = metrics.rank_load(load, current, split)
    changed, before = _around(len(load), changed_steps)
    return WindowBalance(
        metrics.balancedness_mean(by_rank),
        metrics.balancedness_worst(by_rank),
        metrics.balancedness_mean(by_rank[changed]) if changed_steps else math.nan,
        metrics.balancedness_mean(by_rank[before]) if changed_steps else math.nan,
    )


def time_balance(
    load: NDArray[np.generic],
    current: Placement,
    objective: Objective,
    split: SplitModel,
    changed_steps: int,
) -> WindowBalance | None:
    """Return fluid time over predicted time; None if the cost model is by tokens.

    Args:
        load: (T, L, E) [tokens] the window.
        current: the present placement.
        objective: names the cost model.
        split: the model of the dispatcher.
        changed_steps: newest steps since traffic changed; 0 if it did not.
    """
    cost = objective.cost
    if cost.by_tokens:
        return None
    if not len(load):
        return UNKNOWN
    times = moe_time.step_times(load, current, cost, split)
    fluid = moe_time.fluid_times(load, current.num_ranks, cost)
    changed, before = _around(len(load), changed_steps)
    return WindowBalance(
        moe_time.balance_of(times, fluid),
        moe_time.worst_balance_of(times, fluid),
        moe_time.balance_of(times[changed], fluid[changed]),
        moe_time.balance_of(times[before], fluid[before]),
    )


def _around(steps: int, changed_steps: int) -> tuple[slice, slice]:
    """Return the steps since a change, and as many before it as there are."""
    first = steps - changed_steps
    return slice(first, None), slice(max(0, first - changed_steps), first)
