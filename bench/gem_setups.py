"""The set-ups of ranks in GEM's paper, as cost curves."""

import numpy as np

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.cost import CostCurves

GEM_SETUPS = {
    "low": (1.0,),
    "moderate": (1.0, 0.921, 0.897, 0.88),
    "high": (0.88,),
}
"""Throughput of ranks relative to the fastest, in the paper's set-ups.

low: equal ranks. high: one rank 12 % slower than the rest. moderate: the power caps of the paper's
Table 2 (600, 480, 444, 418 W), read off a straight line from 418 W (12 % slower, as in its high
set-up) to 600 W. The paper draws its own curve but gives no figures.
"""


def gem_setup(
    name: str, num_ranks: int, *, tile_tokens: int, tiles: int, tile_seconds: float = 1e-5
) -> CostCurves:
    """Return the cost curves of one of the paper's three set-ups.

    Args:
        name: a key of `GEM_SETUPS`.
        num_ranks: the spread repeats over the ranks; high slows rank 0 only.
        tile_tokens: width of a stair.
        tiles: stairs before the curve goes on as a line.
        tile_seconds: time of a tile on the fastest rank.

    Raises:
        InvalidInput: no such set-up.
    """
    if name not in GEM_SETUPS:
        raise InvalidInput(f"unknown set-up {name!r}; known: {', '.join(GEM_SETUPS)}")
    if tiles < 1:
        raise InvalidInput(f"tiles is {tiles}, must be at least 1")
    speed = np.ones(num_ranks)
    if name == "high":
        speed[0] = GEM_SETUPS[name][0]
    else:
        speed = np.resize(np.array(GEM_SETUPS[name]), num_ranks)
    stairs = tile_seconds * np.arange(1, tiles + 1)[None, :] / speed[:, None]
    return CostCurves(tile_tokens, stairs, tile_seconds / tile_tokens / speed)
