"""The GEM policy: one copy per expert, placed by the slowest rank of every step.

The kernels find the mapping that a plain search finds. Two rules make them fast and change no
result. A swap can help only in steps where one of its two ranks is the slowest, so swaps of ranks
that are seldom the slowest are skipped. Candidates that cannot beat the best so far are dropped by
a sum in another order; those that may are summed in step order, so that gains compare exactly as in
the plain search.

Arrays of one layer, with times in seconds, or in tokens where the problem has no cost curves:
load: (E, T) int64 units of load of each expert in each step.
rank_of: (E,) rank that holds each expert.
table: (R, N) time that each rank takes for 0..N-1 units.
total: (R, T) int64 units of load on each rank.
cost: (R, T) time of each rank, `table` at `total`.
top: (3, T) ranks with the largest costs of each step.
peak: (T,) largest cost of each step. The score is its sum.

Source: GEM section 3.3 and Appendix B, Algorithms 1-4.
"""

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.planning.policies.copies import interleaved_capacity
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry, PolicyInputs
from evenkeel_moe.planning.policies.proposal import build_proposal, place_on_ranks
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal, SlotBudget

_MOST_RESTARTS = 1000
_MOST_UNITS = 65_536
"""Most entries of a cost table."""
_MOST_WORK = 10_000_000_000
"""Bound on evaluations times steps, some ten seconds of a core.

It allows all K restarts of any recorded trace, and of 58 layers of 256 experts on 16 steps; on 256
steps of those, four restarts. Every layer's first search runs in any case.
"""
_SLACK = 1e-12
"""Share of the score by which sums in another order may differ."""


@dataclass(frozen=True, slots=True)
class GemOptions:
    """The paper's constants."""

    restarts: int = 30
    """K: searches from different orders of the experts."""
    noise: float = 0.2
    """Largest relative change of utilisation, uniform, that sets the order of a restart. The first
    restart has none."""
    least_drop: float = 0.001
    """A search ends when its best swap lowers the score by less than this share."""

    def __post_init__(self) -> None:
        # The orders of all restarts are drawn at once, so their number bounds memory.
        if not 1 <= self.restarts <= _MOST_RESTARTS:
            raise InvalidInput(f"restarts is {self.restarts}, must be from 1 to {_MOST_RESTARTS}")
        for name in ("noise", "least_drop"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise InvalidInput(f"{name} is {value}, must be in [0, 1)")


def plan_gem(problem: PlacementProblem, options: GemOptions = GemOptions()) -> Proposal:
    """Plan by GEM.

    Args:
        problem: every expert gets one slot, the rest stay empty. Move limits and the current
            placement are ignored. Ranks hold the same number of experts; if experts do not divide
            over the ranks, some ranks hold one fewer.
        options: the constants of the search.

    Complexity: O(K L E^2 T) at worst; most swaps are skipped because other ranks are the slowest.

    Raises:
        InfeasiblePlan: a replica budget that cannot be met (none of it is used).
        ShapeMismatch: curves for another number of ranks.
    """
    shape = problem.shape
    ranks, experts, layers = shape.num_ranks, shape.num_logical_experts, shape.num_layers
    # Ranks take turns to hold one more.
    capacity = interleaved_capacity(np.full(layers, experts, np.int64), problem.topology)
    SlotBudget.of(problem)
    rng = np.random.default_rng(problem.seed)
    noise = 1.0 + rng.uniform(-options.noise, options.noise, (options.restarts, layers, experts))
    noise[0] = 1.0
    load, table = cost_table(problem.load, ranks, problem.objective.cost)
    most = _MOST_WORK // max(1, len(problem.load))
    if problem.max_evaluations is not None:
        most = min(most, problem.max_evaluations)
    rank_of, _, evaluations = search_layers(load, noise, capacity, table, options.least_drop, most)
    placement = place_on_ranks(rank_of[:, :, None] == np.arange(ranks), shape.slots_per_rank)
    return build_proposal(problem, placement, evaluations)


def cost_table(
    load: NDArray[np.float64], num_ranks: int, cost: CostModel
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Convert loads to whole units, and tabulate the time of every number of units.

    The search then only looks costs up.

    Args:
        load: (T, L, E) [tokens]. A unit is one token of work, or more if a step of a layer holds
            over 65,536. If tokens are not whole, it is the least power of two that suffices.
        num_ranks: R.
        cost: the time of a rank. Every expert has one replica, so its work follows from its tokens.

    Returns:
        (L, E, T) int64 units and (R, N + 1) float64 seconds of 0..N units, N the most in one step
        of a layer.
    """
    tokens = np.moveaxis(moe_time.replica_work(load, cost.replica), 0, 2)
    most = float(tokens.sum(axis=1).max())
    unit = max(1.0, most / _MOST_UNITS)
    if (load % 1.0).any():
        # A power of two, so that whole tokens stay exact: at the edge of a tile time jumps.
        unit = max(float(np.exp2(np.ceil(np.log2(most / _MOST_UNITS)))), sys.float_info.min)
    units = np.rint(tokens / unit).astype(np.int64)
    entries = np.arange(int(units.sum(axis=1).max()) + 1) * unit
    table = moe_time.rank_times(np.repeat(entries[:, None], num_ranks, axis=1), cost)
    return np.ascontiguousarray(units), np.ascontiguousarray(table.T)


@kernel
def search_layers(
    load: NDArray[np.int64],
    noise: NDArray[np.float64],
    capacity: NDArray[np.int64],
    table: NDArray[np.float64],
    least_drop: float,
    budget: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    """Run Algorithm 4 on every layer: keep the best of as many restarts as the budget allows.

    Args:
        load: (L, E, T) whole units of load.
        noise: (K, L, E) factors on mean utilisation that set the order of each restart.
        capacity: (L, R) experts each rank may hold.
        table: (R, N) seconds of 0..N-1 units of load on each rank.
        least_drop: share of the score under which refinement stops.
        budget: no restart begins once this many placements and swaps were evaluated; the first
            always runs.

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
            rank_of = initial_mapping(load[layer], order, capacity[layer], table)
            score, swaps = refine_mapping(load[layer], rank_of, table, least_drop)
            evaluated += swaps + experts * ranks
            if score < scores[layer]:
                scores[layer] = score
                best[layer] = rank_of
    return best, scores, evaluated


@kernel
def initial_mapping(
    load: NDArray[np.int64],
    order: NDArray[np.int64],
    capacity: NDArray[np.int64],
    table: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Run Algorithm 2: each expert, in `order` (E,), goes where the partial score grows least.

    Returns the rank of each expert. `capacity` (R,) limits the experts of each rank. A tie goes to
    the rank whose own time, summed over steps, stays lowest, then to the lower rank.
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
            if used[rank] >= capacity[rank]:
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
def refine_mapping(
    load: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    table: NDArray[np.float64],
    least_drop: float,
) -> tuple[float, int]:
    """Run Algorithm 3: swap until the best swap lowers the score by less than `least_drop` of it.

    Mutates `rank_of`. Returns (score, swaps evaluated). Order: the first of equal swaps by (rank,
    rank, expert, expert).
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
    top, peak = np.empty((3, steps), np.int64), np.empty(steps)
    evaluated = 0
    while True:
        _top_three(cost, top)
        score = 0.0
        for t in range(steps):
            peak[t] = cost[top[0, t], t]
            score += peak[t]
        best, a, b, swaps = _best_swap(load, rank_of, table, total, cost, top, peak, score)
        evaluated += swaps
        if a < 0:
            return score, evaluated
        i, j = rank_of[a], rank_of[b]
        rank_of[a], rank_of[b] = j, i
        for t in range(steps):
            move = load[b, t] - load[a, t]
            total[i, t] += move
            total[j, t] -= move
            cost[i, t] = table[i, total[i, t]]
            cost[j, t] = table[j, total[j, t]]
        if best < least_drop * score:
            return score - best, evaluated


@kernel
def _best_swap(
    load: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    table: NDArray[np.float64],
    total: NDArray[np.int64],
    cost: NDArray[np.float64],
    top: NDArray[np.int64],
    peak: NDArray[np.float64],
    score: float,
) -> tuple[float, int, int, int]:
    """Find the best swap: (drop of the score, expert or -1, expert or -1, swaps evaluated)."""
    experts, steps = load.shape
    ranks = table.shape[0]
    members, num_members = np.empty((ranks, experts), np.int64), np.zeros(ranks, np.int64)
    for expert in range(experts):
        members[rank_of[expert], num_members[rank_of[expert]]] = expert
        num_members[rank_of[expert]] += 1
    others = np.empty(steps)
    # Loads of the two ranks once expert a has left the first for the second.
    first, second = np.empty(steps, np.int64), np.empty(steps, np.int64)
    best, best_a, best_b, evaluated = 0.0, -1, -1, 0
    rounding = _SLACK * score
    for i in range(ranks):
        for j in range(i + 1, ranks):
            _largest_of_others(cost, top, i, j, others)
            # The drop if the two ranks took no time at all: no swap of theirs saves more.
            room = 0.0
            for t in range(steps):
                room += peak[t] - others[t]
            if room <= best - rounding or room <= 0.0:
                continue
            for x in range(num_members[i]):
                a = members[i, x]
                for t in range(steps):
                    first[t], second[t] = total[i, t] - load[a, t], total[j, t] + load[a, t]
                for y in range(num_members[j]):
                    b = members[j, y]
                    evaluated += 1
                    after = _score_after(load[b], first, second, table[i], table[j], others)
                    if score - after <= best - rounding:
                        continue
                    drop = _swap_drop(a, b, i, j, load, total, table, others, peak)
                    if drop > best:
                        best, best_a, best_b = drop, a, b
    return best, best_a, best_b, evaluated


@kernel
def _top_three(cost: NDArray[np.float64], top: NDArray[np.int64]) -> None:
    """Fill `top`, largest cost first, the lower rank on a tie; -1 where there are fewer ranks."""
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
def _largest_of_others(
    cost: NDArray[np.float64], top: NDArray[np.int64], i: int, j: int, out: NDArray[np.float64]
) -> None:
    """Write to `out` (T,) the largest cost of every step over the ranks other than i and j."""
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
    """Return by how much the score falls if experts a (rank i) and b (rank j) change places."""
    drop = 0.0
    for t in range(peak.shape[0]):
        move = load[b, t] - load[a, t]
        drop += peak[t] - max(table[i, total[i, t] + move], table[j, total[j, t] - move], others[t])
    return drop


@inlined
def _score_after(
    incoming: NDArray[np.int64],
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    table_i: NDArray[np.float64],
    table_j: NDArray[np.float64],
    others: NDArray[np.float64],
) -> float:
    """Return the score after a swap, summed in four strands.

    There is no branch, and no addition waits for the one before it.
    """
    steps = others.shape[0]
    one = two = three = four = 0.0
    whole = steps // 4 * 4
    for t in range(0, whole, 4):
        one += max(table_i[first[t] + incoming[t]], table_j[second[t] - incoming[t]], others[t])
        two += max(
            table_i[first[t + 1] + incoming[t + 1]],
            table_j[second[t + 1] - incoming[t + 1]],
            others[t + 1],
        )
        three += max(
            table_i[first[t + 2] + incoming[t + 2]],
            table_j[second[t + 2] - incoming[t + 2]],
            others[t + 2],
        )
        four += max(
            table_i[first[t + 3] + incoming[t + 3]],
            table_j[second[t + 3] - incoming[t + 3]],
            others[t + 3],
        )
    for t in range(whole, steps):
        one += max(table_i[first[t] + incoming[t]], table_j[second[t] - incoming[t]], others[t])
    return (one + two) + (three + four)


GEM = PolicyEntry(
    "gem",
    "no replicas; the slowest rank of each step gets less, also if ranks differ in speed",
    plan_gem,
    GemOptions,
    ("restarts", "noise", "least_drop"),
    # The paper's window (its section 3.3.1) and profile (3.3.2).
    PolicyInputs(plan_steps=16, curves=True),
)
