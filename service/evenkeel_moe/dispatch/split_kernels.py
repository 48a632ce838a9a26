"""Solves the least-peak split exactly on one CPU thread, as a parametric flow with Newton steps.

The load of an expert may flow to any rank that holds it; a rank takes up to the peak. The peak
starts at a lower bound. Greedy filling places nearly all load; the rest searches for a rank with
room along augmenting paths (breadth first). If there is none, the ranks that the search reached are
full of load that can go nowhere else. This load, and the rest that is confined to these ranks,
shared evenly over them, is also a lower bound, and the peak rises to it (the Newton step on the
cut). So the peak never passes the optimum, and the split that fits under it is optimal.

The planner has its own kernel for windows, `planning.problem.optimal_split`.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel


@kernel
def _raised(peak: float, whole: bool) -> float:
    """Return the peak as a capacity, rounded up if tokens must be whole."""
    return float(np.ceil(peak * (1.0 - 1e-12))) if whole else peak


@kernel
def _lower_bound(
    first: int,
    last: int,
    load: NDArray[np.float64],
    used: NDArray[np.float64],
    hosts: int,
    expert: NDArray[np.int64],
    edge_from: NDArray[np.int64],
    edge_rank: NDArray[np.int64],
    total: float,
) -> float:
    """Return the largest of: mean over hosts, fullest rank, shared experts over their ranks."""
    peak = total / hosts
    for rank in range(used.shape[0]):
        if used[rank] > peak:
            peak = used[rank]
    for d in range(first, last):
        confined = load[expert[d]]
        for edge in range(edge_from[d], edge_from[d + 1]):
            confined += used[edge_rank[edge]]
        confined /= edge_from[d + 1] - edge_from[d]
        if confined > peak:
            peak = confined
    return peak


@kernel
def _fill(
    d: int,
    wanted: float,
    peak: float,
    whole: bool,
    edge_from: NDArray[np.int64],
    edge_rank: NDArray[np.int64],
    used: NDArray[np.float64],
    flow: NDArray[np.float64],
) -> float:
    """Split an expert's load over its ranks in proportion to their room; returns the rest."""
    room = 0.0
    for edge in range(edge_from[d], edge_from[d + 1]):
        room += max(peak - used[edge_rank[edge]], 0.0)
    if room <= 0.0:
        return wanted
    part = min(wanted / room, 1.0)
    left = wanted
    for edge in range(edge_from[d], edge_from[d + 1]):
        rank = edge_rank[edge]
        amount = max(peak - used[rank], 0.0) * part
        if whole:
            amount = min(np.ceil(amount), left)
        amount = min(amount, left)
        flow[edge] += amount
        used[rank] += amount
        left -= amount
    return left


@kernel
def _search(
    d: int,
    peak: float,
    slack: float,
    used: NDArray[np.float64],
    flow: NDArray[np.float64],
    edge_from: NDArray[np.int64],
    edge_rank: NDArray[np.int64],
    edge_expert: NDArray[np.int64],
    rank_from: NDArray[np.int64],
    rank_edge: NDArray[np.int64],
    seen: NDArray[np.bool_],
    seen_expert: NDArray[np.bool_],
    into: NDArray[np.int64],
    out_of: NDArray[np.int64],
    queue: NDArray[np.int64],
    base: int,
) -> tuple[int, int]:
    """Search breadth first from expert d for a rank with room; returns (rank or -1, ranks reached).

    `into[r]` is the edge by which load would enter r, `out_of[r]` the edge of another rank that
    would give it up (-1: it comes directly from d). `base` is the first shared expert of the layer.
    """
    seen[:] = False
    seen_expert[:] = False
    seen_expert[d - base] = True
    tail = 0
    for edge in range(edge_from[d], edge_from[d + 1]):
        rank = edge_rank[edge]
        seen[rank] = True
        into[rank] = edge
        out_of[rank] = -1
        queue[tail] = rank
        tail += 1
        if used[rank] < peak - slack:
            return rank, tail
    head = 0
    while head < tail:
        full = queue[head]
        head += 1
        for index in range(rank_from[full], rank_from[full + 1]):
            gives = rank_edge[index]
            other = edge_expert[gives]
            if flow[gives] <= slack or seen_expert[other - base]:
                continue
            seen_expert[other - base] = True
            for edge in range(edge_from[other], edge_from[other + 1]):
                rank = edge_rank[edge]
                if seen[rank]:
                    continue
                seen[rank] = True
                into[rank] = edge
                out_of[rank] = gives
                queue[tail] = rank
                tail += 1
                if used[rank] < peak - slack:
                    return rank, tail
    return -1, tail


@kernel
def _augment(
    rank: int,
    wanted: float,
    peak: float,
    used: NDArray[np.float64],
    flow: NDArray[np.float64],
    edge_rank: NDArray[np.int64],
    into: NDArray[np.int64],
    out_of: NDArray[np.int64],
) -> float:
    """Push as much as fits along the path that ends in `rank`; returns the amount."""
    amount = min(wanted, peak - used[rank])
    walk = rank
    while out_of[walk] >= 0:
        amount = min(amount, flow[out_of[walk]])
        walk = edge_rank[out_of[walk]]
    used[rank] += amount
    walk = rank
    while True:
        flow[into[walk]] += amount
        if out_of[walk] < 0:
            return float(amount)
        flow[out_of[walk]] -= amount
        walk = edge_rank[out_of[walk]]


@kernel
def _confined(
    first: int,
    last: int,
    left: NDArray[np.float64],
    edge_from: NDArray[np.int64],
    edge_rank: NDArray[np.int64],
    seen: NDArray[np.bool_],
) -> float:
    """Return the remaining load of the experts whose ranks were all reached."""
    total = 0.0
    for d in range(first, last):
        if left[d - first] <= 0.0:
            continue
        inside = True
        for edge in range(edge_from[d], edge_from[d + 1]):
            if not seen[edge_rank[edge]]:
                inside = False
                break
        if inside:
            total += left[d - first]
    return total


@kernel
def split_layer(
    load: NDArray[np.float64],
    first: int,
    last: int,
    hosts: int,
    whole: bool,
    expert: NDArray[np.int64],
    edge_from: NDArray[np.int64],
    edge_rank: NDArray[np.int64],
    edge_expert: NDArray[np.int64],
    rank_from: NDArray[np.int64],
    rank_edge: NDArray[np.int64],
    flow: NDArray[np.float64],
    used: NDArray[np.float64],
    left: NDArray[np.float64],
    seen: NDArray[np.bool_],
    seen_expert: NDArray[np.bool_],
    into: NDArray[np.int64],
    out_of: NDArray[np.int64],
    queue: NDArray[np.int64],
) -> float:
    """Write `flow` of the edges of one layer, on top of the fixed loads in `used` (R,).

    The arrays from `left` on are scratch: (shared experts), (R,), (shared experts), (R,), (R,),
    (R,).

    Returns:
        The optimal peak.
    """
    flow[edge_from[first] : edge_from[last]] = 0.0
    total = used.sum()
    for d in range(first, last):
        total += load[expert[d]]
    if total <= 0.0:
        return 0.0
    # Whole tokens have no rounding errors, so half a token separates full from not full.
    slack = 0.5 if whole else 1e-13 * total
    peak = _raised(
        _lower_bound(first, last, load, used, hosts, expert, edge_from, edge_rank, total), whole
    )
    for d in range(first, last):
        left[d - first] = _fill(d, load[expert[d]], peak, whole, edge_from, edge_rank, used, flow)
    for d in range(first, last):
        while left[d - first] > slack:
            rank, reached = _search(
                d, peak, slack, used, flow, edge_from, edge_rank, edge_expert, rank_from, rank_edge,
                seen, seen_expert, into, out_of, queue, first,
            )  # fmt: skip
            if rank >= 0:
                left[d - first] -= _augment(
                    rank, left[d - first], peak, used, flow, edge_rank, into, out_of
                )
                continue
            held_back = _confined(first, last, left, edge_from, edge_rank, seen)
            peak = _raised(peak + held_back / reached + (0.0 if whole else slack), whole)
    worst = 0.0
    for rank in range(used.shape[0]):
        worst = max(worst, used[rank])
    return worst


@kernel
def split_kernel(
    load: NDArray[np.float64],
    whole: bool,
    hosts: NDArray[np.int64],
    fixed_rank: NDArray[np.int64],
    shared_from: NDArray[np.int64],
    expert: NDArray[np.int64],
    edge_from: NDArray[np.int64],
    edge_rank: NDArray[np.int64],
    edge_expert: NDArray[np.int64],
    rank_from: NDArray[np.int64],
    rank_edge: NDArray[np.int64],
    flow: NDArray[np.float64],
    used: NDArray[np.float64],
    peak: NDArray[np.float64],
) -> bool:
    """Split (L, E) load; writes flow (A,) of every edge, used (L, R) and peak (L,).

    Arrays are as in `SplitStructure`. With `whole`, tokens stay whole and the peak is the least
    possible for whole tokens.

    Returns:
        False, with nothing solved, if a load is negative or not finite.
    """
    for tokens in load.ravel():
        # NaN fails both comparisons.
        if not (tokens >= 0.0 and tokens < np.inf):
            return False
    layers = load.shape[0]
    ranks = used.shape[1]
    widest = 1
    for layer in range(layers):
        widest = max(widest, shared_from[layer + 1] - shared_from[layer])
    left = np.empty(widest)
    seen_expert = np.empty(widest, np.bool_)
    seen = np.empty(ranks, np.bool_)
    into = np.empty(ranks, np.int64)
    out_of = np.empty(ranks, np.int64)
    queue = np.empty(ranks, np.int64)
    for layer in range(layers):
        used[layer] = 0.0
        for e in range(load.shape[1]):
            if fixed_rank[layer, e] >= 0:
                used[layer, fixed_rank[layer, e]] += load[layer, e]
        peak[layer] = split_layer(
            load[layer], shared_from[layer], shared_from[layer + 1], hosts[layer], whole, expert,
            edge_from, edge_rank, edge_expert, rank_from[layer], rank_edge, flow, used[layer], left,
            seen, seen_expert, into, out_of, queue,
        )  # fmt: skip
    return True


@kernel
def share_kernel(
    flow: NDArray[np.float64],
    load: NDArray[np.float64],
    even: NDArray[np.float64],
    expert: NDArray[np.int64],
    copies: NDArray[np.int64],
    entry_from: NDArray[np.int64],
    entry_edge: NDArray[np.int64],
    entry_at: NDArray[np.int64],
    shares: NDArray[np.float64],
) -> None:
    """Write the flows as shares of the replicas of shared experts; even without tokens."""
    for layer in range(load.shape[0]):
        for entry in range(entry_from[layer], entry_from[layer + 1]):
            logical = expert[entry_at[entry, 0]]
            replica = entry_at[entry, 1]
            edge = entry_edge[entry]
            tokens = load[layer, logical]
            if tokens > 0.0:
                shares[layer, logical, replica] = flow[edge] / copies[edge] / tokens
            else:
                shares[layer, logical, replica] = even[layer, logical, replica]
