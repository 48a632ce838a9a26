"""The EPLB policy: replicate by load per copy, then pack the heaviest replica first; and METRO.

The hierarchical form first packs expert groups into nodes and then works inside each node. The
global form is the hierarchical one with a single group and a single node. On loads without ties
`rebalance_experts` gives the same map as the source, bit for bit. Three rules are our own: the form
with the lower predicted time is chosen, zero loads spread replicas evenly, and no rank gets an
expert twice unless the problem allows duplicates.

Source: deepseek-ai/EPLB eplb.py@d52c72d.
"""

from dataclasses import replace
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.checks import undivided
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.copies import pack_copies, replicate_experts
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry
from evenkeel_moe.planning.policies.proposal import build_proposal
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    Proposal,
    equal_slots_per_rank,
)


class Variant(StrEnum):
    """The two forms of EPLB."""

    GLOBAL = "global"
    HIERARCHICAL = "hierarchical"
    """Expert groups stay whole on a node, so group-limited routing crosses fewer nodes."""


def plan_eplb(problem: PlacementProblem, variant: Variant | None = None) -> Proposal:
    """Plan by EPLB on the summed window.

    Args:
        problem: every layer fills the slots of an average layer (`equal_slots_per_rank`). Move
            limits and the current placement are ignored.
        variant: None tries both forms where nodes and groups allow it and keeps the one with the
            lower predicted time, hierarchical on a tie.

    Returns:
        numbers: `score_global` and `score_hierarchical` of the forms tried, `keep_nodes` (1 if the
        hierarchical form was chosen).

    Raises:
        InvalidInput: sizes that do not divide, or hierarchical asked for where it is not possible.
        InfeasiblePlan: too few slots.
    """
    placement, scores, chosen = choose_form(problem, variant)
    numbers = {f"score_{form}": score for form, score in scores.items()}
    numbers["keep_nodes"] = float(chosen is Variant.HIERARCHICAL)
    return build_proposal(problem, placement, len(scores), numbers, score=scores[chosen])


def choose_form(
    problem: PlacementProblem, variant: Variant | None = None
) -> tuple[Placement, dict[Variant, float], Variant]:
    """Return the placement of `plan_eplb`, the scores of the forms tried, and the form chosen."""
    candidates: dict[Variant, Placement] = {}
    if variant is not Variant.GLOBAL:
        refusal = _why_not_hierarchical(problem)
        if refusal is None:
            groups = problem.shape.num_expert_groups
            candidates[Variant.HIERARCHICAL] = _place(problem, groups, problem.topology)
        elif variant is Variant.HIERARCHICAL:
            raise InvalidInput(f"hierarchical EPLB is not possible: {refusal}")
    if variant is not Variant.HIERARCHICAL:
        one_node = Topology.single_node(problem.shape.num_ranks)
        candidates[Variant.GLOBAL] = _place(problem, 1, one_node)
    scores = {form: moe_time.score(problem, placed) for form, placed in candidates.items()}
    chosen = min(scores, key=lambda form: scores[form])
    return candidates[chosen], scores, chosen


def _why_not_hierarchical(problem: PlacementProblem) -> str | None:
    """Return the reason why the hierarchical form is not possible; None if it is possible."""
    groups, nodes = problem.shape.num_expert_groups, problem.topology.num_nodes
    sizes = np.bincount(problem.topology.node_of_rank)
    if nodes == 1:
        return "there is one node"
    if words := undivided(groups, "expert groups", nodes, "nodes"):
        return words
    if (sizes != sizes[0]).any():
        return f"nodes have {sizes.tolist()} ranks"
    return None


def _place(problem: PlacementProblem, num_groups: int, topology: Topology) -> Placement:
    """Run the rule on the summed window and write its map into the slots of the shape."""
    shape = problem.shape
    per_rank = equal_slots_per_rank(problem)
    rows = rebalance_experts(
        problem.load.sum(axis=0),
        per_rank * shape.num_ranks,
        num_groups,
        topology.num_nodes,
        shape.num_ranks,
        allow_duplicates=problem.objective.allow_duplicates,
    )
    # The rule numbers ranks node by node; the topology may number them in another order.
    by_node = np.argsort(np.array(topology.node_of_rank), kind="stable")
    phy2log = np.full((shape.num_layers, shape.num_ranks, shape.slots_per_rank), EMPTY, np.int32)
    phy2log[:, by_node, :per_rank] = rows.reshape(shape.num_layers, shape.num_ranks, per_rank)
    return Placement(
        phy2log.reshape(shape.num_layers, -1), shape.num_ranks, shape.num_logical_experts
    )


def rebalance_experts(
    weight: NDArray[np.generic],
    num_slots: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    *,
    allow_duplicates: bool = True,
) -> NDArray[np.int32]:
    """Run the reference rule on every layer by itself.

    Args:
        weight: (L, E) [tokens] - load of each expert; taken as float32.
        num_slots: S, over all ranks.
        num_groups: expert groups; 1 for the global form.
        num_nodes: nodes of consecutive ranks; 1 for the global form.
        num_ranks: R; each rank owns consecutive slots.
        allow_duplicates: True is the reference rule. False gives an expert no more copies than a
            node has ranks, and keeps them on different ranks.

    Returns:
        phy2log, (L, S) int32; EMPTY only where duplicates are not allowed and no other expert is
        left to place.

    Raises:
        InvalidInput: sizes that do not divide; the message has the arithmetic.
        InfeasiblePlan: fewer slots than experts.
    """
    load = np.ascontiguousarray(weight, np.float32)
    if load.ndim != 2:
        raise ShapeMismatch(f"weight must be (L, E), got {load.shape}")
    layers, experts = load.shape
    _check_sizes(num_slots, experts, num_groups, num_nodes, num_ranks)
    # 1. Pack expert groups into nodes: `order` lists the experts of the first node, then the
    # second's.
    order = None
    if num_groups > 1:
        order = _order_by_node(load, num_groups, num_nodes)
        load = np.take_along_axis(load, order, axis=1)
    # 2. Replicate inside every node.
    load = load.reshape(layers * num_nodes, experts // num_nodes)
    ranks_per_node = num_ranks // num_nodes
    most = None if allow_duplicates else ranks_per_node
    logical, copies = replicate_experts(load, num_slots // num_nodes, most)
    per_copy = np.asarray(load / copies.astype(np.float32), np.float32)
    # 3. Pack replicas into the ranks of every node.
    rows = _pack_replicas(logical, per_copy, ranks_per_node)
    if not allow_duplicates and len(twice := _with_duplicates(rows, ranks_per_node)):
        per_rank = num_slots // num_ranks
        room = np.full((len(twice), ranks_per_node), per_rank)
        rows[twice] = pack_copies(load[twice].astype(np.float64), copies[twice], room, per_rank)
    if order is None:
        return rows
    first = np.arange(num_nodes, dtype=np.int32)[:, None] * (experts // num_nodes)
    by_node = rows.reshape(layers, num_nodes, -1)
    at = (np.maximum(by_node, 0) + first).reshape(layers, num_slots)
    held = rows.reshape(layers, num_slots) >= 0
    return np.where(held, np.take_along_axis(order, at, axis=1), EMPTY).astype(np.int32)


def _check_sizes(slots: int, experts: int, groups: int, nodes: int, ranks: int) -> None:
    for what, count, parts, of in (
        ("slots", slots, ranks, "ranks"),
        ("experts", experts, groups, "expert groups"),
        ("expert groups", groups, nodes, "nodes"),
        ("ranks", ranks, nodes, "nodes"),
    ):
        if words := undivided(count, what, parts, of):
            raise InvalidInput(words)


def _order_by_node(load: NDArray[np.float32], num_groups: int, num_nodes: int) -> NDArray[np.int32]:
    """Pack expert groups into nodes; return (L, E), the experts in the order of their nodes."""
    layers, experts = load.shape
    group_size = experts // num_groups
    per_group = load.reshape(layers, num_groups, group_size).sum(axis=2, dtype=np.float32)
    node, place = balanced_packing(per_group, num_nodes)
    first = (node * (num_groups // num_nodes) + place) * group_size
    new_id = first[:, :, None] + np.arange(group_size, dtype=np.int32)
    return np.argsort(new_id.reshape(layers, experts), axis=1).astype(np.int32)


def balanced_packing(
    weight: NDArray[np.float32], num_packs: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Put n items into packs of n / num_packs items each, keeping the heaviest pack light.

    Args:
        weight: (X, n) float32 - weight of each item, in X independent rows.
        num_packs: number of packs, which divides n.

    Returns:
        pack_index: (X, n) int32 - the pack of each item.
        position: (X, n) int32 - its place inside the pack, in the order packed.

    Order: equal weights in item order; equal packs lowest index first. Sums are float32, as in the
    source.
    """
    rows, items = weight.shape
    if items == num_packs:
        # With one item per pack there is nothing to choose: the source keeps the items in order.
        index = np.broadcast_to(np.arange(items, dtype=np.int32), (rows, items))
        return index.copy(), np.zeros((rows, items), np.int32)
    return _pack(np.ascontiguousarray(weight, np.float32), num_packs)


@kernel
def _pack(
    weight: NDArray[np.float32], num_packs: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pack every row."""
    rows, items = weight.shape
    room = items // num_packs
    pack_index = np.empty((rows, items), np.int32)
    position = np.empty((rows, items), np.int32)
    # Packs that still have room, in index order, so that a tie goes to the lowest index.
    open_packs = np.empty(num_packs, np.int64)
    total = np.empty(num_packs, np.float32)
    count = np.empty(num_packs, np.int64)
    for row in range(rows):
        total[:] = np.float32(0.0)
        count[:] = 0
        for pack in range(num_packs):
            open_packs[pack] = pack
        num_open = num_packs
        for item in np.argsort(-weight[row], kind="mergesort"):
            at = 0
            least = total[open_packs[0]]
            for i in range(1, num_open):
                candidate = total[open_packs[i]]
                if candidate < least:
                    least = candidate
                    at = i
            pack = open_packs[at]
            pack_index[row, item] = pack
            position[row, item] = count[pack]
            total[pack] += weight[row, item]
            count[pack] += 1
            if count[pack] == room:
                num_open -= 1
                for i in range(at, num_open):
                    open_packs[i] = open_packs[i + 1]
    return pack_index, position


def _pack_replicas(
    logical: NDArray[np.int32], per_copy: NDArray[np.float32], num_ranks: int
) -> NDArray[np.int32]:
    """Pack (X, s) replicas; return (X, s) phy2log with each rank's replicas side by side."""
    weight = np.take_along_axis(per_copy, np.maximum(logical, 0), axis=1)
    weight[logical < 0] = 0.0
    rank, position = balanced_packing(weight, num_ranks)
    rows = np.empty_like(logical)
    np.put_along_axis(rows, rank * (logical.shape[1] // num_ranks) + position, logical, axis=1)
    return rows


def _with_duplicates(rows: NDArray[np.int32], num_ranks: int) -> NDArray[np.int64]:
    """Return the numbers of the (X, s) rows in which a rank has an expert or empty slots twice."""
    by_rank = np.sort(rows.reshape(len(rows), num_ranks, -1), axis=2)
    return np.flatnonzero((by_rank[:, :, 1:] == by_rank[:, :, :-1]).any(axis=(1, 2)))


def plan_metro(problem: PlacementProblem) -> Proposal:
    """Plan by EPLB on the share of steps in which each expert is active, instead of tokens.

    Decode is often memory-bound: a rank's time then follows the number of experts that it
    activates. METRO routes every batch to the fewest replicas (`fewest` dispatch) over EPLB's
    placement; this carries the idea to the placement. It is a baseline; keel weighs both by the
    cost model.

    Args:
        problem: as for EPLB.

    Raises:
        InvalidInput, InfeasiblePlan: as EPLB.

    Source: METRO, arXiv 2512.09277.
    """
    active = np.minimum(problem.load, 1.0)
    placement, scores, form = choose_form(replace(problem, load=active))
    keep_nodes = float(form is Variant.HIERARCHICAL)
    return build_proposal(problem, placement, len(scores), {"keep_nodes": keep_nodes})


EPLB = PolicyEntry(
    "eplb",
    "DeepSeek's algorithm: replicas for the experts with most tokens, then an even split of the"
    " tokens over the ranks",
    plan_eplb,
)
METRO = PolicyEntry(
    "metro", "eplb, with the steps in which an expert has tokens at all as its load", plan_metro
)
EPLB_FORMS = (
    PolicyEntry(
        "eplb-global",
        "eplb over all ranks at once, for decode",
        partial(plan_eplb, variant=Variant.GLOBAL),
    ),
    PolicyEntry(
        "eplb-hierarchical",
        "eplb over nodes first and then inside each node, for prefill",
        partial(plan_eplb, variant=Variant.HIERARCHICAL),
    ),
)
"""Single forms, for deployments where it is known which form is better. Not every topology allows
the hierarchical one."""
