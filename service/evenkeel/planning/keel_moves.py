"""Single moves of one layer: what each gains, and carrying it out.

Two kinds. An exchange swaps the experts of two slots on different ranks, one of which may be empty. A change
puts another expert into a slot whose own has a second copy, or into an empty slot. No move ever puts a second
copy of an expert on a rank or takes its last copy away.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel.planning.keel_state import Curves, Layer, Split, expert_shares, power, root, smooth_cost
from evenkeel.planning.kernels import kernel

__all__ = ["apply_change", "apply_exchange", "change_gain", "copies_of_change", "exchange_gain"]


@kernel
def _shift(
    layer: Layer,
    curves: Curves,
    rank: int,
    first: int,
    by_first: float,
    second: int,
    by_second: float,
    sharp: bool,
    out: NDArray[np.float64],
) -> None:
    """Add to `out` (T,) how the rank's powered cost changes when shares of two experts change on it."""
    steps = layer.weight.shape[0]
    ranks, powers = layer.ranks[rank], layer.powers[rank]
    one = layer.load[first]
    two = layer.load[second]
    if curves.tile == 0.0 and not sharp:
        rate = curves.rates[rank]
        for t in range(steps):
            cost = max(ranks[t] + by_first * one[t] + by_second * two[t], 0.0) * rate
            cost *= cost
            cost *= cost
            out[t] += cost * cost - powers[t]
    else:
        for t in range(steps):
            load = max(ranks[t] + by_first * one[t] + by_second * two[t], 0.0)
            out[t] += power(smooth_cost(load, rank, curves), sharp) - powers[t]


@kernel
def _drop(layer: Layer, total: NDArray[np.float64], sharp: bool) -> float:
    """By how much the objective falls if the powered costs of a step sum to `total` (T,)."""
    steps = layer.weight.shape[0]
    if sharp:
        for t in range(steps):
            total[t] = layer.weight[t] * (layer.norm[t] - root(max(total[t], 0.0), True))
    else:
        for t in range(steps):
            total[t] = layer.weight[t] * (layer.norm[t] - np.sqrt(np.sqrt(np.sqrt(max(total[t], 0.0)))))
    gain = 0.0
    for t in range(steps):
        gain += total[t]
    return gain


@kernel
def _moved_shares(
    layer: Layer, split: Split, expert: int, leave: int, enter: int, out: NDArray[np.float64]
) -> None:
    """Change of an expert's shares (R,) if a copy leaves one rank and one enters another; -1 for none."""
    held = layer.held[expert]
    count = layer.copies[expert]
    if leave >= 0:
        held[leave] -= 1
        count -= 1
    if enter >= 0:
        held[enter] += 1
        count += 1
    expert_shares(held, count, layer.source[expert], split, out)
    if leave >= 0:
        held[leave] += 1
    if enter >= 0:
        held[enter] -= 1
    out -= layer.share[expert]


@kernel
def exchange_gain(layer: Layer, curves: Curves, split: Split, here: int, there: int, sharp: bool) -> float:
    """By how much the objective falls if slots `here` and `there`, on different ranks, swap experts."""
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    e, f = layer.row[here], layer.row[there]
    i, j = here // per_rank, there // per_rank
    total = layer.scratch[0]
    total[:] = layer.total
    spread = split.nearest and (layer.copies[e] > 1 or (f >= 0 and layer.copies[f] > 1))
    if not spread:
        by_e = 1.0 / layer.copies[e]
        by_f = 1.0 / layer.copies[f] if f >= 0 else 0.0
        other = f if f >= 0 else e
        _shift(layer, curves, i, e, -by_e, other, by_f, sharp, total)
        _shift(layer, curves, j, e, by_e, other, -by_f, sharp, total)
        return _drop(layer, total, sharp)
    ranks = layer.ranks.shape[0]
    shares_e, shares_f = np.empty(ranks), np.zeros(ranks)
    _moved_shares(layer, split, e, i, j, shares_e)
    if f >= 0:
        _moved_shares(layer, split, f, j, i, shares_f)
    for rank in range(ranks):
        if shares_e[rank] != 0.0 or shares_f[rank] != 0.0:
            _shift(layer, curves, rank, e, shares_e[rank], max(f, 0), shares_f[rank], sharp, total)
    return _drop(layer, total, sharp)


@kernel
def change_gain(layer: Layer, curves: Curves, split: Split, slot: int, expert: int, sharp: bool) -> float:
    """By how much the objective falls if `slot` takes another expert (-1: becomes empty)."""
    ranks = layer.ranks.shape[0]
    rank = slot // (layer.row.shape[0] // ranks)
    old = layer.row[slot]
    shares_old, shares_new = np.zeros(ranks), np.zeros(ranks)
    if old >= 0:
        _moved_shares(layer, split, old, rank, -1, shares_old)
    if expert >= 0:
        _moved_shares(layer, split, expert, -1, rank, shares_new)
    total = layer.scratch[0]
    total[:] = layer.total
    for other in range(ranks):
        if shares_old[other] != 0.0 or shares_new[other] != 0.0:
            _shift(
                layer,
                curves,
                other,
                max(old, 0),
                shares_old[other],
                max(expert, 0),
                shares_new[other],
                sharp,
                total,
            )
    return _drop(layer, total, sharp)


@kernel
def _reshare(layer: Layer, split: Split, expert: int) -> None:
    """Bring shares and rank loads of one expert in line with who holds it."""
    old = layer.share[expert].copy()
    expert_shares(layer.held[expert], layer.copies[expert], layer.source[expert], split, layer.share[expert])
    for rank in range(old.shape[0]):
        change = layer.share[expert, rank] - old[rank]
        if change != 0.0:
            for t in range(layer.weight.shape[0]):
                layer.ranks[rank, t] += change * layer.load[expert, t]


@kernel
def apply_exchange(layer: Layer, split: Split, here: int, there: int) -> None:
    """Swap the experts of two slots; costs and slopes stay stale until `refresh`."""
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    i, j = here // per_rank, there // per_rank
    e, f = layer.row[here], layer.row[there]
    layer.row[here], layer.row[there] = f, e
    layer.held[e, i] -= 1
    layer.held[e, j] += 1
    _reshare(layer, split, e)
    if f >= 0:
        layer.held[f, j] -= 1
        layer.held[f, i] += 1
        _reshare(layer, split, f)


@kernel
def apply_change(layer: Layer, split: Split, slot: int, expert: int) -> None:
    """Put an expert (-1: none) into a slot; costs and slopes stay stale until `refresh`."""
    rank = slot // (layer.row.shape[0] // layer.ranks.shape[0])
    old = layer.row[slot]
    layer.row[slot] = expert
    if old >= 0:
        layer.held[old, rank] -= 1
        layer.copies[old] -= 1
        _reshare(layer, split, old)
    if expert >= 0:
        layer.held[expert, rank] += 1
        layer.copies[expert] += 1
        _reshare(layer, split, expert)


@kernel
def copies_of_change(layer: Layer, rank: int, leave: int, enter: int) -> tuple[int, float]:
    """Copies, and their price, that a rank needs more if one expert leaves it and another enters; -1: none."""
    copies = 0
    price = 0.0
    if leave >= 0 and not layer.had[leave, rank]:
        copies -= 1
        price -= layer.far[leave, rank]
    if enter >= 0 and not layer.had[enter, rank]:
        copies += 1
        price += layer.far[enter, rank]
    return copies, price
