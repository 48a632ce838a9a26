"""Compares GEM with a plain kernel of the same algorithm: speed, and equality of the mapping."""

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.gem_setups import gem_setup
from bench.loads import lognormal_steps
from bench.report import Row, best_of
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.planning.policies.gem import cost_table, search_layers
from evenkeel_moe.planning.problem.kernels import TimeTerms, rank_time, time_terms

RESTARTS, NOISE, LEAST_DROP = 30, 0.2, 0.001


@kernel
def _plain_score(total: NDArray[np.float64], terms: TimeTerms) -> float:
    score = 0.0
    for t in range(total.shape[1]):
        peak = 0.0
        for rank in range(total.shape[0]):
            peak = max(peak, rank_time(total[rank, t], rank, terms))
        score += peak
    return score


@kernel
def _plain_initial(
    load: NDArray[np.float64], order: NDArray[np.int64], capacity: int, terms: TimeTerms
) -> NDArray[np.int64]:
    """Run Algorithm 2 with every placement scored over all steps and ranks."""
    experts, steps = load.shape
    ranks = terms.slope.shape[0]
    rank_of = np.full(experts, -1, np.int64)
    used = np.zeros(ranks, np.int64)
    total = np.zeros((ranks, steps))
    for expert in order:
        best, best_score, best_own = -1, np.inf, np.inf
        for rank in range(ranks):
            if used[rank] >= capacity:
                continue
            total[rank] += load[expert]
            score = _plain_score(total, terms)
            own = 0.0
            for t in range(steps):
                own += rank_time(total[rank, t], rank, terms)
            total[rank] -= load[expert]
            if score < best_score or (score == best_score and own < best_own):
                best, best_score, best_own = rank, score, own
        rank_of[expert] = best
        used[best] += 1
        total[best] += load[expert]
    return rank_of


@kernel
def _plain_refine(
    load: NDArray[np.float64],
    rank_of: NDArray[np.int64],
    terms: TimeTerms,
    least_drop: float,
) -> float:
    """Run Algorithm 3 with every swap scored over all steps and ranks."""
    experts, steps = load.shape
    ranks = terms.slope.shape[0]
    total = np.zeros((ranks, steps))
    for expert in range(experts):
        total[rank_of[expert]] += load[expert]
    while True:
        now = np.empty(steps)
        for t in range(steps):
            now[t] = _plain_score(total[:, t : t + 1], terms)
        score = 0.0
        for t in range(steps):
            score += now[t]
        best, best_a, best_b = 0.0, -1, -1
        for i in range(ranks):
            for j in range(i + 1, ranks):
                for a in range(experts):
                    if rank_of[a] != i:
                        continue
                    for b in range(experts):
                        if rank_of[b] != j:
                            continue
                        drop = 0.0
                        for t in range(steps):
                            move = load[b, t] - load[a, t]
                            peak = 0.0
                            for rank in range(ranks):
                                tokens = total[rank, t]
                                if rank == i:
                                    tokens += move
                                elif rank == j:
                                    tokens -= move
                                peak = max(peak, rank_time(tokens, rank, terms))
                            drop += now[t] - peak
                        if drop > best:
                            best, best_a, best_b = drop, a, b
        if best_a < 0:
            return score
        i, j = rank_of[best_a], rank_of[best_b]
        rank_of[best_a], rank_of[best_b] = j, i
        for t in range(steps):
            move = load[best_b, t] - load[best_a, t]
            total[i, t] += move
            total[j, t] -= move
        if best < least_drop * score:
            return score - best


def _plain(
    load: NDArray[np.float64],
    noise: NDArray[np.float64],
    capacity: int,
    terms: TimeTerms,
) -> NDArray[np.int64]:
    layers, experts, _ = load.shape
    best = np.zeros((layers, experts), np.int64)
    for layer in range(layers):
        least = np.inf
        for factors in noise[:, layer]:
            order = np.argsort(-(load[layer].sum(axis=1) * factors), kind="stable")
            rank_of = _plain_initial(load[layer], order, capacity, terms)
            score = _plain_refine(load[layer], rank_of, terms, LEAST_DROP)
            if score < least:
                least, best[layer] = score, rank_of
    return best


def _rows(
    name: str, layers: int, experts: int, ranks: int, plain_layers: int, repeats: int
) -> list[Row]:
    steps = lognormal_steps(16, layers, experts)
    tokens = 32_768 / ranks
    costs = gem_setup("moderate", ranks, tile_tokens=max(1, int(tokens / 16)), tiles=32)
    terms = time_terms(CostModel(costs), ranks)
    load, table = cost_table(steps, ranks, CostModel(costs))
    plain_load = load.astype(np.float64)
    rng = np.random.default_rng(0)
    noise = 1.0 + rng.uniform(-NOISE, NOISE, (RESTARTS, layers, experts))
    noise[0] = 1.0
    capacity = -(-experts // ranks)
    few = slice(plain_layers)
    full = np.full((layers, ranks), capacity)
    ours = partial(search_layers, load, noise, full, table, LEAST_DROP, 1 << 60)
    ours_few = partial(
        search_layers, load[few], noise[:, few], full[few], table, LEAST_DROP, 1 << 60
    )
    plain = partial(_plain, plain_load[few], noise[:, few], capacity, terms)
    same = bool((ours_few()[0] == plain()).all())
    seconds = best_of({"plain": plain, "ours": ours_few}, repeats)
    return [
        Row(f"{name}_speedup_vs_naive", seconds["plain"] / seconds["ours"], "ratio"),
        Row(f"{name}_s", best_of({"ours": ours}, repeats)["ours"], "s"),
        Row(f"{name}_same_mapping", float(same), "bool"),
    ]


def gem_rows() -> Iterator[list[Row]]:
    """Yield the rows of two sizes.

    gem_scout has 48 layers of 16 experts on 4 ranks. gem_v3 has 58 layers of 256 experts on 32
    ranks and is compared on one layer.
    """
    yield _rows("gem_scout", 48, 16, 4, plain_layers=48, repeats=10)
    yield _rows("gem_v3", 58, 256, 32, plain_layers=1, repeats=1)
