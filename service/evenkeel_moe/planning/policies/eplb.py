"""The EPLB policy: replicate by load per copy, pack heaviest first; per node where that is better.

Source: deepseek-ai/EPLB eplb.py@d52c72d (steps 1-3 of the hierarchical form; the global form is the
hierarchical one with a single group and node). On loads without ties the reference rule gives the same map bit
for bit. Three things are ours: hierarchical or global is chosen by predicted time, zero loads spread
replicas evenly, and unless duplicates are allowed packing avoids a second copy on a rank and a repair
swaps away the few it could not avoid.
"""

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.packing import balanced_packing
from evenkeel_moe.planning.policies.replication import replicate_experts
from evenkeel_moe.planning.problem import bounds, metrics
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal

__all__ = ["Variant", "plan_eplb", "rebalance_experts"]


class Variant(StrEnum):
    """Which form of EPLB."""

    GLOBAL = "global"
    HIERARCHICAL = "hierarchical"
    """Expert groups stay whole on a node, so group-limited routing crosses fewer nodes."""


def rebalance_experts(
    weight: NDArray[np.generic],
    num_slots: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    *,
    allow_duplicates: bool = True,
) -> NDArray[np.int32]:
    """phy2log of the reference rule, every layer on its own.

    Args:
        weight: (L, E) [tokens] - load of each expert; taken as float32.
        num_slots: S, over all ranks.
        num_groups: expert groups; 1 for the global form.
        num_nodes: nodes of consecutive ranks; 1 for the global form.
        num_ranks: R; slot -> rank is contiguous.
        allow_duplicates: True is the reference rule; False bounds copies by the ranks they can be on
            and keeps them on different ones.

    Returns:
        (L, S) int32; EMPTY only where duplicates are not allowed and no other expert is left to place.

    Raises:
        InvalidInput: sizes that do not divide; the message has the arithmetic.
        InfeasiblePlan: fewer slots than experts.
    """
    load = np.ascontiguousarray(weight, np.float32)
    if load.ndim != 2:
        raise ShapeMismatch(f"weight must be (L, E), got {load.shape}")
    layers, experts = load.shape
    for what, count, parts, of in (
        ("slots", num_slots, num_ranks, "ranks"),
        ("experts", experts, num_groups, "expert groups"),
        ("expert groups", num_groups, num_nodes, "nodes"),
        ("ranks", num_ranks, num_nodes, "nodes"),
    ):
        if parts < 1 or count % parts:
            raise InvalidInput(
                f"{count} {what} do not divide over {parts} {of}: {count} % {parts} != 0"
            )
    group_size, ranks_per_node = experts // num_groups, num_ranks // num_nodes

    # 1. Pack expert groups into nodes: `order` lists every node's experts one after the other.
    if num_groups > 1:
        per_group = load.reshape(layers, num_groups, group_size).sum(axis=2, dtype=np.float32)
        node, place = balanced_packing(per_group, num_nodes)
        first = (node * (num_groups // num_nodes) + place) * group_size
        new_id = (first[:, :, None] + np.arange(group_size, dtype=np.int32)).reshape(
            layers, experts
        )
        order = np.empty_like(new_id)
        np.put_along_axis(order, new_id, np.arange(experts, dtype=new_id.dtype)[None], axis=1)
        load = np.take_along_axis(load, order, axis=1)
    # 2. Replicate inside every node.
    load = load.reshape(layers * num_nodes, experts // num_nodes)
    cap = None if allow_duplicates else ranks_per_node
    logical, copies = replicate_experts(load, num_slots // num_nodes, cap)
    per_copy = np.asarray(load / copies.astype(np.float32), np.float32)
    # 3. Pack replicas into the ranks of every node.
    rows = _pack_replicas(logical, per_copy, ranks_per_node, allow_duplicates)
    if not allow_duplicates:
        rows = _without_duplicates(rows, per_copy, copies, ranks_per_node)
    if num_groups == 1:
        return rows
    offset = np.arange(num_nodes, dtype=np.int32)[None, :, None] * (experts // num_nodes)
    renamed = np.where(
        rows.reshape(layers, num_nodes, -1) >= 0,
        rows.reshape(layers, num_nodes, -1) + offset,
        EMPTY,
    )
    renamed = renamed.reshape(layers, num_slots)
    return np.where(
        renamed >= 0, np.take_along_axis(order, np.maximum(renamed, 0), axis=1), EMPTY
    ).astype(np.int32)


def _pack_replicas(
    logical: NDArray[np.int32],
    per_copy: NDArray[np.float32],
    num_ranks: int,
    allow_duplicates: bool,
) -> NDArray[np.int32]:
    """(X, s) replicas in any order -> (X, s) phy2log with every rank's replicas side by side."""
    held = np.maximum(logical, 0)
    weight = np.take_along_axis(per_copy, held, axis=1)
    weight[logical < 0] = 0.0
    rank, position = balanced_packing(weight, num_ranks, None if allow_duplicates else logical)
    rows = np.empty_like(logical)
    np.put_along_axis(rows, rank * (logical.shape[1] // num_ranks) + position, logical, axis=1)
    return rows


def _without_duplicates(
    rows: NDArray[np.int32],
    per_copy: NDArray[np.float32],
    copies: NDArray[np.int32],
    num_ranks: int,
) -> NDArray[np.int32]:
    """The same map with no expert twice on a rank; copies bounded by `num_ranks` before."""
    repaired = rows.copy()
    _repair(repaired, per_copy.astype(np.float64), copies.copy(), num_ranks)
    return repaired


@kernel
def _repair(
    rows: NDArray[np.int32],
    per_copy: NDArray[np.float64],
    copies: NDArray[np.int32],
    num_ranks: int,
) -> None:
    """Mutates `rows`: swaps the second copy on a rank against the slot that leaves the lower peak.

    Where no swap helps, the slot takes the hottest expert its rank lacks, or stays empty.
    """
    num_rows, slots = rows.shape
    experts = per_copy.shape[1]
    per_rank = slots // num_ranks
    held = np.zeros((num_ranks, experts), np.int64)
    total = np.zeros(num_ranks)
    for row in range(num_rows):
        held[:] = 0
        total[:] = 0.0
        for slot in range(slots):
            expert = rows[row, slot]
            if expert >= 0:
                held[slot // per_rank, expert] += 1
                total[slot // per_rank] += per_copy[row, expert]
        for slot in range(slots):
            rank = slot // per_rank
            expert = rows[row, slot]
            if expert < 0 or held[rank, expert] < 2:
                continue
            best = -1
            best_peak = np.inf
            for other in range(slots):
                there = other // per_rank
                swapped = rows[row, other]
                if held[there, expert] > 0 or swapped < 0 or held[rank, swapped] > 0:
                    continue
                gain = per_copy[row, swapped] - per_copy[row, expert]
                peak = max(total[rank] + gain, total[there] - gain)
                if peak < best_peak:
                    best_peak = peak
                    best = other
            if best >= 0:
                there = best // per_rank
                swapped = rows[row, best]
                gain = per_copy[row, swapped] - per_copy[row, expert]
                held[there, swapped] -= 1
                held[there, expert] += 1
                total[there] -= gain
                rows[row, best] = expert
            else:
                swapped = -1
                for candidate in range(experts):
                    if held[rank, candidate] == 0 and (
                        swapped < 0 or per_copy[row, candidate] > per_copy[row, swapped]
                    ):
                        swapped = candidate
                gain = (per_copy[row, swapped] if swapped >= 0 else 0.0) - per_copy[row, expert]
            held[rank, expert] -= 1
            if swapped >= 0:
                held[rank, swapped] += 1
            total[rank] += gain
            rows[row, slot] = swapped


def plan_eplb(problem: PlacementProblem, variant: Variant | None = None) -> Proposal:
    """EPLB on the summed window.

    Args:
        problem: the slots filled are those of an average layer (`slots_to_fill`); move limits are not
            looked at, EPLB always plans from nothing.
        variant: None tries both forms where nodes and groups allow it and keeps the one with the lower
            predicted time, hierarchical on a tie.

    Raises:
        InvalidInput: sizes that do not divide, or hierarchical asked for where it cannot be.
        InfeasiblePlan: too few slots.
    """
    candidates: list[tuple[float, Variant, Placement]] = []
    if variant is not Variant.GLOBAL:
        refusal = _why_not_hierarchical(problem)
        if refusal is None:
            placement = _place(problem, problem.shape.num_expert_groups, problem.topology)
            candidates.append((metrics.score(problem, placement), Variant.HIERARCHICAL, placement))
        elif variant is Variant.HIERARCHICAL:
            raise InvalidInput(f"hierarchical EPLB is not possible: {refusal}")
    if variant is not Variant.HIERARCHICAL:
        placement = _place(problem, 1, Topology.single_node(problem.shape.num_ranks))
        candidates.append((metrics.score(problem, placement), Variant.GLOBAL, placement))
    score, chosen, placement = min(candidates, key=lambda candidate: candidate[0])
    numbers = {f"score_{name}": value for value, name, _ in candidates}
    numbers["keep_nodes"] = float(chosen is Variant.HIERARCHICAL)
    return Proposal(
        placement=placement,
        score=score,
        evaluations=len(candidates),
        lower_bound=bounds.lower_bound(problem),
        numbers=numbers,
    )


def _why_not_hierarchical(problem: PlacementProblem) -> str | None:
    """What stands against the hierarchical form; None if nothing does."""
    groups, nodes = problem.shape.num_expert_groups, problem.topology.num_nodes
    sizes = np.bincount(problem.topology.node_of_rank)
    if nodes == 1:
        return "there is one node"
    if groups % nodes:
        return f"{groups} expert groups do not divide over {nodes} nodes"
    if (sizes != sizes[0]).any():
        return f"nodes have {sizes.tolist()} ranks"
    return None


def _place(problem: PlacementProblem, num_groups: int, topology: Topology) -> Placement:
    shape = problem.shape
    per_rank = slots_to_fill(problem)
    rows = rebalance_experts(
        problem.load.sum(axis=0),
        per_rank * shape.num_ranks,
        num_groups,
        topology.num_nodes,
        shape.num_ranks,
        allow_duplicates=problem.objective.allow_duplicates,
    )
    # The rule numbers ranks node by node; the topology may number them otherwise.
    by_node = np.argsort(np.array(topology.node_of_rank), kind="stable")
    phy2log = np.full((shape.num_layers, shape.num_ranks, shape.slots_per_rank), EMPTY, np.int32)
    phy2log[:, by_node, :per_rank] = rows.reshape(shape.num_layers, shape.num_ranks, per_rank)
    return Placement(
        phy2log.reshape(shape.num_layers, -1), shape.num_ranks, shape.num_logical_experts
    )


def slots_to_fill(problem: PlacementProblem) -> int:
    """Slots a rank fills in every layer when all layers get the same number.

    Raises:
        InvalidInput: the replica budget does not divide over the ranks.
        InfeasiblePlan: the slots cannot hold one copy of every expert.
    """
    shape = problem.shape
    ranks, experts = shape.num_ranks, shape.num_logical_experts
    most = shape.slots_per_rank
    if shape.pool_slots_per_rank is not None:
        most = min(most, shape.pool_slots_per_rank // shape.num_layers)
    if problem.replica_budget is None:
        per_rank = most
    else:
        wanted = experts + problem.replica_budget
        if wanted % ranks:
            raise InvalidInput(
                f"{experts} experts + {problem.replica_budget} redundant = {wanted} slots"
                f" do not divide over {ranks} ranks: {wanted} % {ranks} != 0"
            )
        per_rank = wanted // ranks
        if per_rank > most:
            raise InfeasiblePlan(
                f"a replica budget of {problem.replica_budget} needs {per_rank} slots per rank and layer,"
                f" there are {most}",
                Reason.MEMORY_EXCEEDED,
            )
    if per_rank * ranks < experts:
        raise InfeasiblePlan(
            f"{per_rank} slots per rank and layer x {ranks} ranks = {per_rank * ranks}"
            f" cannot hold {experts} experts",
            Reason.EXPERT_WITHOUT_REPLICA,
        )
    return per_rank
