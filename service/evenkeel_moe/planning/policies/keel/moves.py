"""Single moves of one layer: what each gains, and carrying it out.

Two kinds. An exchange swaps the experts of two slots on different ranks, one of which may be empty. A change
puts another expert into a slot whose own has a second copy, or into an empty slot. No move ever puts a second
copy of an expert on a rank or takes its last copy away.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.planning.policies.keel.state import (
    SMOOTH,
    Curves,
    Layer,
    Split,
    expert_shares,
    power,
    root,
    smooth_cost,
)

__all__ = [
    "apply_change",
    "apply_exchange",
    "change_gain",
    "copies_of_change",
    "drop",
    "exchange_gain",
    "shift",
]


@inlined
def shift(
    load: NDArray[np.float64],
    first: int,
    by_first: float,
    second: int,
    by_second: float,
    ranks: NDArray[np.float64],
    powers: NDArray[np.float64],
    rank: int,
    curves: Curves,
    out: NDArray[np.float64],
) -> None:
    """Add to `out` (T,) how a rank's powered cost changes with the shares of two experts; arrays of `Layer`."""
    if curves.tile == 0.0 and curves.doublings == SMOOTH:
        rate = curves.rates[rank]
        for t in range(out.shape[0]):
            cost = (ranks[rank, t] + by_first * load[first, t] + by_second * load[second, t]) * rate
            cost *= cost
            cost *= cost
            out[t] += cost * cost - powers[rank, t]
    else:
        for t in range(out.shape[0]):
            tokens = max(
                ranks[rank, t] + by_first * load[first, t] + by_second * load[second, t], 0.0
            )
            out[t] += power(smooth_cost(tokens, rank, curves), curves.doublings) - powers[rank, t]


@inlined
def drop(
    weight: NDArray[np.float64],
    norm: NDArray[np.float64],
    total: NDArray[np.float64],
    doublings: int,
    out: NDArray[np.float64],
) -> float:
    """By how much the objective falls if the powered costs change by `out` (T,), which is overwritten."""
    steps = out.shape[0]
    if doublings == SMOOTH:
        for t in range(steps):
            out[t] = weight[t] * (norm[t] - np.sqrt(np.sqrt(np.sqrt(max(total[t] + out[t], 0.0)))))
    else:
        for t in range(steps):
            out[t] = weight[t] * (norm[t] - root(max(total[t] + out[t], 0.0), doublings))
    # In four strands, so that additions need not wait for each other.
    a = b = c = d = 0.0
    whole = steps // 4 * 4
    for t in range(0, whole, 4):
        a += out[t]
        b += out[t + 1]
        c += out[t + 2]
        d += out[t + 3]
    for t in range(whole, steps):
        a += out[t]
    return (a + b) + (c + d)


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
def _spread_gain(layer: Layer, curves: Curves, first: int, second: int) -> float:
    """What the changes of shares in `moved` gain over all ranks."""
    out = layer.scratch
    out[:] = 0.0
    for rank in range(layer.ranks.shape[0]):
        by_first, by_second = layer.moved[0, rank], layer.moved[1, rank]
        if by_first != 0.0 or by_second != 0.0:
            shift(
                layer.load, max(first, 0), by_first, max(second, 0), by_second,
                layer.ranks, layer.powers, rank, curves, out,
            )  # fmt: skip
    return drop(layer.weight, layer.norm, layer.total, curves.doublings, out)


@kernel
def exchange_gain(layer: Layer, curves: Curves, split: Split, here: int, there: int) -> float:
    """What it gains if slots `here` and `there`, on different ranks, swap experts."""
    per_rank = layer.row.shape[0] // layer.ranks.shape[0]
    e, f = layer.row[here], layer.row[there]
    i, j = here // per_rank, there // per_rank
    layer.moved[1] = 0.0
    _moved_shares(layer, split, e, i, j, layer.moved[0])
    if f >= 0:
        _moved_shares(layer, split, f, j, i, layer.moved[1])
    return _spread_gain(layer, curves, e, f)


@kernel
def change_gain(layer: Layer, curves: Curves, split: Split, slot: int, expert: int) -> float:
    """What it gains if `slot` takes another expert (-1: becomes empty)."""
    ranks = layer.ranks.shape[0]
    rank = slot // (layer.row.shape[0] // ranks)
    old = layer.row[slot]
    layer.moved[:] = 0.0
    if old >= 0:
        _moved_shares(layer, split, old, rank, -1, layer.moved[0])
    if expert >= 0:
        _moved_shares(layer, split, expert, -1, rank, layer.moved[1])
    return _spread_gain(layer, curves, old, expert)


@kernel
def _reshare(layer: Layer, split: Split, expert: int) -> None:
    """Bring shares and rank loads of one expert in line with who holds it."""
    old = layer.moved[0]
    old[:] = layer.share[expert]
    expert_shares(
        layer.held[expert], layer.copies[expert], layer.source[expert], split, layer.share[expert]
    )
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
