"""Decides how many copies each rank holds of each layer, so that all ranks use the same memory.

Source: CRAFT section 4.2.2 and Algorithm 3.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.topology import Topology


def interleaved_capacity(copies: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    """Spread every layer's copies over the ranks.

    Copies that do not divide over the ranks are odd. The first objective gives an odd copy to a
    rank that holds the fewest over all layers so far. The second spreads the odd copies of a layer
    evenly over nodes and ranks.

    Args:
        copies: (L,) copies each layer holds, first copies included.
        topology: names the node of each rank.

    Returns:
        (L, R) int64; inside a layer ranks differ by at most one, and so do their sums over layers.

    Order: of n tied ranks in node order, k are taken at positions i * n // k. The paper's Figure 7
    shows this (ranks 0 and 2 of 4 for the first layer); its pseudo-code would take both ends (0 and
    3).
    """
    if (copies < 0).any():
        raise InvalidInput(f"a layer holds {int(copies.min())} copies, must not be negative")
    ranks = topology.num_ranks
    node_order = np.argsort(np.array(topology.node_of_rank), kind="stable")
    base = copies // ranks
    capacity = np.repeat(base[:, None], ranks, axis=1).astype(np.int64)
    held = np.full(ranks, int(base.sum()), np.int64)
    for layer, odd in enumerate(copies - base * ranks):
        if odd == 0:
            continue
        cutoff = np.sort(held)[odd - 1]
        below = np.nonzero(held < cutoff)[0]
        tied = node_order[held[node_order] == cutoff]
        wanted = odd - len(below)
        chosen = np.concatenate([below, tied[np.arange(wanted) * len(tied) // wanted]])
        capacity[layer, chosen] += 1
        held[chosen] += 1
    return capacity
