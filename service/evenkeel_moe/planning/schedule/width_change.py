"""What has to move when a group gets another number of ranks, and which ranks to retire."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.quantities import numbered
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.schedule.survivors import surviving_placement

_MOST_CHOICES = 5000
"""Sets of ranks that are all compared. Of more the ranks are chosen one by one."""


def holders(placement: Placement) -> NDArray[np.bool_]:
    """Return (L, E, R), True where a rank holds a replica of an expert."""
    return np.stack([placement.held(layer) for layer in range(placement.num_layers)])


def copies_to(held: NDArray[np.bool_], target: Placement) -> int:
    """Count the experts that ranks must receive to reach a target.

    held: (L, E, M) what the ranks of the target hold now.
    """
    return int((holders(target) & ~held).sum())


def stranded(held: NDArray[np.bool_], retired: Iterable[int]) -> int:
    """Count the experts, over all layers, that live on retiring ranks alone; held: (L, E, R)."""
    stays = np.ones(held.shape[2], np.bool_)
    stays[list(retired)] = False
    return int((held.any(axis=2) & ~held[:, :, stays].any(axis=2)).sum())


def choose_retired(
    held: NDArray[np.bool_],
    topology: Topology,
    count: int,
    named: Sequence[int] = (),
    *,
    whole_nodes: bool = False,
) -> tuple[int, ...]:
    """Return the ranks to retire: the named ones, else so that the fewest experts live there alone.

    Up to 5,000 sets are all compared; of more, the rank that strands the fewest experts retires
    next. On a tie the ranks with the highest numbers retire.

    Args:
        held: (L, E, R) of `holders`.
        topology: the node of each rank.
        count: ranks to retire, 0..R-1.
        named: the ranks that somebody named, see `check_retired`; empty to choose them.
        whole_nodes: True to retire only all ranks of a node.

    Raises:
        ShapeMismatch: that many ranks, or those that are named, are not whole nodes.
    """
    if named:
        if whole_nodes:
            _check_whole(named, topology)
        return tuple(sorted(named))
    parts: list[tuple[int, ...]] = [(rank,) for rank in range(topology.num_ranks)]
    number = count
    if whole_nodes:
        size = node_size(topology)
        parts = [
            tuple(r for r, node in enumerate(topology.node_of_rank) if node == one)
            for one in range(topology.num_nodes)
        ]
        if count % size:
            raise ShapeMismatch(
                f"{count} ranks to retire are not whole nodes: each of the {len(parts)} nodes has"
                f" {size} ranks"
            )
        number = count // size
    by_part = np.stack([held[:, :, list(part)].any(axis=2).reshape(-1) for part in parts], axis=1)
    by_part, times = np.unique(by_part[by_part.any(axis=1)], axis=0, return_counts=True)
    if comb(len(parts), number) <= _MOST_CHOICES:
        chosen = _least_stranding(by_part, times, number)
    else:
        chosen = _one_by_one(by_part, times, number)
    return tuple(sorted(rank for part in chosen for rank in parts[part]))


def _check_whole(retired: Sequence[int], topology: Topology) -> None:
    for node in sorted({topology.node_of_rank[rank] for rank in retired}):
        members = {rank for rank, of in enumerate(topology.node_of_rank) if of == node}
        if stay := sorted(members - set(retired)):
            raise ShapeMismatch(
                f"node {node} would not retire as a whole: ranks {numbered(stay)} of it stay"
            )


def _least_stranding(
    by_part: NDArray[np.bool_], times: NDArray[np.int64], number: int
) -> tuple[int, ...]:
    """Return the parts whose loss strands the fewest experts; by_part: (X, N), times: (X,)."""
    holding = by_part.sum(axis=1)

    def loss(chosen: tuple[int, ...]) -> int:
        gone = by_part[:, list(chosen)].sum(axis=1)
        return int(times[gone == holding].sum())

    return min(combinations(reversed(range(by_part.shape[1])), number), key=loss)


def _one_by_one(
    by_part: NDArray[np.bool_], times: NDArray[np.int64], number: int
) -> tuple[int, ...]:
    left, chosen = by_part.copy(), list[int]()
    for _ in range(number):
        single = left.sum(axis=1) == 1
        loss = (times * single) @ left
        loss[chosen] = np.iinfo(np.int64).max
        chosen.append(int(len(loss) - 1 - np.argmin(loss[::-1])))
        left[:, chosen[-1]] = False
    return tuple(chosen)


def evacuate(current: Placement, shape: ModelShape, retired: Sequence[int]) -> Placement:
    """Return the placement with the fewest copies in which no expert lives on retiring ranks alone.

    Retiring ranks keep what they hold. The others are placed as if those had died.

    Args:
        current: the present placement.
        shape: of the present group.
        retired: ranks that exist, see `check_retired`.

    Raises:
        InfeasiblePlan: the other ranks have no room for an expert; in a tight pool also where a
            move of other experts would make it.
    """
    layers, ranks = shape.num_layers, shape.num_ranks
    kept = tuple(rank for rank in range(ranks) if rank not in retired)
    try:
        smaller = replace(shape, num_ranks=len(kept))
    except ShapeMismatch as error:
        raise InfeasiblePlan(str(error), error.reason) from error
    by_rank = current.phy2log.reshape(layers, ranks, -1).copy()
    stay = surviving_placement(current, kept, smaller)
    by_rank[:, kept] = stay.phy2log.reshape(layers, len(kept), -1)
    return Placement(by_rank.reshape(layers, -1), ranks, shape.num_logical_experts)


def node_size(topology: Topology) -> int:
    """Return the number of ranks of every node.

    Raises:
        ShapeMismatch: nodes differ in it.
    """
    sizes = sorted(set(np.bincount(topology.node_of_rank).tolist()))
    if len(sizes) > 1:
        raise ShapeMismatch(
            f"nodes have {', '.join(map(str, sizes))} ranks: a width in whole nodes needs equal"
            " ones"
        )
    return int(sizes[0])


def check_retired(retired: Sequence[int], num_ranks: int) -> None:
    """Check ranks that somebody named to retire.

    Raises:
        InvalidInput: one does not exist or is named twice, or none would be left.
    """
    unknown = [rank for rank in retired if not 0 <= rank < num_ranks]
    if unknown:
        raise InvalidInput(
            f"ranks {', '.join(map(str, unknown))} do not exist: the group has the ranks"
            f" 0 to {num_ranks - 1}"
        )
    if len(set(retired)) < len(retired):
        raise InvalidInput(f"a rank is named twice to retire: {', '.join(map(str, retired))}")
    if len(retired) == num_ranks:
        raise InvalidInput(f"all {num_ranks} ranks would retire: one must stay")


def widened(topology: Topology, kept: Sequence[int], num_ranks: int) -> Topology:
    """Return the nodes of another width: those of the kept ranks, and new ones for who joins.

    New nodes have as many ranks as the largest present one.
    """
    nodes = [topology.node_of_rank[rank] for rank in kept]
    size = int(np.bincount(topology.node_of_rank).max())
    first = topology.num_nodes
    nodes += [first + joiner // size for joiner in range(num_ranks - len(nodes))]
    names = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    return Topology(tuple(names[node] for node in nodes))


def carry_over(held: NDArray[np.bool_], shape: ModelShape, load: NDArray[np.float64]) -> Placement:
    """Return the placement at another width that needs the fewest copies.

    In each layer an optimal assignment gives every expert a slot, on a rank that holds it where
    there is room. Free slots then keep what their ranks hold, the heaviest expert first, or stay
    empty.

    Args:
        held: (L, E, M) what the ranks of the width hold now.
        shape: of the width. Of pooled slots every layer gets its share of each rank.
        load: (L, E) [tokens].
    """
    layers, experts, ranks = held.shape
    per_rank = shape.slots_per_rank
    if shape.pool_slots_per_rank is not None:
        per_rank = min(per_rank, shape.pool_slots_per_rank // layers)
    rows = np.full((layers, ranks, shape.slots_per_rank), EMPTY, np.int32)
    for layer in range(layers):
        missing = np.repeat(~held[layer], per_rank, axis=1).astype(np.float64)
        expert, slot = linear_sum_assignment(missing)
        rank = slot // per_rank
        rows[layer, rank, slot % per_rank] = expert
        placed = np.zeros((experts, ranks), np.bool_)
        placed[expert, rank] = True
        heaviest = np.argsort(-load[layer], kind="stable")
        for each in range(ranks):
            free = np.flatnonzero(rows[layer, each, :per_rank] == EMPTY)
            more = heaviest[(held[layer] & ~placed)[heaviest, each]][: len(free)]
            rows[layer, each, free[: len(more)]] = more
    return Placement(rows.reshape(layers, -1), ranks, experts)
