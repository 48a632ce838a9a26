"""Fills empty slots with the replicas that help a dispatcher which activates the fewest experts.

Under `fewest` dispatch all tokens of an expert go to one of its replicas, chosen for the batch. A
replica then adds no work: it lets the dispatcher move the expert off a rank that is slow in this
batch. The search of keel takes the work as shared evenly by the copies and does not see this.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.batch_split import choose_replicas, slots_by_expert
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.keel.layer import raised, root
from evenkeel_moe.planning.policies.proposal import FillTerms
from evenkeel_moe.planning.problem.kernels import (
    rank_time,
    time_terms,
    work_of_tokens,
    work_terms,
)
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, SlotBudget
from evenkeel_moe.planning.problem.token_split import SplitModel, source_shares
from evenkeel_moe.planning.schedule.relabel import copy_prices

_DOUBLINGS = 5
"""The time of a step is the norm over ranks with p = 2 ** 5: several ranks are often equally slow,
so that no single replica lowers the maximum."""
_MOST_TRIALS = 4_000_000
"""Most steps x experts x ranks looked at for one replica of a layer. With more, only every second
step is looked at, or every third, and so on."""


def fill_for_fewest(problem: PlacementProblem, placement: Placement, price: float) -> Placement:
    """Put into empty slots the replicas with which the window takes less time, copies paid.

    Args:
        problem: gives the loads, the cost model and the current placement.
        placement: each expert at most once on a rank. Pooled slots are left as they are.
        price: of a copy inside a node per step, in the unit of the score.

    Complexity: O(T E R) for each slot filled, in steps that are thinned out for large models.
    """
    shape, cost = problem.shape, problem.objective.cost
    ranks, experts = shape.num_ranks, shape.num_logical_experts
    if shape.pooled:
        return placement
    every = max(1, -(-len(problem.load) * experts * ranks // _MOST_TRIALS))
    load = problem.load[::-every][::-1]
    shared = cost.shared_tokens * source_shares(SplitModel.of(problem), ranks, shape.num_layers)
    terms = FillTerms(work_terms(cost.replica), time_terms(replace(cost, fixed=0.0), ranks), price)
    rows = placement.phy2log.copy()
    most = SlotBudget.of(problem).per_layer
    for layer, row in enumerate(rows):
        spare = most - int((row >= 0).sum())
        tokens = np.ascontiguousarray(load[:, layer])
        _fill_layer(tokens, row, copy_prices(problem, layer), shared[layer], terms, spare)
    return Placement(rows, ranks, experts)


@kernel
def _fill_layer(
    tokens: NDArray[np.float64],
    row: NDArray[np.int32],
    prices: NDArray[np.float32],
    shared: NDArray[np.float64],
    terms: FillTerms,
    spare: int,
) -> None:
    """Fill up to `spare` empty slots of one layer, the most helpful replica first.

    Mutates: `row` (S,).

    tokens: (T, E). prices: (E, R) of `copy_prices`. shared: (R,) as in `step_times_kernel`.
    """
    experts = tokens.shape[1]
    ranks = shared.shape[0]
    per_rank = row.shape[0] // ranks
    free = np.full(ranks, -1, np.int64)
    for _ in range(spare):
        free[:] = -1
        for slot in range(row.shape[0]):
            if row[slot] < 0:
                free[slot // per_rank] = slot
        gains = _gains(tokens, row, free, shared, terms)
        best, at, chosen = 0.0, -1, -1
        for expert in range(experts):
            for rank in range(ranks):
                gain = gains[expert, rank] - terms.price * prices[expert, rank]
                if free[rank] >= 0 and gain > best:
                    best, at, chosen = gain, free[rank], expert
        if at < 0:
            return
        row[at] = chosen


@kernel
def _gains(
    tokens: NDArray[np.float64],
    row: NDArray[np.int32],
    free: NDArray[np.int64],
    shared: NDArray[np.float64],
    terms: FillTerms,
) -> NDArray[np.float64]:
    """Return (E, R) the mean time saved in a step if a free slot of the rank held the expert.

    In each step the dispatcher may then move the expert from the replica that serves it to that
    rank, if this shortens the step; all other choices stay. free: (R,) an empty slot, -1 for none.
    """
    steps, experts = tokens.shape
    ranks = shared.shape[0]
    per_rank = row.shape[0] // ranks
    first, following = slots_by_expert(row, experts, ranks)
    held = np.zeros((experts, ranks), np.bool_)
    for slot in range(row.shape[0]):
        if row[slot] >= 0:
            held[row[slot], slot // per_rank] = True
    active, routed = np.empty(ranks, np.int64), np.empty(ranks)
    chosen, own = np.empty(experts, np.int64), np.empty(experts)
    work, power = np.empty(ranks), np.empty(ranks)
    gains = np.zeros((experts, ranks))
    for t in range(steps):
        choose_replicas(tokens[t], row, first, following, active, routed, chosen)
        work[:] = shared * tokens[t].sum()
        for expert in range(experts):
            own[expert] = work_of_tokens(tokens[t, expert], terms.work)
            if chosen[expert] >= 0:
                work[chosen[expert] // per_rank] += own[expert]
        scale = 0.0
        for rank in range(ranks):
            scale = max(scale, rank_time(work[rank], rank, terms.time))
        if scale <= 0.0:
            continue
        total = 0.0
        for rank in range(ranks):
            power[rank] = raised(rank_time(work[rank], rank, terms.time) / scale, _DOUBLINGS)
            total += power[rank]
        norm = root(total, _DOUBLINGS)
        for expert in range(experts):
            if chosen[expert] < 0:
                continue
            source = chosen[expert] // per_rank
            left = raised(
                rank_time(work[source] - own[expert], source, terms.time) / scale, _DOUBLINGS
            )
            relief = power[source] - left
            if relief < 1e-3:
                continue
            for rank in range(ranks):
                if free[rank] < 0 or held[expert, rank] or work[rank] >= work[source]:
                    continue
                grown = rank_time(work[rank] + own[expert], rank, terms.time) / scale
                after = total - relief + raised(grown, _DOUBLINGS) - power[rank]
                if after < total:
                    gains[expert, rank] += scale * (norm - root(after, _DOUBLINGS)) / steps
    return gains
