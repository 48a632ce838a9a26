"""The work of experts by their copies, as the search sees it.

Under an even split all copies of an expert have the same tokens, and so the same work. The rank
loads of a layer are then sums of shares of the experts' work, whatever the cost model. Only a
change of the number of copies changes the work of an expert: where reading weights dominates, two
copies have twice the work of one.

Units: tokens and work are in mean rank loads (see `search`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined
from evenkeel_moe.model.cost import ReplicaWork


class SmoothWork(NamedTuple):
    """The work of one replica by its tokens, without the edges of tiles."""

    proportional: bool
    """True if work is tokens: the other fields are then unused."""
    read: float
    """The least work of a replica with tokens: reading the weights, or one tile."""
    start: float
    """Work that every replica with tokens adds."""
    half_tile: float
    """The tokens that rounding up to whole tiles adds on average."""
    token: float
    """One token. With fewer, a replica runs in that share of the steps."""
    single: bool
    """True if in each step one copy computes all tokens of an expert (`fewest` dispatch). Further
    copies then share its work over the steps and add none."""


def smooth_work(replica: ReplicaWork, unit_tokens: float, *, single: bool) -> SmoothWork:
    """Convert the work of a replica to search units; `single` as in `SmoothWork`."""
    return SmoothWork(
        replica.proportional,
        max(replica.read_tokens, replica.tile_tokens) / unit_tokens,
        replica.start_tokens / unit_tokens,
        0.5 * replica.tile_tokens / unit_tokens,
        1.0 / unit_tokens,
        single,
    )


@inlined
def work_of_copy(tokens: float, work: SmoothWork) -> float:
    """Return the work of one copy with some tokens."""
    whole = max(tokens, work.token)
    busy = min(tokens, work.token) / work.token
    return busy * (work.start + max(work.read, whole + work.half_tile))


@inlined
def fill_work(
    tokens: NDArray[np.float64], copies: int, work: SmoothWork, out: NDArray[np.float64]
) -> None:
    """Write to `out` (T,) the work of each of an expert's copies; tokens is (T,) of all copies."""
    if work.proportional:
        for t in range(out.shape[0]):
            out[t] = tokens[t] / copies
    elif work.single:
        for t in range(out.shape[0]):
            out[t] = work_of_copy(tokens[t], work) / copies
    else:
        for t in range(out.shape[0]):
            out[t] = work_of_copy(tokens[t] / copies, work)
