"""Libra's adaptive token sharding: chooses the replicas that serve remote tokens.

A token whose expert is on its own rank stays there: that is the local stage, which starts directly
after the gate. Only the other tokens are assigned, by a rule fast enough for a CPU thread in
parallel with that stage.

As published, this is Algorithm 2 as printed: a move takes the hottest remote expert's tokens until
the target rank is full, even if the relieved rank then falls below the mean, and then the rule goes
on to the next rank above the mean. It stops if a relief would need two moves in a row. The refined
rule solves the same problem to its optimum in whole tokens with the flow of `batch_split`, in less
time.

Source: Libra, section 3.3 and Algorithm 2.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.batch_split import list_layers, split_tokens
from evenkeel_moe.dispatch.libra_replicas import LibraVariant
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.jit import kernel


@dataclass(frozen=True, eq=False, slots=True)
class Sharding:
    """The assignment of tokens to ranks in one layer of one batch."""

    local: NDArray[np.int64]
    """(R, E) own [tokens] that rank r computes for expert e: the local stage."""
    remote: NDArray[np.int64]
    """(R, E) [tokens] of other ranks that rank r computes for expert e: the remote stage."""

    @property
    def rank_load(self) -> NDArray[np.int64]:
        """(R,) [tokens] of both stages."""
        return np.asarray((self.local + self.remote).sum(axis=1), np.int64)


def shard_tokens(
    demand: NDArray[np.integer[Any]],
    hosts: NDArray[np.bool_],
    resident: NDArray[np.bool_] | None = None,
    *,
    variant: LibraVariant = LibraVariant.REFINED,
    tolerance: float = 0.0,
) -> Sharding:
    """Assign remote tokens to hosts of their expert so that the load of the fullest rank is small.

    Args:
        demand: (R, E) [tokens] that the tokens of each rank chose.
        hosts: (E, R) True if the rank has the expert, transient copies included.
        resident: (E, R) the copies of the placement, over which Algorithm 2 splits remote tokens
            evenly before its first move; None means `hosts`.
        variant: the rule that assigns.
        tolerance: Algorithm 2 stops once no rank is above (1 + tolerance) times the mean.

    Returns:
        Whole tokens, each of which is computed exactly once.

    Order: ties go to the lower rank and the lower expert id.

    Raises:
        ShapeMismatch: the arguments are of different deployments.
        InvalidInput: demand or the tolerance is negative.
        InfeasiblePlan: no rank holds an expert that has tokens.
    """
    if tolerance < 0:
        raise InvalidInput(f"tolerance {tolerance} must not be negative")
    if demand.ndim != 2 or hosts.shape != demand.shape[::-1]:
        raise ShapeMismatch(
            f"demand (R, E) {demand.shape} and hosts (E, R) {hosts.shape} do not match"
        )
    tokens = np.asarray(demand, np.int64)
    if (tokens < 0).any():
        raise InvalidInput("demand must not be negative")
    homes = hosts if resident is None else resident
    local = np.where(hosts.T, tokens, 0)
    away = (tokens - local).sum(axis=0)
    lost = np.flatnonzero(~homes.any(axis=1) & (tokens.sum(axis=0) > 0))
    if len(lost):
        raise InfeasiblePlan(
            f"{len(lost)} experts with tokens on no rank, first {lost[0]}",
            Reason.EXPERT_WITHOUT_REPLICA,
        )
    if variant is LibraVariant.REFINED:
        return Sharding(local, _split_exactly(away, hosts, local))
    remote = split_evenly(away, homes)
    total = int(tokens.sum())
    ranks = len(tokens)
    # With whole tokens no split is better than the mean rounded up.
    target = -(-total // ranks)
    limit = max(float(target), (1.0 + tolerance) * total / ranks)
    _shard_kernel(np.ascontiguousarray(hosts), local.sum(axis=1), remote, target, limit)
    return Sharding(local, remote)


def split_evenly(away: NDArray[np.int64], homes: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Split (E,) remote tokens evenly over homes (E, R) -> (R, E), whole tokens.

    If the share is not whole, the first homes take one more. Each expert starts at another home, so
    that the additional tokens do not all go to one rank.
    """
    number = np.maximum(homes.sum(axis=1), 1)
    nth = np.cumsum(homes, axis=1) - 1
    turn = (nth + np.arange(len(away))[:, None]) % number[:, None]
    share = away[:, None] // number[:, None] + (turn < (away % number)[:, None])
    return np.ascontiguousarray(np.where(homes, share, 0).T, np.int64)


def _split_exactly(
    away: NDArray[np.int64], hosts: NDArray[np.bool_], local: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Split (E,) remote tokens over hosts (E, R), on top of the local tokens (R, E) -> (R, E)."""
    experts, ranks = hosts.shape
    # A slot for every expert on every rank, empty where the rank has nothing to take.
    wanted = np.where(hosts & (away > 0)[:, None], np.arange(experts)[:, None], -1)
    row = np.ascontiguousarray(wanted.T, np.int32).reshape(1, -1)
    first, following, order = list_layers(row, experts, ranks)
    flow, used = np.zeros(row.size), local.sum(axis=1).astype(np.float64)
    split_tokens(
        away.astype(np.float64), row[0], first[0], following[0], order[0], True, flow, used
    )
    return flow.round().astype(np.int64).reshape(ranks, experts)


@kernel
def _shard_kernel(
    hosts: NDArray[np.bool_],
    local_load: NDArray[np.int64],
    remote: NDArray[np.int64],
    target: int,
    limit: float,
) -> None:
    """Run Algorithm 2; changes remote (R, E) in place.

    It ends: a move lowers the sum of what ranks hold above the target, because it fills no rank
    above the target.
    """
    load = local_load + remote.sum(axis=1)
    while load.max() > limit:
        moved = False
        # The ranks in the order before the first move, as in line 4. A move changes only its source
        # and a rank below the target, so the load of a rank above it holds until its turn.
        for source in np.argsort(-load, kind="mergesort"):
            if load[source] <= target:
                break
            if _move_from(source, hosts, load, remote, target):
                moved = True
        if not moved:
            return


@kernel
def _move_from(
    source: int,
    hosts: NDArray[np.bool_],
    load: NDArray[np.int64],
    remote: NDArray[np.int64],
    target: int,
) -> bool:
    """Move tokens of the hottest remote expert of `source` that can be moved; False if none can."""
    for e in np.argsort(-remote[source], kind="mergesort"):
        if remote[source, e] <= 0:
            return False
        goal = -1
        for rank in range(load.shape[0]):
            if rank != source and hosts[e, rank] and (goal < 0 or load[rank] < load[goal]):
                goal = rank
        if goal < 0 or load[goal] >= target:
            continue
        amount = min(remote[source, e], target - load[goal])
        remote[source, e] -= amount
        remote[goal, e] += amount
        load[source] -= amount
        load[goal] += amount
        return True
    return False
