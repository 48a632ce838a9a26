"""Local search of one layer: make the best move, again and again."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.planning.policies.keel.moves import apply_replacement, apply_swap
from evenkeel_moe.planning.policies.keel.replacements import best_replacement
from evenkeel_moe.planning.policies.keel.state import LayerState, SearchObjective, refresh
from evenkeel_moe.planning.policies.keel.swaps import best_swaps


@kernel
def descend(
    layer: LayerState,
    objective: SearchObjective,
    room: NDArray[np.int64],
    spare: int,
    price: float,
    allowance: int,
    least: float,
    evaluations: int,
) -> tuple[int, int, int]:
    """Move until no move gains more than `least`, copies paid.

    Every pass makes the best replacement or swap. Where `objective.quick` is set it also
    makes swaps between other ranks that gain nearly as much. Moves made together may undo each
    other's gain: once they have, only the best move of a pass is made, so a descent ends.

    Args are those of `best_swaps` and `best_replacement`; layer and room are mutated.

    Returns:
        copies needed more than before, further copies held, evaluations used.
    """
    copies, added, used = 0, 0, 0
    touched = np.empty(layer.rank_load.shape[0], np.bool_)
    one_at_a_time = not objective.quick
    made, before = 0, np.inf
    while used < evaluations:
        now = refresh(layer, objective) + price * copies
        if made > 1 and now > before - least:
            one_at_a_time = True
        made, before = 0, now
        gains, swaps, spent = best_swaps(
            layer, objective, room, price, allowance - copies, least, evaluations - used
        )
        used += spent
        bar = gains[0] if len(gains) else least
        left = evaluations - used
        slot, expert, _, more, spent = best_replacement(
            layer, objective, room, spare - added, price, allowance - copies, bar, left
        )
        used += spent
        if slot < 0 and len(gains) == 0:
            break
        touched[:] = False
        if slot >= 0:
            added += _replace(layer, objective, room, slot, expert, touched)
            copies += more
            made = 1
        if slot < 0 or not one_at_a_time:
            only_one = one_at_a_time or objective.nearest
            swapped, more = _swap_untouched(
                layer, objective, room, swaps, allowance - copies, touched, only_one
            )
            made += swapped
            copies += more
    return copies, added, used


@kernel
def _replace(
    layer: LayerState,
    objective: SearchObjective,
    room: NDArray[np.int64],
    slot: int,
    expert: int,
    touched: NDArray[np.bool_],
) -> int:
    """Put an expert (-1: none) into a slot and mark in `touched` (R,) the ranks whose load changes.

    Mutates layer, room and touched. Returns the further copies that the layer holds, -1 to 1.
    """
    old = layer.row[slot]
    added = int(expert >= 0) - int(old >= 0)
    room[slot // (layer.row.shape[0] // touched.shape[0])] -= added
    if old >= 0:
        touched |= layer.held[old] > 0
    apply_replacement(layer, objective, slot, expert)
    if expert >= 0:
        touched |= layer.held[expert] > 0
    return added


@kernel
def _swap_untouched(
    layer: LayerState,
    objective: SearchObjective,
    room: NDArray[np.int64],
    swaps: NDArray[np.int64],
    allowance: int,
    touched: NDArray[np.bool_],
    only_one: bool,
) -> tuple[int, int]:
    """Make those of some swaps (N, 3) whose ranks no earlier move of the pass has touched.

    Their gain is then about what it would be alone. Mutates layer, room and touched.

    Returns:
        (swaps made, copies needed).
    """
    per_rank = layer.row.shape[0] // touched.shape[0]
    made, copies = 0, 0
    for here, there, more in swaps:
        i, j = here // per_rank, there // per_rank
        if touched[i] or touched[j] or (more > allowance - copies and more > 0):
            continue
        touched[i] = touched[j] = True
        copies += more
        if layer.row[there] < 0:
            room[i] += 1
            room[j] -= 1
        apply_swap(layer, objective, here, there)
        made += 1
        if only_one:
            break
    return made, copies
