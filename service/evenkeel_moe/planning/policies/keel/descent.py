"""Local search of one layer: the best move, again and again."""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.planning.policies.keel.moves import apply_change, apply_exchange
from evenkeel_moe.planning.policies.keel.replacements import best_change
from evenkeel_moe.planning.policies.keel.state import SMOOTH, Curves, Layer, Split, refresh
from evenkeel_moe.planning.policies.keel.swaps import best_exchanges

__all__ = ["descend"]


@kernel
def descend(
    layer: Layer,
    curves: Curves,
    split: Split,
    room: NDArray[np.int64],
    spare: int,
    price: float,
    allowance: int,
    least: float,
    evaluations: int,
) -> tuple[int, int, int]:
    """Make the best move, and exchanges nearly as good between other ranks, until none gains more than `least`.

    Moves made together may undo each other's gain: once they have, only the best is made. So a descent ends.

    Args:
        layer: mutated.
        curves: of the ranks.
        split: dispatcher and nodes.
        room: (R,) further slots each rank may fill in this layer. Mutated.
        spare: further copies the layer may hold.
        price: objective units per copy.
        allowance: further copies between ranks that may be needed.
        least: smallest gain worth a move.
        evaluations: candidates that may be evaluated.

    Returns:
        copies needed more than before, further copies held, evaluations used.
    """
    ranks = layer.ranks.shape[0]
    per_rank = layer.row.shape[0] // ranks
    copies, added, used = 0, 0, 0
    touched = np.empty(ranks, np.bool_)
    one_at_a_time = curves.doublings == SMOOTH
    made, before = 0, np.inf
    while used < evaluations:
        now = refresh(layer, curves) + price * copies
        if made > 1 and now > before - least:
            one_at_a_time = True
        made, before = 0, now
        gains, found, spent = best_exchanges(
            layer, curves, split, room, price, allowance - copies, least, evaluations - used
        )
        used += spent
        best = gains[0] if len(gains) else least
        slot, expert, _, more, spent = best_change(
            layer,
            curves,
            split,
            room,
            spare - added,
            price,
            allowance - copies,
            best,
            evaluations - used,
        )
        used += spent
        touched[:] = False
        if slot >= 0:
            copies += more
            if layer.row[slot] < 0:
                room[slot // per_rank] -= 1
                added += 1
            else:
                touched |= layer.held[layer.row[slot]] > 0
            apply_change(layer, split, slot, expert)
            touched |= layer.held[expert] > 0
            made += 1
            if one_at_a_time:
                continue
        elif len(gains) == 0:
            break
        # Exchanges between other ranks gain about what they would have gained alone.
        for here, there, more in found:
            i, j = here // per_rank, there // per_rank
            if touched[i] or touched[j] or (more > allowance - copies and more > 0):
                continue
            touched[i] = touched[j] = True
            copies += more
            if layer.row[there] < 0:
                room[i] += 1
                room[j] -= 1
            apply_exchange(layer, split, here, there)
            made += 1
            if one_at_a_time or split.nearest:
                break
    return copies, added, used
