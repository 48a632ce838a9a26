"""The search of a layer whose ranks have one slot each and are equally fast.

Only the numbers of copies count there, of which there are far fewer than placements: with x tokens
and n copies of each expert, the power sum of a step is the sum over experts of x^p * n^(1 - p). A
copy of one expert is exchanged for one of another until no exchange gains more than its copy costs.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import EMPTY
from evenkeel_moe.planning.policies.keel.layer import root
from evenkeel_moe.planning.policies.keel.moves import Rules


def exchange_copies(
    tokens: NDArray[np.float64],
    weight: NDArray[np.float64],
    row: NDArray[np.int32],
    present: NDArray[np.int32],
    rules: Rules,
    doublings: int,
    most: int,
) -> NDArray[np.int32]:
    """Exchange copies of one layer.

    Args:
        tokens: (E, T), in units in which a mean rank load takes a time of 1.
        weight: (T,) of the steps, summing to 1.
        row: (S,) the start, with a copy at least of every expert.
        present: (S,) the current placement; empty where there is none.
        rules: of the search, of which the price of a copy and the least gain count.
        doublings: p of the norm is 2 to this power.
        most: copies that the layer may hold.

    Returns:
        (S,) slots with the new numbers of copies, with the fewest changes of `present`.
    """
    copies, had = (np.bincount(held[held >= 0], minlength=len(tokens)) for held in (row, present))
    _exchange(tokens, weight, copies, had, rules, doublings, most)
    # Of the copies that are present, as many as there shall be stay, in the order of their slots.
    order = np.argsort(present, kind="stable")
    expert = present[order]
    nth = np.arange(len(order)) - np.searchsorted(expert, expert)
    stays = order[(expert >= 0) & (nth < copies[expert])]
    new_row = np.full_like(present, EMPTY)
    new_row[stays] = present[stays]
    new = np.repeat(np.arange(len(copies)), copies - np.minimum(copies, had))
    new_row[np.flatnonzero(new_row == EMPTY)[: len(new)]] = new
    return new_row


@kernel
def _exchange(
    tokens: NDArray[np.float64],
    weight: NDArray[np.float64],
    copies: NDArray[np.int64],
    had: NDArray[np.int64],
    rules: Rules,
    doublings: int,
    most: int,
) -> None:
    """Exchange copies until no exchange gains.

    Mutates: `copies` (E,), the copies of each expert. had: (E,) at present.
    """
    experts, exponent = tokens.shape[0], 1.0 - 2.0**doublings
    power = tokens.copy()
    for _ in range(doublings):
        power *= power
    value, slope = _value(power, weight, copies, doublings)
    gains, tried = np.empty((2, experts)), np.zeros(experts, np.bool_)
    while True:
        # To first order and without prices: of one copy more, and of one copy less.
        for expert in range(experts):
            n = copies[expert]
            now = n**exponent
            gains[0, expert] = slope[expert] * (now - (n + 1) ** exponent)
            gains[1, expert] = slope[expert] * (now - (n - 1) ** exponent) if n > 1 else -np.inf
        add = int(np.argmax(np.where(tried, -np.inf, gains[0])))
        gains[1, add] = -np.inf
        drop = int(np.argmax(gains[1]))
        is_exchange = copies.sum() >= most
        if tried[add] or (is_exchange and gains[1, drop] == -np.inf):
            return
        paid = rules.price if copies[add] >= had[add] else 0.0
        copies[add] += 1
        if is_exchange:
            paid -= rules.price if copies[drop] > had[drop] else 0.0
            copies[drop] -= 1
        after, new_slope = _value(power, weight, copies, doublings)
        tried[add] = value - after - paid <= rules.least
        if tried[add]:
            copies[add] -= 1
            copies[drop] += is_exchange
        else:
            value, slope = after, new_slope


@kernel
def _value(
    power: NDArray[np.float64],
    weight: NDArray[np.float64],
    copies: NDArray[np.int64],
    doublings: int,
) -> tuple[float, NDArray[np.float64]]:
    """Return the objective, and (E,) its derivatives in the terms n^(1 - p) of the experts."""
    experts, steps = power.shape
    exponent = 1.0 - 2.0**doublings
    total, slope, value = np.zeros(steps), np.zeros(experts), 0.0
    for expert in range(experts):
        share = copies[expert] ** exponent
        for t in range(steps):
            total[t] += share * power[expert, t]
    for t in range(steps):
        norm = root(total[t], doublings)
        value += weight[t] * norm
        total[t] = weight[t] * norm / (total[t] * (1.0 - exponent)) if total[t] > 0.0 else 0.0
    for expert in range(experts):
        for t in range(steps):
            slope[expert] += total[t] * power[expert, t]
    return value, slope
