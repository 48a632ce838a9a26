"""Renames the ranks of a target, and orders their local slots, so that the fewest experts move.

A policy decides which experts share a rank; which rank that is matters only for speed and topology.
Renaming ranks layer by layer keeps every rank load and saves copies.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from evenkeel_moe.jit import kernel
from evenkeel_moe.model.cost import CostCurves
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem.kernels import map_layers
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal

_MANY_RANKS = 128
"""Ranks from which a layer takes milliseconds, so that threads save time."""


@kernel
def _moves_by_layer(
    target: NDArray[np.int32],
    current: NDArray[np.int32],
    nodes: NDArray[np.int64],
    num_experts: int,
) -> NDArray[np.int64]:
    """Return the (L,) number of experts that ranks must receive from other nodes.

    Args:
        target: (L, S), as `current`.
        nodes: (R,) of each rank; if every rank is a node of its own, all copies count.
        num_experts: E.
    """
    layers, slots = target.shape
    per_rank = slots // nodes.shape[0]
    out = np.zeros(layers, np.int64)
    on_node = np.zeros((num_experts, nodes.max() + 1), np.bool_)
    for layer in range(layers):
        on_node[:] = False
        for slot in range(slots):
            if current[layer, slot] >= 0:
                on_node[current[layer, slot], nodes[slot // per_rank]] = True
        counted = np.full(num_experts, -1, np.int64)
        for slot in range(slots):
            expert, rank = target[layer, slot], slot // per_rank
            if expert >= 0 and not on_node[expert, nodes[rank]] and counted[expert] != rank:
                counted[expert] = rank
                out[layer] += 1
    return out


@kernel
def _align(
    target: NDArray[np.int32], current: NDArray[np.int32], num_ranks: int
) -> NDArray[np.int32]:
    """Return the (L, S) target with the local slots of each rank in the order of `align_slots`."""
    layers, slots = target.shape
    per_rank = slots // num_ranks
    out = np.full((layers, slots), np.int32(EMPTY), np.int32)
    placed = np.zeros(slots, np.bool_)
    for layer in range(layers):
        placed[:] = False
        for rank in range(num_ranks):
            first = rank * per_rank
            for slot in range(first, first + per_rank):
                # An expert that stays keeps its slot; each wanted copy claims one.
                for wanted in range(first, first + per_rank):
                    if (
                        not placed[wanted]
                        and target[layer, wanted] >= 0
                        and target[layer, wanted] == current[layer, slot]
                    ):
                        out[layer, slot] = target[layer, wanted]
                        placed[wanted] = True
                        break
            # New experts first take the slots of experts that leave: those have memory, whereas the
            # empty slots of a pool have none.
            for only_left in (True, False):
                slot = first
                for wanted in range(first, first + per_rank):
                    if placed[wanted] or target[layer, wanted] < 0:
                        continue
                    while slot < first + per_rank and (
                        out[layer, slot] >= 0 or (only_left and current[layer, slot] < 0)
                    ):
                        slot += 1
                    if slot == first + per_rank:
                        break
                    out[layer, slot] = target[layer, wanted]
                    placed[wanted] = True
    return out


@kernel
def _rename_single(
    target: NDArray[np.int32],
    current: NDArray[np.int32],
    classes: NDArray[np.int64],
    num_experts: int,
) -> NDArray[np.int64]:
    """Return the (R,) new rank of each target rank, where every rank has one slot.

    A rank then keeps its expert or not, so no assignment has to be searched: of each expert and
    class, as many copies stay as the target and the current placement both have.

    Args:
        target: (R,) the slots of one layer, as `current`.
        classes: (R,) only ranks of the same class are exchanged.
        num_experts: E.
    """
    ranks, kinds = target.shape[0], classes.max() + 1
    new_rank, taken = np.full(ranks, -1), np.zeros(ranks, np.bool_)
    for rank in range(ranks):
        if target[rank] >= 0 and target[rank] == current[rank]:
            new_rank[rank] = rank
            taken[rank] = True
    # Lists of the other ranks by class and present expert, in the order of their numbers.
    first, after = np.full((kinds, num_experts), -1), np.full(ranks, -1)
    for rank in range(ranks - 1, -1, -1):
        if not taken[rank] and current[rank] >= 0:
            after[rank] = first[classes[rank], current[rank]]
            first[classes[rank], current[rank]] = rank
    for rank in range(ranks):
        if new_rank[rank] < 0 and target[rank] >= 0:
            found = first[classes[rank], target[rank]]
            if found >= 0:
                first[classes[rank], target[rank]] = after[found]
                new_rank[rank] = found
                taken[found] = True
    for rank in range(ranks):
        if new_rank[rank] < 0 and not taken[rank]:
            new_rank[rank] = rank
            taken[rank] = True
    free = np.zeros(kinds, np.int64)
    for rank in range(ranks):
        if new_rank[rank] < 0:
            kind = classes[rank]
            while taken[free[kind]] or classes[free[kind]] != kind:
                free[kind] += 1
            new_rank[rank] = free[kind]
            taken[free[kind]] = True
    return new_rank


def moves_by_layer(current: Placement, target: Placement) -> NDArray[np.int64]:
    """Count the copies between ranks of each layer: the experts that ranks must receive.

    Returns:
        (L,) int64. A second copy of an expert on the same rank does not count: it is copied
        locally.

    Raises:
        ShapeMismatch: placements of different deployments.
    """
    return _received(current, target, np.arange(target.num_ranks))


def _received(current: Placement, target: Placement, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    target.check_sizes(current)
    return _moves_by_layer(
        target.phy2log.copy(), current.phy2log.copy(), nodes, target.num_logical_experts
    )


def count_moves(current: Placement, target: Placement) -> int:
    """Count the copies between ranks over all layers; see `moves_by_layer`."""
    return int(moves_by_layer(current, target).sum())


def price_of_moves(
    current: Placement, target: Placement, topology: Topology, cross_node_factor: float
) -> NDArray[np.float64]:
    """Return the price of the copies of each layer, in copies inside a node.

    Args:
        current: the present placement.
        target: the placement to reach.
        topology: the node of each rank.
        cross_node_factor: price of a copy that no rank of the same node can send, as in
            `Objective`.

    Returns:
        (L,) float64 - `moves_by_layer`, those copies counted `cross_node_factor` times.

    Raises:
        ShapeMismatch: placements of different deployments.
    """
    price = moves_by_layer(current, target).astype(np.float64)
    if cross_node_factor == 1.0 or topology.num_nodes == 1:
        return price
    far = _received(current, target, np.array(topology.node_of_rank, np.int64))
    return price + (cross_node_factor - 1.0) * far


def copy_prices(problem: PlacementProblem, layer: int) -> NDArray[np.float32]:
    """Return the price of a copy of each expert of a layer on each rank, in copies inside a node.

    Returns:
        (E, R) - 0 where the rank has the expert at present, 1 where another rank of its node has
        it, else the cross-node factor.
    """
    shape, nodes = problem.shape, np.array(problem.topology.node_of_rank)
    far = problem.objective.cross_node_factor
    if problem.current is None:
        return np.full((shape.num_logical_experts, shape.num_ranks), far, np.float32)
    held = problem.current.held(layer)
    on_node = np.zeros((len(held), problem.topology.num_nodes), np.bool_)
    expert, rank = np.nonzero(held)
    on_node[expert, nodes[rank]] = True
    return np.where(held, 0.0, np.where(on_node[:, nodes], 1.0, far)).astype(np.float32)


def align_slots(current: Placement, target: Placement) -> Placement:
    """Reorder the local slots of the target so that every expert a rank keeps stays in its slot.

    Raises:
        ShapeMismatch: placements of different deployments.
    """
    target.check_sizes(current)
    rows = _align(target.phy2log.copy(), current.phy2log.copy(), target.num_ranks)
    return Placement(rows, target.num_ranks, target.num_logical_experts)


def fewest_moves(
    current: Placement,
    target: Placement,
    *,
    topology: Topology | None = None,
    costs: CostCurves | None = None,
    pooled: bool = False,
    threads: int = 1,
) -> Placement:
    """Rename the target's ranks, layer by layer, so that the fewest experts cross between ranks.

    Args:
        current: the present placement.
        target: the placement to rename.
        topology: if given, the ranks of a node stay together: nodes of equal size may be exchanged,
            and ranks inside a node. None allows any two ranks to be exchanged.
        costs: if given, only ranks with the same curve are exchanged.
        pooled: if True, only ranks with equally many filled slots in the layer are exchanged, so
            that no pool overflows.
        threads: used where there are many ranks; the result does not depend on them.

    Returns:
        A placement whose layers are those of the target up to the names of the ranks and the order
        of their local slots. It never needs more moves than the target. Ties keep the target's
        names.

    Raises:
        ShapeMismatch: placements of different deployments.
    """
    target.check_sizes(current)
    layers, ranks = target.num_layers, target.num_ranks
    wanted, present = target.phy2log.copy(), current.phy2log.copy()
    speed = _speed_classes(costs, ranks)
    filled = (target.phy2log.reshape(layers, ranks, -1) >= 0).sum(axis=2)
    experts = target.num_logical_experts

    def renamed_layer(layer: int) -> NDArray[np.int32]:
        classes = speed * (target.slots_per_rank + 1) + (filled[layer] if pooled else 0)
        if target.slots_per_rank == 1 and topology is None:
            rows = np.empty(ranks, np.int32)
            rows[_rename_single(wanted[layer], present[layer], classes, experts)] = wanted[layer]
            return rows
        # The experts that a target rank and a current rank both hold; whole numbers in float32.
        kept = target.held(layer).T.astype(np.float32) @ current.held(layer).astype(np.float32)
        # A forbidden exchange must cost more than all others together can save.
        gain = np.where(classes[:, None] == classes[None, :], kept.astype(np.float64), -1e9)
        new_rank = _assign(gain) if topology is None else _assign_by_node(gain, topology)
        if gain[np.arange(ranks), new_rank].sum() <= np.trace(gain):
            new_rank = np.arange(ranks)
        rows = np.empty((ranks, target.slots_per_rank), np.int32)
        rows[new_rank] = target.phy2log[layer].reshape(ranks, -1)
        return rows.reshape(-1)

    rows = map_layers(renamed_layer, range(layers), threads if ranks >= _MANY_RANKS else 1)
    return align_slots(current, Placement(np.stack(rows), ranks, experts))


def _speed_classes(costs: CostCurves | None, num_ranks: int) -> NDArray[np.int64]:
    """Return (R,) class numbers, equal for ranks with the same cost curve."""
    if costs is None:
        return np.zeros(num_ranks, np.int64)
    curves = np.concatenate([costs.tile_seconds, costs.slope_s_per_token[:, None]], axis=1)
    return np.asarray(np.unique(curves, axis=0, return_inverse=True)[1].reshape(-1), np.int64)


def _assign(gain: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the (n,) column of each row in the assignment with the largest sum."""
    return np.asarray(linear_sum_assignment(gain, maximize=True)[1], np.int64)


def _assign_by_node(gain: NDArray[np.float64], topology: Topology) -> NDArray[np.int64]:
    """Assign whole nodes to nodes of the same size, and ranks inside them, as in `_assign`."""
    node_of_rank = np.array(topology.node_of_rank)
    members = [np.nonzero(node_of_rank == node)[0] for node in range(topology.num_nodes)]
    best = np.full((len(members), len(members)), -1e12)
    inner: dict[tuple[int, int], NDArray[np.int64]] = {}
    for a, rows in enumerate(members):
        for b, columns in enumerate(members):
            if len(rows) == len(columns):
                block = gain[np.ix_(rows, columns)]
                inner[a, b] = _assign(block)
                best[a, b] = block[np.arange(len(rows)), inner[a, b]].sum()
    new_rank = np.empty(len(node_of_rank), np.int64)
    for a, b in enumerate(_assign(best)):
        new_rank[members[a]] = members[b][inner[a, int(b)]]
    return new_rank


def relabel(problem: PlacementProblem, target: Placement, *, keep_nodes: bool = False) -> Placement:
    """Apply `fewest_moves` as far as the objective allows, so that the target keeps its score.

    Under nearest dispatch with known sources a replica is bound to its rank, so only local slots
    are aligned. With unknown sources it is bound to its node. Otherwise any two ranks of equal
    speed may be exchanged.

    Two scores may change a little. With known sources, ranks differ in the work of their shared
    experts, unless Waterfill places it: renaming changed gains by up to 0.2 points there, in both
    directions, and saved a sixth to a quarter of the copies. And optimal and fewest dispatch choose
    between equal splits by the order of the ranks.

    Args:
        problem: gives the current placement and the objective; without a current placement the
            target is returned unchanged.
        target: the placement a policy proposed.
        keep_nodes: keep the ranks of a node together; set it for a hierarchical proposal
            (`Proposal.numbers["keep_nodes"]`).

    Raises:
        ShapeMismatch: placements of different deployments.
    """
    if problem.current is None:
        return target
    if problem.objective.dispatch is DispatchModel.NEAREST and problem.source_load is not None:
        return align_slots(problem.current, target)
    by_node = keep_nodes or problem.objective.dispatch is DispatchModel.NEAREST
    return fewest_moves(
        problem.current,
        target,
        topology=problem.topology if by_node else None,
        costs=problem.objective.cost.curves,
        pooled=problem.shape.pooled,
        threads=problem.threads,
    )


def relabel_proposal(problem: PlacementProblem, proposal: Proposal) -> Placement:
    """Return the proposed placement, renamed by `relabel`; a hierarchical one keeps its nodes.

    Raises:
        ShapeMismatch, InfeasiblePlan: it breaks an invariant of the deployment (R17).
    """
    objective, placement = problem.objective, proposal.placement
    placement.check(
        problem.shape, allow_duplicates=objective.allow_duplicates, fill_slots=objective.fill_slots
    )
    keep_nodes = proposal.numbers.get("keep_nodes", 0.0) > 0
    return relabel(problem, placement, keep_nodes=keep_nodes)
