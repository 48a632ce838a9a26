"""Models how the dispatcher of an engine splits the tokens of an expert over its replicas.

Three models fix a share per slot for all batches: EVEN, NEAREST and WATERFILL (`slot_shares`).
OPTIMAL and FEWEST decide for every batch (`slot_load`). A placement planned for one model may be
bad under another, so every score takes a `SplitModel`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem import kernels
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, rank_shares


@dataclass(frozen=True, eq=False, slots=True)
class SplitModel:
    """The model of a dispatcher and the data it needs."""

    dispatch: DispatchModel = DispatchModel.EVEN
    topology: Topology | None = None
    """For NEAREST; None means one node."""
    source_load: NDArray[np.float64] | None = None
    """(R, L, E) [tokens] routed by each source rank, for NEAREST; None means that tokens start
    evenly on all ranks."""

    @classmethod
    def of(cls, problem: PlacementProblem) -> "SplitModel":
        """Return the model under which a problem is scored."""
        return cls(problem.objective.dispatch, problem.topology, problem.source_load)


EVEN_SPLIT = SplitModel()


def slot_shares(placement: Placement, split: SplitModel = EVEN_SPLIT) -> NDArray[np.float64]:
    """Return the share of its expert's tokens each slot receives under a model that fixes shares.

    Args:
        placement: (L, S) slots on R ranks.
        split: EVEN, WATERFILL or NEAREST. NEAREST: a source rank uses its own replicas, else those
            on its node, else all; evenly if there are several.

    Returns:
        (L, S) float64 in [0, 1]; the shares of an expert sum to 1, empty slots have 0.

    Raises:
        InvalidInput: the model has no fixed shares.
        ShapeMismatch: the topology or source loads are of another deployment.
    """
    if split.dispatch.per_batch:
        raise InvalidInput(
            f"{split.dispatch} dispatch splits each batch by itself and has no fixed shares;"
            " use slot_load"
        )
    if split.dispatch is not DispatchModel.NEAREST:
        # A copy: numba would compile another version for a read-only array.
        return placement.even_shares.copy()
    layers, _, ranks, experts = placement.sizes
    topology = split.topology if split.topology is not None else Topology.single_node(ranks)
    if topology.num_ranks != ranks:
        raise ShapeMismatch(f"topology has {topology.num_ranks} ranks, placement {ranks}")
    node_of_rank = np.array(topology.node_of_rank, np.int64)
    source = split.source_load
    if source is None:
        origin = np.full((ranks, 1, 1), 1.0 / ranks)
    elif source.shape != (ranks, layers, experts):
        raise ShapeMismatch(
            f"source_load must be ({ranks}, {layers}, {experts}), got {source.shape}"
        )
    else:
        origin = rank_shares(source)
    return kernels.nearest_shares_kernel(placement.phy2log.copy(), node_of_rank, origin, experts)


def source_shares(split: SplitModel, num_ranks: int, num_layers: int) -> NDArray[np.float64]:
    """Return the (L, R) share of a layer's tokens that start on each rank; even where not known.

    Raises:
        ShapeMismatch: the source loads are of another deployment.
    """
    source = split.source_load
    if source is None:
        return np.full((num_layers, num_ranks), 1.0 / num_ranks)
    if source.shape[:2] != (num_ranks, num_layers):
        raise ShapeMismatch(
            f"source_load must be ({num_ranks}, {num_layers}, E), got {source.shape}"
        )
    return rank_shares(source.sum(axis=2)).T


def slot_load(
    load: NDArray[np.generic], placement: Placement, split: SplitModel = EVEN_SPLIT
) -> NDArray[np.float64]:
    """Return the tokens each slot receives in every step.

    Args:
        load: (T, L, E) [tokens].
        placement: (L, S) slots on R ranks.
        split: how tokens split over replicas. OPTIMAL minimises the largest rank load of every
            batch exactly, FEWEST the largest number of active experts; among several such splits
            both deterministically take one.

    Returns:
        (T, L, S) float64 [tokens], summing to the load.

    Raises:
        ShapeMismatch: load and placement differ in layers or experts.
        InfeasiblePlan: an expert that has load has no replica.
    """
    tokens = check_load(load, placement)
    if split.dispatch.per_batch:
        fewest = split.dispatch is DispatchModel.FEWEST
        rows = placement.phy2log.copy()
        return kernels.batch_split_kernel(tokens, rows, placement.num_ranks, fewest)
    held = np.where(placement.phy2log >= 0, placement.phy2log, 0)
    routed = np.take_along_axis(tokens, held[None], axis=2)
    return np.asarray(routed * slot_shares(placement, split), np.float64)


def check_load(load: NDArray[np.generic], placement: Placement) -> NDArray[np.float64]:
    """Return a (T, L, E) load as contiguous float64, checked as by `check_counts`."""
    return np.ascontiguousarray(check_counts(load, placement), np.float64)


def check_counts(
    load: NDArray[np.generic], placement: Placement
) -> NDArray[np.float64] | NDArray[np.uint32]:
    """Return a (T, L, E) load as a contiguous array, after a check against the placement.

    Returns:
        uint32 counts stay uint32, because a window of a large model takes hundreds of megabytes as
        float64; all other types become float64.

    Raises:
        ShapeMismatch: load and placement differ in layers or experts.
        InfeasiblePlan: an expert that has load has no replica; the score would miss its tokens.
    """
    tokens: NDArray[np.float64] | NDArray[np.uint32]
    if np.asarray(load).dtype == np.uint32:
        tokens = np.ascontiguousarray(load, np.uint32)
    else:
        tokens = np.ascontiguousarray(load, np.float64)
    layers, _, _, experts = placement.sizes
    if tokens.ndim != 3 or tokens.shape[1:] != (layers, experts):
        raise ShapeMismatch(f"load must be (T, {layers}, {experts}), got {tokens.shape}")
    lost = placement.logcnt == 0
    if lost.any():
        routed = np.argwhere(lost & (tokens > 0).any(axis=0))
        if len(routed):
            layer, expert = routed[0]
            raise InfeasiblePlan(
                f"{len(routed)} experts with load have no replica,"
                f" first: layer {layer} expert {expert}",
                Reason.EXPERT_WITHOUT_REPLICA,
            )
    return tokens
