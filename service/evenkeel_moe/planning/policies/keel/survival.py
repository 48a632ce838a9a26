"""Gives chosen experts replicas in two fault domains, so that they survive the loss of one.

The starts of the search are repaired here. Then no move of the search may undo it (`moves.fits`),
so what the search makes of them keeps it.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import index, kernel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, SlotBudget
from evenkeel_moe.planning.problem.survival import Survive, domain_of_rank, only_domain

_UNLIMITED = 1 << 40
_NONE = index(-1)
"""No rank."""


def spread_experts(
    problem: PlacementProblem, placement: Placement, survive: Survive, copies: int = _UNLIMITED
) -> Placement:
    """Return the placement with replicas in two fault domains of as many experts as slots allow.

    In each layer the hottest experts come first. A second replica goes to the rank with the least
    load, into an empty slot, or in the place of a replica whose expert does without it. If neither
    is left in another domain, another expert makes room by a move that keeps its own domains.

    Args:
        problem: gives loads, budget, topology and the current placement.
        placement: within the budget.
        survive: NONE returns the placement unchanged.
        copies: most further copies between ranks.
    """
    if survive is Survive.NONE:
        return placement
    shape, budget = problem.shape, SlotBudget.of(problem)
    domains = domain_of_rank(survive, problem.topology)
    load, rows = problem.load.sum(axis=0, dtype=np.float64), placement.phy2log.copy()
    used = placement.used_per_rank()
    pool = budget.pool_per_rank
    room = np.full(shape.num_ranks, _UNLIMITED) if pool is None else pool - used
    share = budget.equal_share(shape.num_layers)
    left = np.array([copies])
    for layer, row in enumerate(rows):
        most = max(share, int((row >= 0).sum())) if pool is not None else budget.per_layer
        held = np.ones((shape.num_logical_experts, shape.num_ranks), np.bool_)
        if problem.current is not None:
            held = problem.current.held(layer)
        _spread_layer(row, held, domains, load[layer], room, most, left)
    return Placement(rows, shape.num_ranks, shape.num_logical_experts)


def least_copies(
    placement: Placement, problem: PlacementProblem, survive: Survive
) -> NDArray[np.int64]:
    """Return the (L, E) domains that an expert must keep: 2 where it has as many, else 1."""
    sizes = placement.num_layers, placement.num_logical_experts
    if survive is Survive.NONE:
        return np.ones(sizes, np.int64)
    alone = only_domain(placement, domain_of_rank(survive, problem.topology))
    return np.where(alone < 0, 2, 1).astype(np.int64)


@kernel
def _spread_layer(
    row: NDArray[np.int32],
    present: NDArray[np.bool_],
    domains: NDArray[np.int64],
    load: NDArray[np.float64],
    room: NDArray[np.int64],
    most: int,
    copies: NDArray[np.int64],
) -> None:
    """Spread the experts of one layer.

    Mutates: `row` (S,), `room` (R,) slots that ranks may still fill, `copies` (1,).

    present: (E, R) what ranks hold now. load: (E,). most: slots of the layer that may be filled.
    """
    experts, ranks = present.shape
    per_rank = row.shape[0] // ranks
    count = np.zeros((experts, ranks), np.int64)
    filled = 0
    for slot in range(row.shape[0]):
        if row[slot] >= 0:
            count[row[slot], slot // per_rank] += 1
            filled += 1
    work = np.zeros(ranks)
    for expert in range(experts):
        total = max(count[expert].sum(), 1)
        for rank in range(ranks):
            work[rank] += load[expert] * count[expert, rank] / total
    for expert in np.argsort(-load, kind="mergesort"):
        if count_domains(count[expert], domains, _NONE, _NONE) >= 2:
            continue
        best, at = np.inf, -1
        for slot in range(row.shape[0]):
            rank, old = slot // per_rank, index(row[slot])
            if _in_domain(count[expert], domains, domains[rank]):
                continue
            if not _may_take(row, slot, count, domains, load, load[expert], room, most - filled):
                continue
            if _copies_of(present, expert, old, rank) > copies[0]:
                continue
            cost = work[rank] + load[expert] / (count[expert].sum() + 1)
            if old >= 0:
                cost -= load[old] / count[old].sum()
            if not present[expert, rank]:  # A rank that has it needs no copy.
                cost += 1e-3 * load.sum()
            if cost < best:
                best, at = cost, slot
        if at >= 0:
            filled += _put(row, at, expert, count, work, load, present, room, copies)
            continue
        moved = _make_room(row, expert, count, domains, load, present, room, most - filled, copies)
        if moved[0] >= 0:
            free, taken = moved
            other = index(row[taken])
            filled += _put(row, free, other, count, work, load, present, room, copies)
            filled += _put(row, taken, expert, count, work, load, present, room, copies)


@kernel
def count_domains(
    count: NDArray[np.int64] | NDArray[np.bool_], domains: NDArray[np.int64], less: int, more: int
) -> int:
    """Return in how many domains an expert is, two at most, with a copy less and one more.

    count: (R,) copies of the expert, or True where a rank has one. less, more: ranks; -1 for none.
    """
    first, found = -1, 0
    for rank in range(count.shape[0]):
        has = count[rank] - (1 if rank == less else 0) + (1 if rank == more else 0)
        if has > 0 and domains[rank] != first:
            found += 1
            if found == 2:
                break
            first = domains[rank]
    return found


@kernel
def _in_domain(count: NDArray[np.int64], domains: NDArray[np.int64], domain: int) -> bool:
    """Return True if a domain holds the expert with these (R,) copies."""
    found = False
    for rank in range(count.shape[0]):
        found |= count[rank] > 0 and domains[rank] == domain
    return found


@kernel
def _may_take(
    row: NDArray[np.int32],
    slot: int,
    count: NDArray[np.int64],
    domains: NDArray[np.int64],
    load: NDArray[np.float64],
    heat: float,
    room: NDArray[np.int64],
    spare: int,
) -> bool:
    """Return True if a slot is empty and may be filled, or its expert does without that replica.

    An expert colder than `heat` gives up its second domain, but never its last replica.
    """
    rank, old = slot // (row.shape[0] // count.shape[1]), index(row[slot])
    if old < 0:
        return room[rank] > 0 and spare > 0
    if count[old].sum() < 2:
        return False
    keeps = count_domains(count[old], domains, rank, _NONE) == count_domains(
        count[old], domains, _NONE, _NONE
    )
    return keeps or load[old] < heat


@kernel
def _copies_of(present: NDArray[np.bool_], comes: int, leaves: int, rank: int) -> int:
    """Return the copies between ranks that an exchange on a rank adds; -1 is no expert."""
    added = 0 if present[comes, rank] else 1
    if leaves >= 0 and not present[leaves, rank]:
        added -= 1
    return added


@kernel
def _put(
    row: NDArray[np.int32],
    slot: int,
    expert: int,
    count: NDArray[np.int64],
    work: NDArray[np.float64],
    load: NDArray[np.float64],
    present: NDArray[np.bool_],
    room: NDArray[np.int64],
    copies: NDArray[np.int64],
) -> int:
    """Put an expert in a slot; return 1 if it was empty, else 0. Mutates all but load, present."""
    rank, old = slot // (row.shape[0] // count.shape[1]), index(row[slot])
    copies[0] -= _copies_of(present, expert, old, rank)
    for one, change in ((old, -1), (expert, 1)):
        if one < 0:
            continue
        before = max(count[one].sum(), 1)
        for each in range(count.shape[1]):
            work[each] -= load[one] * count[one, each] / before
        count[one, rank] += change
        after = max(count[one].sum(), 1)
        for each in range(count.shape[1]):
            work[each] += load[one] * count[one, each] / after
    row[slot] = expert
    if old >= 0:
        return 0
    room[rank] -= 1
    return 1


@kernel
def _make_room(
    row: NDArray[np.int32],
    expert: int,
    count: NDArray[np.int64],
    domains: NDArray[np.int64],
    load: NDArray[np.float64],
    present: NDArray[np.bool_],
    room: NDArray[np.int64],
    spare: int,
    copies: NDArray[np.int64],
) -> tuple[int, int]:
    """Return a slot to which another expert can move, and its slot, which the expert then takes.

    Both are -1 if there are none. The other expert keeps its number of domains.
    """
    per_rank = row.shape[0] // count.shape[1]
    for free in range(row.shape[0]):
        to = free // per_rank
        if not _may_take(row, free, count, domains, load, load[expert], room, spare):
            continue
        for taken in range(row.shape[0]):
            at, other = taken // per_rank, index(row[taken])
            if other < 0 or other == expert or other == row[free] or count[other, to] > 0:
                continue
            if _in_domain(count[expert], domains, domains[at]):
                continue
            kept = count_domains(count[other], domains, at, to)
            if kept < count_domains(count[other], domains, _NONE, _NONE):
                continue
            added = _copies_of(present, other, index(row[free]), to)
            added += _copies_of(present, expert, other, at)
            if added <= copies[0]:
                return free, taken
    return -1, -1
