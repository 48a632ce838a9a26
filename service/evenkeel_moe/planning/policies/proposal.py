"""The last step of every policy: from the copies it chose to a scored `Proposal`.

Slots that a plan left empty are filled for engines that cannot leave a slot empty.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.kernels import (
    TimeTerms,
    WorkTerms,
    rank_time,
    time_terms,
    work_of_tokens,
    work_terms,
)
from evenkeel_moe.planning.problem.objective import PRICE_MARGIN
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import align_slots, copy_prices, relabel

_MOST_TRIALS = 100_000_000
"""Most slots x experts x steps tried, some seconds of a core. With more, only every second step is
looked at, or every third, and so on."""


def place_on_ranks(held: NDArray[np.bool_], slots_per_rank: int) -> Placement:
    """Build a placement from the experts each rank holds.

    Args:
        held: (L, E, R) - True where a rank holds a copy of an expert.
        slots_per_rank: local slots of a layer. A rank fills its first slots, in the order of expert
            ids; the others stay empty.
    """
    layers, experts, ranks = held.shape
    rows = np.full((layers, ranks, slots_per_rank), EMPTY, np.int32)
    layer, expert, rank = np.nonzero(held)
    rows[layer, rank, held.cumsum(axis=1)[layer, expert, rank] - 1] = expert
    return Placement(rows.reshape(layers, -1), ranks, experts)


def build_proposal(
    problem: PlacementProblem,
    placement: Placement,
    evaluations: int,
    numbers: dict[str, float] | None = None,
    *,
    score: float | None = None,
) -> Proposal:
    """Fill slots that must not stay empty, and score the placement.

    Args:
        problem: the score is under its dispatch and costs.
        placement: the placement to propose. Before its empty slots are filled, its ranks are
            renamed so that the fewest experts move.
        evaluations: candidates evaluated to find it.
        numbers: named figures for the decision log; None for none.
        score: the score, if it is known already.

    Returns:
        numbers: those given, and `filled_slots` if slots were filled.
    """
    numbers = {} if numbers is None else dict(numbers)
    empty = int((placement.phy2log == EMPTY).sum())
    if problem.objective.fill_slots and empty and not problem.shape.pooled:
        keep_nodes = numbers.get("keep_nodes", 0.0) > 0
        placement = fill_empty_slots(problem, relabel(problem, placement, keep_nodes=keep_nodes))
        numbers["filled_slots"] = float(empty - int((placement.phy2log == EMPTY).sum()))
        score = None
    return Proposal(
        placement,
        moe_time.score(problem, placement) if score is None else score,
        evaluations,
        numbers,
    )


class FillTerms(NamedTuple):
    """A cost model in the form of the kernels, and the price of a copy."""

    work: WorkTerms
    time: TimeTerms
    price: float
    """The price of a copy inside a node, over the steps whose gains are summed."""


def fill_empty_slots(problem: PlacementProblem, placement: Placement) -> Placement:
    """Give every empty slot the replica that costs least.

    In each layer, the rank with the least predicted time among those with an empty slot is next. It
    gets the expert with which the window takes the least time, the price of a copy included, with
    the margin that a verdict asks for. An expert that the rank holds at present needs no copy; of
    equal experts it is taken first, then the one with the lower id. Times are those under an even
    split. Under limits and under fewest dispatch a rank gets what it holds at present, as a present
    row that is full always has something left; one with empty slots gets what takes the least time.

    Args:
        problem: gives the loads, the cost model, the price of a copy and the current placement; its
            layers own their slots.
        placement: with the ranks named as they will be.

    Returns:
        The placement without empty slots, unless a rank has more slots than there are experts and
        may hold none twice.

    Complexity: O(empty slots x T (E X + R log R)) with X replicas of an expert.
    """
    objective, shape = problem.objective, problem.shape
    trials = int((placement.phy2log == EMPTY).sum()) * shape.num_logical_experts * len(problem.load)
    load = problem.load[:: -max(1, -(-trials // _MOST_TRIALS))]
    ranks, cost = shape.num_ranks, objective.cost
    split = replace(SplitModel.of(problem), dispatch=DispatchModel.EVEN)
    work = moe_time.rank_work(load, placement, cost, split)
    terms = FillTerms(
        work_terms(cost.replica),
        time_terms(cost, ranks),
        _price_of_copy(problem) * len(load),
    )
    rows = placement.phy2log.copy()
    for layer in np.nonzero((rows == EMPTY).any(axis=1))[0].tolist():
        held = _count_held(placement, layer)
        present = np.zeros_like(held)
        if problem.current is not None:
            present = _count_held(problem.current, layer)
        _fill_layer(
            np.ascontiguousarray(load[:, layer].T),
            rows[layer],
            held,
            present,
            copy_prices(problem, layer),
            np.ascontiguousarray(work[:, layer]),
            terms,
            objective.allow_duplicates,
        )
    filled = Placement(rows, ranks, shape.num_logical_experts)
    return filled if problem.current is None else align_slots(problem.current, filled)


def _price_of_copy(problem: PlacementProblem) -> float:
    """Return the price of a copy per step; infinite where none may be made to fill a slot."""
    objective = problem.objective
    unlimited = objective.limits == PlanLimits()
    # An even split does not show what a replica relieves under fewest dispatch.
    valued = objective.dispatch is not DispatchModel.FEWEST
    if problem.current is not None and not (unlimited and valued):
        return math.inf
    return PRICE_MARGIN * objective.cost_per_move


@kernel
def _fill_layer(
    tokens: NDArray[np.float64],
    row: NDArray[np.int32],
    held: NDArray[np.int64],
    present: NDArray[np.int64],
    prices: NDArray[np.float32],
    work: NDArray[np.float64],
    terms: FillTerms,
    allow_duplicates: bool,
) -> None:
    """Fill the empty slots of one layer.

    Mutates: `row` (S,), `held` and `work`.

    tokens: (E, T). held, present: (E, R) replicas in the row and at present. prices: (E, R) of
    `copy_prices`. work: (T, R) under an even split, shared experts included.
    """
    experts, (steps, ranks) = tokens.shape[0], work.shape
    per_rank = row.shape[0] // ranks
    times, order = np.empty((steps, ranks)), np.empty((steps, ranks), np.int64)
    open_slots = per_rank - held.sum(axis=0)
    while open_slots.any():
        for t in range(steps):
            for rank in range(ranks):
                times[t, rank] = rank_time(work[t, rank], rank, terms.time)
            order[t] = np.argsort(-times[t])
        totals = np.where(open_slots > 0, times.sum(axis=0), np.inf)
        rank = int(np.argmin(totals))
        chosen, least, shortest = -1, np.inf, np.inf
        for expert in range(experts):
            if held[expert, rank] > 0 and not allow_duplicates:
                continue
            stays = present[expert, rank] > held[expert, rank]
            cost = time = _time_with(tokens[expert], held[expert], rank, work, times, order, terms)
            # A second copy on the same rank is copied locally.
            if not stays and held[expert, rank] == 0:
                cost += terms.price * prices[expert, rank]
            better = chosen < 0 or cost < least
            if cost == least:
                forced = np.isinf(cost)
                better |= time < shortest if forced else stays and present[chosen, rank] == 0
            if better:
                chosen, least, shortest = expert, cost, time
        if chosen < 0:
            open_slots[rank] = 0
            continue
        _add_replica(tokens[chosen], held[chosen], rank, work, terms.work)
        slot = rank * per_rank
        while row[slot] >= 0:
            slot += 1
        row[slot] = chosen
        open_slots[rank] -= 1


def _count_held(placement: Placement, layer: int) -> NDArray[np.int64]:
    """Return the (E, R) number of replicas of each expert on each rank."""
    held = np.zeros((placement.num_logical_experts, placement.num_ranks), np.int64)
    slots = np.flatnonzero(placement.phy2log[layer] >= 0)
    np.add.at(held, (placement.phy2log[layer, slots], slots // placement.slots_per_rank), 1)
    return held


@kernel
def _time_with(
    tokens: NDArray[np.float64],
    held: NDArray[np.int64],
    rank: int,
    work: NDArray[np.float64],
    times: NDArray[np.float64],
    order: NDArray[np.int64],
    terms: FillTerms,
) -> float:
    """Return the time of all steps if a rank held one more replica of an expert.

    tokens: (T,) of the expert. held: (R,) its replicas. order: (T, R) ranks, slowest first.
    """
    steps, ranks = times.shape
    copies = held.sum()
    touched = np.nonzero(held)[0]
    total = 0.0
    for t in range(steps):
        if tokens[t] <= 0.0:
            total += times[t, order[t, 0]]
            continue
        before = work_of_tokens(tokens[t] / copies, terms.work) if copies > 0 else 0.0
        after = work_of_tokens(tokens[t] / (copies + 1), terms.work)
        added = work[t, rank] + (held[rank] + 1) * after - held[rank] * before
        worst = rank_time(added, rank, terms.time)
        for holder in touched:
            if holder != rank:
                less = work[t, holder] + held[holder] * (after - before)
                worst = max(worst, rank_time(less, int(holder), terms.time))
        for i in range(ranks):
            other = order[t, i]
            if other != rank and held[other] == 0:
                worst = max(worst, times[t, other])
                break
        total += worst
    return total


@kernel
def _add_replica(
    tokens: NDArray[np.float64],
    held: NDArray[np.int64],
    rank: int,
    work: NDArray[np.float64],
    terms: WorkTerms,
) -> None:
    """Put one more replica of an expert on a rank.

    Mutates: `held` (R,) and `work` (T, R).
    """
    copies = held.sum()
    for t in range(tokens.shape[0]):
        before = work_of_tokens(tokens[t] / copies, terms) if copies > 0 else 0.0
        after = work_of_tokens(tokens[t] / (copies + 1), terms)
        for other in range(held.shape[0]):
            work[t, other] += held[other] * (after - before)
        work[t, rank] += after
    held[rank] += 1
