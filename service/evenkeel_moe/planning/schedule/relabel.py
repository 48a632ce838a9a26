"""Fewest moves: which rank should take which part of a target, and in which local slots.

A policy decides what ranks hold together; which rank that is matters only for speed and topology.
Renaming the ranks of a target layer by layer keeps every rank load and saves copies.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem.objective import CostCurves, DispatchModel
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

__all__ = ["align_slots", "count_moves", "fewest_moves", "moves_by_layer", "relabel"]


@kernel
def _overlap(
    target: NDArray[np.int32], current: NDArray[np.int32], num_ranks: int, num_experts: int
) -> NDArray[np.int64]:
    layers, slots = target.shape
    per_rank = slots // num_ranks
    out = np.zeros((layers, num_ranks, num_ranks), np.int64)
    held = np.zeros((num_experts, num_ranks), np.bool_)
    seen = np.full(num_experts, -1, np.int64)
    for layer in range(layers):
        held[:] = False
        for slot in range(slots):
            if current[layer, slot] >= 0:
                held[current[layer, slot], slot // per_rank] = True
        seen[:] = -1
        for slot in range(slots):
            expert = target[layer, slot]
            rank = slot // per_rank
            if expert < 0 or seen[expert] == rank:
                continue
            seen[expert] = rank
            for other in range(num_ranks):
                out[layer, rank, other] += held[expert, other]
    return out


@kernel
def _align(
    target: NDArray[np.int32], current: NDArray[np.int32], num_ranks: int
) -> NDArray[np.int32]:
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
            # Newcomers take the slots of experts that leave first: those have memory, in a pool empty ones do not.
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


def _check_same(current: Placement, target: Placement) -> None:
    have = (current.num_layers, current.num_slots, current.num_ranks, current.num_logical_experts)
    want = (target.num_layers, target.num_slots, target.num_ranks, target.num_logical_experts)
    if have != want:
        raise ShapeMismatch(f"placements are (L, S, R, E) = {have} and {want}")


def moves_by_layer(current: Placement, target: Placement) -> NDArray[np.int64]:
    """Copies between ranks each layer needs: experts a rank must receive.

    Returns:
        (L,) int64. A second copy of an expert on the same rank costs none: it is copied locally.

    Raises:
        ShapeMismatch: placements of different deployments.
    """
    _check_same(current, target)
    kept = _overlap(
        target.phy2log.copy(), current.phy2log.copy(), target.num_ranks, target.num_logical_experts
    )
    by_rank = np.sort(target.phy2log.reshape(target.num_layers, target.num_ranks, -1), axis=2)
    distinct = (by_rank[:, :, :1] >= 0).sum(axis=(1, 2)) + (
        (by_rank[:, :, 1:] != by_rank[:, :, :-1]) & (by_rank[:, :, 1:] >= 0)
    ).sum(axis=(1, 2))
    return np.asarray(distinct - np.trace(kept, axis1=1, axis2=2), np.int64)


def count_moves(current: Placement, target: Placement) -> int:
    """Copies between ranks over all layers; see `moves_by_layer`."""
    return int(moves_by_layer(current, target).sum())


def align_slots(current: Placement, target: Placement) -> Placement:
    """The target with every expert a rank keeps in its present local slot; ranks stay as they are.

    Raises:
        ShapeMismatch: placements of different deployments.
    """
    _check_same(current, target)
    rows = _align(target.phy2log.copy(), current.phy2log.copy(), target.num_ranks)
    return Placement(rows, target.num_ranks, target.num_logical_experts)


def fewest_moves(
    current: Placement,
    target: Placement,
    *,
    topology: Topology | None = None,
    costs: CostCurves | None = None,
    pooled: bool = False,
) -> Placement:
    """Rename the target's ranks, layer by layer, so that the fewest experts cross between ranks.

    Args:
        current: where the experts are.
        target: what the ranks should hold.
        topology: given, the ranks of a node stay together: nodes of equal size may change places, and
            ranks inside a node. None lets any two ranks change places.
        costs: given, only ranks with the same curve change places.
        pooled: only ranks with as many filled slots in the layer change places, so that no rank's pool
            overflows.

    Returns:
        A placement whose layers are the target's up to the names of the ranks and the order of their
        local slots; it never needs more moves than the target. Ties keep the target's names.

    Raises:
        ShapeMismatch: placements of different deployments.
    """
    _check_same(current, target)
    layers, ranks = target.num_layers, target.num_ranks
    kept = _overlap(
        target.phy2log.copy(), current.phy2log.copy(), ranks, target.num_logical_experts
    )
    speed = _speed_classes(costs, ranks)
    filled = (target.phy2log.reshape(layers, ranks, -1) >= 0).sum(axis=2)
    rows = np.empty((layers, ranks, target.slots_per_rank), np.int32)
    for layer in range(layers):
        classes = speed * (target.slots_per_rank + 1) + (filled[layer] if pooled else 0)
        # A forbidden exchange must cost more than all others together can win.
        gain = np.where(classes[:, None] == classes[None, :], kept[layer].astype(np.float64), -1e9)
        seat = _assign(gain) if topology is None else _assign_by_node(gain, topology)
        if gain[np.arange(ranks), seat].sum() <= np.trace(gain):
            seat = np.arange(ranks)
        rows[layer, seat] = target.phy2log[layer].reshape(ranks, -1)
    renamed = Placement(rows.reshape(layers, -1), ranks, target.num_logical_experts)
    return align_slots(current, renamed)


def _speed_classes(costs: CostCurves | None, num_ranks: int) -> NDArray[np.int64]:
    """(R,) the same number for ranks with the same cost curve."""
    if costs is None:
        return np.zeros(num_ranks, np.int64)
    curves = np.concatenate([costs.tile_seconds, costs.slope_s_per_token[:, None]], axis=1)
    return np.asarray(np.unique(curves, axis=0, return_inverse=True)[1].reshape(-1), np.int64)


def _assign(gain: NDArray[np.float64]) -> NDArray[np.int64]:
    """(n,) the column of each row in the assignment with the largest sum."""
    return np.asarray(linear_sum_assignment(gain, maximize=True)[1], np.int64)


def _assign_by_node(gain: NDArray[np.float64], topology: Topology) -> NDArray[np.int64]:
    """Like `_assign`, with whole nodes assigned to nodes of their size and ranks inside them."""
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
    seat = np.empty(len(node_of_rank), np.int64)
    for a, b in enumerate(_assign(best)):
        seat[members[a]] = members[b][inner[a, int(b)]]
    return seat


def relabel(problem: PlacementProblem, target: Placement, *, keep_nodes: bool = False) -> Placement:
    """`fewest_moves` under what the problem allows, so that the target's score is kept.

    Nearest dispatch with known sources ties a replica to its rank: only local slots are aligned. With
    unknown sources it ties replicas to their node. Otherwise any two ranks of equal speed may change places.

    Args:
        problem: names the current placement, the dispatcher and the curves; without a current placement the
            target is returned as it is.
        target: what a policy proposed.
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
        costs=problem.objective.costs,
        pooled=problem.shape.pooled,
    )
