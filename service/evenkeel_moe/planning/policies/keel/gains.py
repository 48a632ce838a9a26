"""Computes the gain of a change of the ranks' powered costs, and bounds that need no roots.

A gain is by how much the objective of a layer falls, before the price of copies.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined
from evenkeel_moe.planning.policies.keel.state import (
    WRITTEN_OUT,
    WRITTEN_OUT_SHARP,
    LayerState,
    SmoothCosts,
    power,
    root,
    smooth_cost,
)

ROUNDING = 1e-12
"""More than the rounding errors of a gain, in layer times."""


class Norms(NamedTuple):
    """The norms of a layer's steps: arrays of `LayerState`, and `doublings` of `SmoothCosts`."""

    weight: NDArray[np.float64]
    norm: NDArray[np.float64]
    power_sum: NDArray[np.float64]
    inverse_sum: NDArray[np.float64]
    bounds: NDArray[np.float64]
    doublings: int


@inlined
def norms_of(layer: LayerState, doublings: int) -> Norms:
    """Return the norms of a layer; a whole layer would make inlined kernels slow."""
    return Norms(
        layer.weight, layer.norm, layer.power_sum, layer.inverse_sum, layer.bounds, doublings
    )


@inlined
def add_power_change(
    work: NDArray[np.float64],
    first: int,
    by_first: float,
    second: int,
    by_second: float,
    rank_load: NDArray[np.float64],
    powers: NDArray[np.float64],
    rank: int,
    costs: SmoothCosts,
    out: NDArray[np.float64],
) -> None:
    """Add to `out` (T,) the change of one rank's powered cost.

    Its load grows by `by_first` of row `first` and `by_second` of row `second` of `work`: shares of
    two experts' work, or changes of the work of copies. The arrays are those of `LayerState`,
    passed one by one because inlined kernels would count references to a tuple.
    """
    if costs.tile == 0.0 and costs.doublings == WRITTEN_OUT:
        rate = costs.rates[rank]
        for t in range(out.shape[0]):
            cost = (
                rank_load[rank, t] + by_first * work[first, t] + by_second * work[second, t]
            ) * rate
            cost *= cost
            cost *= cost
            out[t] += cost * cost - powers[rank, t]
    elif costs.tile == 0.0 and costs.doublings == WRITTEN_OUT_SHARP:
        rate = costs.rates[rank]
        for t in range(out.shape[0]):
            cost = (
                rank_load[rank, t] + by_first * work[first, t] + by_second * work[second, t]
            ) * rate
            cost *= cost
            cost *= cost
            cost *= cost
            cost *= cost
            out[t] += cost * cost - powers[rank, t]
    else:
        for t in range(out.shape[0]):
            amount = rank_load[rank, t] + by_first * work[first, t] + by_second * work[second, t]
            cost = smooth_cost(max(amount, 0.0), rank, costs)
            out[t] += power(cost, costs.doublings) - powers[rank, t]


@inlined
def gain_of_power_change(norms: Norms, out: NDArray[np.float64]) -> float:
    """Return the gain if the power sum changes by `out` (T,), which is overwritten."""
    weight, norm, power_sum, _, _, doublings = norms
    steps = out.shape[0]
    if doublings == WRITTEN_OUT:
        for t in range(steps):
            after = np.sqrt(np.sqrt(np.sqrt(max(power_sum[t] + out[t], 0.0))))
            out[t] = weight[t] * (norm[t] - after)
    elif doublings == WRITTEN_OUT_SHARP:
        for t in range(steps):
            after = np.sqrt(np.sqrt(np.sqrt(max(power_sum[t] + out[t], 0.0))))
            out[t] = weight[t] * (norm[t] - np.sqrt(np.sqrt(after)))
    else:
        for t in range(steps):
            out[t] = weight[t] * (norm[t] - root(max(power_sum[t] + out[t], 0.0), doublings))
    return sum_of(out)


@inlined
def fall_terms(doublings: int) -> tuple[float, float, float, float]:
    """Return what `fall_at_most` needs: three coefficients of Taylor's polynomial, and a slope."""
    one = 0.5**doublings
    two = one * (1.0 - one) / 2.0
    three = two * (2.0 - one) / 3.0 * 2.0 ** (3.0 - one)
    return one, two, three, 2.0 ** (1.0 - one)


@inlined
def fall_at_most(taken: float, one: float, two: float, three: float, chord: float) -> float:
    """Return a bound on the share by which the norm falls if `taken` of the power sum goes.

    With u the share that is taken away, it is 1 - (1 - u) ** (1/p). Taylor's polynomials bound it:
    of the second order if u < 0, and of the third up to u = 1/2; beyond, the chord to u = 1.
    """
    fall = taken * (one + taken * (two + three * max(taken, 0.0)))
    fall = fall if taken > 0.0 else min(fall, 0.0)
    return fall if taken <= 0.5 else 1.0 - chord * (1.0 - taken)


@inlined
def gain_is_at_most(least: float, norms: Norms, out: NDArray[np.float64]) -> bool:
    """Return True if `gain_of_power_change` of the same arguments is certainly at most `least`.

    It takes no roots, and so a fraction of their time.
    """
    weight, norm, _, inverse_sum, bounds, doublings = norms
    one, two, three, chord = fall_terms(doublings)
    for t in range(out.shape[0]):
        fall = fall_at_most(-out[t] * inverse_sum[t], one, two, three, chord)
        bounds[t] = weight[t] * norm[t] * fall
    return sum_of(bounds) <= least - ROUNDING


@inlined
def gain_above(least: float, norms: Norms, out: NDArray[np.float64]) -> float:
    """Return `gain_of_power_change`, or -inf where it certainly is at most `least`.

    `out` (T,) is overwritten.
    """
    gain = -np.inf
    if not gain_is_at_most(least, norms, out):
        gain = gain_of_power_change(norms, out)
    return gain


@inlined
def sum_of(values: NDArray[np.float64]) -> float:
    """Return the sum, in four strands, so that no addition waits for the one before it."""
    a = b = c = d = 0.0
    steps = values.shape[0]
    whole = steps // 4 * 4
    for t in range(0, whole, 4):
        a += values[t]
        b += values[t + 1]
        c += values[t + 2]
        d += values[t + 3]
    for t in range(whole, steps):
        a += values[t]
    return (a + b) + (c + d)


@inlined
def sum_of_products(
    rows: NDArray[np.float64], i: int, others: NDArray[np.float64], j: int
) -> float:
    """Return the sum of the products of row i of (N, T) `rows` and row j of (M, T) `others`.

    In four strands, as `sum_of`.
    """
    a = b = c = d = 0.0
    steps = rows.shape[1]
    whole = steps // 4 * 4
    for t in range(0, whole, 4):
        a += rows[i, t] * others[j, t]
        b += rows[i, t + 1] * others[j, t + 1]
        c += rows[i, t + 2] * others[j, t + 2]
        d += rows[i, t + 3] * others[j, t + 3]
    for t in range(whole, steps):
        a += rows[i, t] * others[j, t]
    return (a + b) + (c + d)
