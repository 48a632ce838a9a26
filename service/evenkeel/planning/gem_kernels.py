"""Numba bodies of GEM: one copy per expert, per-step scores, the same mapping as a plain search would find.

What makes it fast and changes nothing: a swap can only help in steps where one of its two ranks is the
slowest, so those steps are looked at first, and candidates that cannot beat the best so far are dropped. Whatever
survives is summed in step order, so gains compare exactly as in the plain search.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel.planning.kernels import kernel

__all__ = ["initial_mapping", "refine_mapping", "search_layers"]

_SLACK = 1e-9


@kernel
def initial_mapping(
    load: NDArray[np.int64],
    order: NDArray[np.int64],
    capacity: int,
    table: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Algorithm 2: each expert, in `order` (E,), goes where the partial score grows least.

    load: (E, T). A tie goes to the rank whose own time, summed over steps, stays lowest, then to the lower rank.
    """
    experts, steps = load.shape
    ranks = table.shape[0]
    rank_of = np.full(experts, -1, np.int64)
    used = np.zeros(ranks, np.int64)
    total = np.zeros((ranks, steps), np.int64)
    peak = np.zeros(steps)
    for expert in order:
        best = -1
        best_score = np.inf
        best_own = np.inf
        for rank in range(ranks):
            if used[rank] >= capacity:
                continue
            score = 0.0
            own = 0.0
            for t in range(steps):
                cost = table[rank, total[rank, t] + load[expert, t]]
                own += cost
                score += max(cost, peak[t])
            if score < best_score or (score == best_score and own < best_own):
                best, best_score, best_own = rank, score, own
        rank_of[expert] = best
        used[best] += 1
        for t in range(steps):
            total[best, t] += load[expert, t]
            peak[t] = max(peak[t], table[best, total[best, t]])
    return rank_of


@kernel
def _top_three(cost: NDArray[np.float64], top: NDArray[np.int64]) -> None:
    """(3, T) ranks with the largest costs of every step, largest first, the lower rank on a tie; -1: none."""
    ranks, steps = cost.shape
    for t in range(steps):
        first, second, third = -1, -1, -1
        for rank in range(ranks):
            if first < 0 or cost[rank, t] > cost[first, t]:
                first, second, third = rank, first, second
            elif second < 0 or cost[rank, t] > cost[second, t]:
                second, third = rank, second
            elif third < 0 or cost[rank, t] > cost[third, t]:
                third = rank
        top[0, t], top[1, t], top[2, t] = first, second, third


@kernel
def _others(
    cost: NDArray[np.float64], top: NDArray[np.int64], i: int, j: int, out: NDArray[np.float64]
) -> None:
    """(T,) into `out`: the largest cost of every step over ranks other than i and j."""
    for t in range(out.shape[0]):
        out[t] = 0.0
        for place in range(3):
            rank = top[place, t]
            if rank >= 0 and rank != i and rank != j:
                out[t] = cost[rank, t]
                break


@kernel
def _swap_drop(
    a: int,
    b: int,
    i: int,
    j: int,
    load: NDArray[np.int64],
    total: NDArray[np.int64],
    table: NDArray[np.float64],
    others: NDArray[np.float64],
    peak: NDArray[np.float64],
) -> float:
    """By how much the score falls if experts a (on rank i) and b (on rank j) change places."""
    drop = 0.0
    for t in range(peak.shape[0]):
        move = load[b, t] - load[a, t]
        drop += peak[t] - max(table[i, total[i, t] + move], table[j, total[j, t] - move], others[t])
    return drop


@kernel
def refine_mapping(
    load: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    table: NDArray[np.float64],
    least_drop: float,
) -> tuple[float, int]:
    """Algorithm 3: carry out the best swap until it lowers the score by less than `least_drop` of it.

    Mutates `rank_of` (E,). Returns (score, swaps evaluated). Order: the first of equal swaps by (rank, rank,
    expert, expert).
    """
    experts, steps = load.shape
    ranks = table.shape[0]
    total = np.zeros((ranks, steps), np.int64)
    cost = np.zeros((ranks, steps))
    for expert in range(experts):
        for t in range(steps):
            total[rank_of[expert], t] += load[expert, t]
    for rank in range(ranks):
        for t in range(steps):
            cost[rank, t] = table[rank, total[rank, t]]
    top = np.empty((3, steps), np.int64)
    peak = np.empty(steps)
    others = np.empty(steps)
    order = np.empty(steps, np.int64)
    members = np.empty((ranks, experts), np.int64)
    num_members = np.empty(ranks, np.int64)
    evaluated = 0
    while True:
        _top_three(cost, top)
        score = 0.0
        for t in range(steps):
            peak[t] = cost[top[0, t], t]
            score += peak[t]
        num_members[:] = 0
        for expert in range(experts):
            members[rank_of[expert], num_members[rank_of[expert]]] = expert
            num_members[rank_of[expert]] += 1
        best, best_a, best_b = 0.0, -1, -1
        for i in range(ranks):
            for j in range(i + 1, ranks):
                _others(cost, top, i, j, others)
                # What the two could save, whatever they pass on; steps where one is slowest come first.
                room = 0.0
                first, last = 0, steps - 1
                for t in range(steps):
                    room += peak[t] - others[t]
                    if top[0, t] == i or top[0, t] == j:
                        order[first] = t
                        first += 1
                    else:
                        order[last] = t
                        last -= 1
                if room <= best - _SLACK * abs(best) or room <= 0.0:
                    continue
                for x in range(num_members[i]):
                    a = members[i, x]
                    for y in range(num_members[j]):
                        b = members[j, y]
                        evaluated += 1
                        # Out as soon as too little of `room` is left; a call here would cost more than the loop.
                        left = room
                        enough = best - _SLACK * abs(best)
                        for place in range(steps):
                            t = order[place]
                            move = load[b, t] - load[a, t]
                            cost_i = table[i, total[i, t] + move]
                            cost_j = table[j, total[j, t] - move]
                            higher = cost_i if cost_i > cost_j else cost_j
                            if higher > others[t]:
                                left -= higher - others[t]
                                if left <= enough:
                                    break
                        if left <= enough:
                            continue
                        drop = _swap_drop(a, b, i, j, load, total, table, others, peak)
                        if drop > best:
                            best, best_a, best_b = drop, a, b
        if best_a < 0:
            return score, evaluated
        i, j = rank_of[best_a], rank_of[best_b]
        rank_of[best_a], rank_of[best_b] = j, i
        for t in range(steps):
            move = load[best_b, t] - load[best_a, t]
            total[i, t] += move
            total[j, t] -= move
            cost[i, t] = table[i, total[i, t]]
            cost[j, t] = table[j, total[j, t]]
        if best < least_drop * score:
            return score - best, evaluated


@kernel
def search_layers(
    load: NDArray[np.int64],
    noise: NDArray[np.float64],
    capacity: int,
    table: NDArray[np.float64],
    least_drop: float,
    budget: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    """Algorithm 4 on every layer: the best of as many restarts as the budget of evaluations allows.

    Args:
        load: (L, E, T) whole units of load.
        noise: (K, L, E) factors on mean utilisation that set the order of each restart.
        capacity: experts a rank may hold.
        table: (R, N) seconds of 0..N-1 units of load on each rank.
        least_drop: share of the score under which refinement stops.
        budget: no restart begins once this many placements and swaps were evaluated; the first always runs.

    Returns:
        (L, E) rank of each expert, (L,) score, evaluations.
    """
    layers, experts, _ = load.shape
    ranks = table.shape[0]
    best = np.zeros((layers, experts), np.int64)
    scores = np.full(layers, np.inf)
    mean = np.empty(experts)
    evaluated = 0
    for restart in range(noise.shape[0]):
        for layer in range(layers):
            if restart > 0 and evaluated >= budget:
                return best, scores, evaluated
            for expert in range(experts):
                mean[expert] = load[layer, expert].sum() * noise[restart, layer, expert]
            order = np.argsort(-mean, kind="mergesort")
            rank_of = initial_mapping(load[layer], order, capacity, table)
            score, swaps = refine_mapping(load[layer], rank_of, table, least_drop)
            evaluated += swaps + experts * ranks
            if score < scores[layer]:
                scores[layer] = score
                best[layer] = rank_of
    return best, scores, evaluated
