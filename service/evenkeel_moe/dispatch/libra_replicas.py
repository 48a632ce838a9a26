"""Libra's replication planning: the experts each rank fetches for one layer of one batch.

It uses predicted demand and runs while the previous layer computes. The copies are transient: they
live in a prefetch buffer for one layer, are in no placement, and are never the source of a copy.

Source: Libra, section 3.2 and Algorithm 1.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.libra_replication import plan_copies


class LibraVariant(StrEnum):
    """The algorithms that plan the fetched experts and shard the tokens."""

    PUBLISHED = "libra"
    """Algorithms 1 and 2 as printed."""
    REFINED = "libra-refined"
    """Phase 1 of Algorithm 1, then the rest of N for copies of the experts with the most remote
    tokens per host: N copies fit the window anyway, and predictions are never exact. Tokens are
    sharded with the least peak that is possible with whole tokens."""


@dataclass(frozen=True, eq=False, slots=True)
class TransientReplicas:
    """The experts every rank prefetches for one layer, and those it then holds."""

    hosts: NDArray[np.bool_]
    """(E, R) True if rank r can compute expert e, resident or transient."""
    extra: NDArray[np.int64]
    """(R, N) experts fetched, in the order chosen; -1 after the last."""

    @property
    def copies(self) -> int:
        """The number of experts fetched for this layer by all ranks."""
        return int((self.extra >= 0).sum())


def plan_replicas(
    demand: NDArray[np.generic],
    resident: NDArray[np.bool_],
    max_extra: int,
    *,
    locality: float = 0.5,
    variant: LibraVariant = LibraVariant.REFINED,
) -> TransientReplicas:
    """Choose transient replicas in two phases: for the own tokens of a rank, then for balance.

    Args:
        demand: (R, E) [tokens] predicted choices of the tokens of each rank.
        resident: (E, R) True if the rank holds the expert in the placement.
        max_extra: N, transient experts per rank.
        locality: alpha, the share of N that phase 1 may use.
        variant: the algorithm of phase 2.

    Returns:
        The fetched experts and the resulting hosts.

    Order: ties go to the lower expert id and the lower rank.

    Raises:
        ShapeMismatch: demand and residents are of different deployments.
        InvalidInput: demand or N is negative, or locality outside 0..1.
        InfeasiblePlan: no rank holds an expert.
    """
    load = np.ascontiguousarray(demand, np.float64)
    if load.ndim != 2 or resident.shape != load.shape[::-1]:
        raise ShapeMismatch(
            f"demand (R, E) {load.shape} and residents (E, R) {resident.shape} do not match"
        )
    if max_extra < 0 or not 0.0 <= locality <= 1.0:
        raise InvalidInput(
            f"max_extra {max_extra} must be >= 0 and locality {locality} within 0..1"
        )
    if not np.isfinite(load).all() or (load < 0).any():
        raise InvalidInput("demand must be finite and not negative")
    lost = np.flatnonzero(~resident.any(axis=1))
    if len(lost):
        raise InfeasiblePlan(
            f"{len(lost)} experts on no rank, first {lost[0]}", Reason.EXPERT_WITHOUT_REPLICA
        )
    room = np.full(len(load), max_extra, np.int64)
    refined = variant is LibraVariant.REFINED
    return TransientReplicas(
        *plan_copies(load, np.ascontiguousarray(resident), room, locality, refined)
    )
