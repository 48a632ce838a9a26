"""Gives chosen experts replicas in two fault domains, so that they survive the loss of one.

The starts of the search are repaired here. Then no move of the search may undo it (`moves.fits`),
so what the search makes of them keeps it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import index, kernel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, SlotBudget
from evenkeel_moe.planning.problem.survival import Survive, domain_of_rank, only_domain

_UNLIMITED = 1 << 40
_NONE = index(-1)
"""No rank."""


class _Repair(NamedTuple):
    """A layer under repair. Kernels change the arrays up to `copies` in place."""

    row: NDArray[np.int32]
    """(S,) expert of each slot, -1 for empty."""
    replicas: NDArray[np.int64]
    """(E, R) slots of each rank that hold the expert."""
    work: NDArray[np.float64]
    """(R,) [tokens]"""
    room: NDArray[np.int64]
    """(R,) slots that ranks may still fill."""
    spare: NDArray[np.int64]
    """(1,) slots of the layer that may still be filled."""
    copies: NDArray[np.int64]
    """(1,) copies between ranks that may still be made."""
    load: NDArray[np.float64]
    """(E,) [tokens]"""
    present: NDArray[np.bool_]
    """(E, R) what ranks hold now."""
    domains: NDArray[np.int64]
    """(R,) fault domain of each rank."""


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
    sizes = shape.num_logical_experts, shape.num_ranks
    for layer, row in enumerate(rows):
        filled = int((row >= 0).sum())
        most = max(share, filled) if pool is not None else budget.per_layer
        held = np.ones(sizes, np.bool_)
        if problem.current is not None:
            held = problem.current.held(layer)
        _spread_layer(
            _Repair(
                row,
                replicas=np.zeros(sizes, np.int64),
                work=np.zeros(shape.num_ranks),
                room=room,
                spare=np.array([most - filled]),
                copies=left,
                load=load[layer],
                present=held,
                domains=domains,
            )
        )
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
def _spread_layer(layer: _Repair) -> None:
    """Spread the experts of one layer; `replicas` and `work` are 0 before."""
    row, count, load, work = layer.row, layer.replicas, layer.load, layer.work
    experts, ranks = count.shape
    per_rank = row.shape[0] // ranks
    for slot in range(row.shape[0]):
        if row[slot] >= 0:
            count[row[slot], slot // per_rank] += 1
    for expert in range(experts):
        total = max(count[expert].sum(), 1)
        for rank in range(ranks):
            work[rank] += load[expert] * count[expert, rank] / total
    for expert in np.argsort(-load, kind="mergesort"):
        if count_domains(count[expert], layer.domains, _NONE, _NONE) >= 2:
            continue
        best, at = np.inf, -1
        for slot in range(row.shape[0]):
            rank, old = slot // per_rank, index(row[slot])
            if _in_domain(layer, expert, rank) or not _may_take(layer, slot, load[expert]):
                continue
            if _copies_of(layer, expert, old, rank) > layer.copies[0]:
                continue
            cost = work[rank] + load[expert] / (count[expert].sum() + 1)
            if old >= 0:
                cost -= load[old] / count[old].sum()
            if not layer.present[expert, rank]:  # A rank that has it needs no copy.
                cost += 1e-3 * load.sum()
            if cost < best:
                best, at = cost, slot
        if at >= 0:
            _put(layer, at, expert)
            continue
        free, taken = _make_room(layer, expert)
        if free >= 0:
            _put(layer, free, index(row[taken]))
            _put(layer, taken, expert)


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
def _in_domain(layer: _Repair, expert: int, rank: int) -> bool:
    """Return True if the domain of a rank holds an expert."""
    found = False
    for other in range(layer.domains.shape[0]):
        found |= layer.replicas[expert, other] > 0 and layer.domains[other] == layer.domains[rank]
    return found


@kernel
def _may_take(layer: _Repair, slot: int, heat: float) -> bool:
    """Return True if a slot is empty and may be filled, or its expert does without that replica.

    An expert colder than `heat` gives up its second domain, but never its last replica.
    """
    count, domains = layer.replicas, layer.domains
    rank, old = slot // (layer.row.shape[0] // count.shape[1]), index(layer.row[slot])
    if old < 0:
        return bool(layer.room[rank] > 0 and layer.spare[0] > 0)
    if count[old].sum() < 2:
        return False
    if layer.load[old] < heat:
        return True
    kept = count_domains(count[old], domains, rank, _NONE)
    return kept == count_domains(count[old], domains, _NONE, _NONE)


@kernel
def _copies_of(layer: _Repair, comes: int, leaves: int, rank: int) -> int:
    """Return the copies between ranks that an exchange on a rank adds; -1 is no expert."""
    added = 0 if layer.present[comes, rank] else 1
    if leaves >= 0 and not layer.present[leaves, rank]:
        added -= 1
    return added


@kernel
def _put(layer: _Repair, slot: int, expert: int) -> None:
    """Put an expert in a slot."""
    row, count, load, work = layer.row, layer.replicas, layer.load, layer.work
    rank, old = slot // (row.shape[0] // count.shape[1]), index(row[slot])
    layer.copies[0] -= _copies_of(layer, expert, old, rank)
    for changed, change in ((old, -1), (expert, 1)):
        if changed < 0:
            continue
        before = max(count[changed].sum(), 1)
        for each in range(count.shape[1]):
            work[each] -= load[changed] * count[changed, each] / before
        count[changed, rank] += change
        after = max(count[changed].sum(), 1)
        for each in range(count.shape[1]):
            work[each] += load[changed] * count[changed, each] / after
    row[slot] = expert
    if old < 0:
        layer.room[rank] -= 1
        layer.spare[0] -= 1


@kernel
def _make_room(layer: _Repair, expert: int) -> tuple[int, int]:
    """Return a slot to which another expert can move, and its slot, which the expert then takes.

    Both are -1 if there are none. The other expert keeps its number of domains.
    """
    row, count, domains = layer.row, layer.replicas, layer.domains
    per_rank = row.shape[0] // count.shape[1]
    for free in range(row.shape[0]):
        to = free // per_rank
        if not _may_take(layer, free, layer.load[expert]):
            continue
        for taken in range(row.shape[0]):
            at, other = taken // per_rank, index(row[taken])
            if other < 0 or other == expert or other == row[free] or count[other, to] > 0:
                continue
            if _in_domain(layer, expert, at):
                continue
            kept = count_domains(count[other], domains, at, to)
            if kept < count_domains(count[other], domains, _NONE, _NONE):
                continue
            added = _copies_of(layer, other, index(row[free]), to)
            added += _copies_of(layer, expert, other, at)
            if added <= layer.copies[0]:
                return free, taken
    return -1, -1
