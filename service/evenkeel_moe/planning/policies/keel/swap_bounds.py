"""Bounds the gain of a swap that changes the load of two ranks only, the cheapest bound first."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined
from evenkeel_moe.planning.policies.keel.gains import (
    ROUNDING,
    Norms,
    fall_at_most,
    fall_terms,
    sum_of,
)
from evenkeel_moe.planning.policies.keel.state import SmoothCosts

STEPS_AT_A_TIME = 16
"""Steps after which a bound is compared again."""


@inlined
def shift_gains_at_most(
    least: float,
    tilt: NDArray[np.float64],
    width: NDArray[np.float64],
    work: NDArray[np.float64],
    one: int,
    by_one: float,
    two: int,
    by_two: float,
    out: NDArray[np.float64],
) -> bool:
    """Return True if a swap between equally fast ranks certainly gains at most `least`.

    The bound is that of the gradient and `_reach`, but step by step.

    Args:
        least: in layer times.
        tilt: (T,) gradient in the load of the first rank, minus that of the second.
        width: (T,) tilt times the difference of their loads.
        work: (E, T) of `LayerState`.
        one: expert whose share `by_one` goes from the first rank to the second.
        by_one: may be negative: then it goes the other way. Also `by_two`.
        two: expert whose share `by_two` comes back.
        by_two: 0 for no expert.
        out: (T,) overwritten.
    """
    for t in range(out.shape[0]):
        promised = tilt[t] * (by_one * work[one, t] - by_two * work[two, t])
        out[t] = min(promised, width[t] - promised)
    return sum_of(out) <= least - ROUNDING


@inlined
def changes_gain_at_most(
    least: float,
    norms: Norms,
    work: NDArray[np.float64],
    e: int,
    by_e: float,
    f: int,
    by_f: float,
    rank_load: NDArray[np.float64],
    powers: NDArray[np.float64],
    own: int,
    other: int,
    costs: SmoothCosts,
    out: NDArray[np.float64],
    changes: NDArray[np.float64],
) -> bool:
    """Return True if a swap certainly gains at most `least`.

    `by_e` of expert e's work goes from rank `own` to `other`, and `by_f` of f's comes back. A few
    steps at a time, the bound of `gain_is_at_most` replaces that of `shift_gains_at_most`, which
    `out` (T,) holds, where it is lower. The other arrays are those of `LayerState`.

    `changes` (T,) is overwritten: where the result is False, with the change of the power sum in
    every step.
    """
    weight, norm, _, inverse_sum, bounds, doublings = norms
    steps, bound = out.shape[0], sum_of(out)
    one, two, three, chord = fall_terms(doublings)
    rate, other_rate = costs.rates[own], costs.rates[other]
    for first in range(0, steps, STEPS_AT_A_TIME):
        count = min(STEPS_AT_A_TIME, steps - first)
        # An index that could be negative would keep the loops from vector instructions.
        begin = np.uint64(first)
        for k in range(count):
            t = begin + np.uint64(k)
            goes, comes = by_e * work[e, t], by_f * work[f, t]
            here = (rank_load[own, t] - goes + comes) * rate
            there = (rank_load[other, t] + goes - comes) * other_rate
            here *= here
            there *= there
            here *= here
            there *= there
            changes[t] = (here * here - powers[own, t]) + (there * there - powers[other, t])
        for k in range(count):
            t = begin + np.uint64(k)
            fall = fall_at_most(-changes[t] * inverse_sum[t], one, two, three, chord)
            bounds[t] = min(weight[t] * norm[t] * fall - out[t], 0.0)
        bound += sum_of(bounds[first : first + count])
        if bound <= least - ROUNDING:
            return True
    return False
