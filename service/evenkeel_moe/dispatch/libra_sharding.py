"""Libra's adaptive token sharding: chooses the replicas that serve remote tokens.

A token whose expert is on its own rank stays there: that is the local stage, which starts directly
after the gate. Only the other tokens are assigned, by a rule fast enough for a CPU thread in
parallel with that stage.

There are three rules:

- GREEDY is Algorithm 2 as printed. A move takes the hottest remote expert's tokens until the
  target rank is full, even if the relieved rank then falls below the mean. After a move the rule
  goes on to the next rank above the mean.
- BOUNDED differs in two ways. A move takes at most the excess of the relieved rank, and the rule
  starts again with the fullest rank after each move, as the text of section 3.3 says.
- EXACT solves the same problem to its optimum in whole tokens with the flow of `batch_split`, in
  less time. Both others stop if a relief would need two moves in a row.

Source: Libra, section 3.3 and Algorithm 2.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.batch_split import list_layers, split_tokens
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.jit import kernel


class ShardingRule(StrEnum):
    """A rule that assigns remote tokens."""

    GREEDY = "greedy"
    """Algorithm 2 as printed."""
    BOUNDED = "bounded"
    """Algorithm 2, moving at most the excess of the relieved rank and starting again after a
    move."""
    EXACT = "exact"
    """The least peak that is possible with whole tokens."""


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


def split_by_locality(
    demand: NDArray[np.integer[Any]],
    hosts: NDArray[np.bool_],
    resident: NDArray[np.bool_] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split demand into tokens that stay and tokens that go, unbalanced, to other ranks.

    Args:
        demand: (R, E) [tokens] that the tokens of each rank chose.
        hosts: (E, R) True if the rank has the expert, transient copies included.
        resident: (E, R) the copies of the placement, over which remote tokens are split evenly;
            None means `hosts`.

    Returns:
        (local (R, E), remote (R, E)) int64 [tokens]; their sum over ranks is the demand of each
        expert.

    Raises:
        ShapeMismatch: the arguments are of different deployments.
        InvalidInput: demand is negative.
        InfeasiblePlan: no rank holds an expert that has tokens.
    """
    if demand.ndim != 2 or hosts.shape != demand.shape[::-1]:
        raise ShapeMismatch(
            f"demand (R, E) {demand.shape} and hosts (E, R) {hosts.shape} do not match"
        )
    tokens = np.asarray(demand, np.int64)
    if (tokens < 0).any():
        raise InvalidInput("demand must not be negative")
    homes = hosts if resident is None else resident
    lost = np.flatnonzero(~homes.any(axis=1) & (tokens.sum(axis=0) > 0))
    if len(lost):
        raise InfeasiblePlan(
            f"{len(lost)} experts with tokens on no rank, first {lost[0]}",
            Reason.EXPERT_WITHOUT_REPLICA,
        )
    local = np.where(hosts.T, tokens, 0)
    away = (tokens - local).sum(axis=0)
    number = np.maximum(homes.sum(axis=1), 1)
    nth = np.cumsum(homes, axis=1) - 1
    # Whole tokens: if the share is not whole, the first residents take one more. Each expert starts
    # at another resident, so that the additional tokens do not all go to one rank.
    turn = (nth + np.arange(len(away))[:, None]) % number[:, None]
    share = away[:, None] // number[:, None] + (turn < (away % number)[:, None])
    return local, np.where(homes, share, 0).T.astype(np.int64)


def shard_tokens(
    demand: NDArray[np.integer[Any]],
    hosts: NDArray[np.bool_],
    resident: NDArray[np.bool_] | None = None,
    *,
    rule: ShardingRule = ShardingRule.EXACT,
    tolerance: float = 0.0,
) -> Sharding:
    """Assign remote tokens to hosts of their expert so that the load of the fullest rank is small.

    Args:
        demand: (R, E) [tokens] that the tokens of each rank chose.
        hosts: (E, R) True if the rank has the expert, transient copies included.
        resident: (E, R) the copies with which GREEDY and BOUNDED start; None means `hosts`.
        rule: the rule that assigns.
        tolerance: GREEDY and BOUNDED stop once no rank is above (1 + tolerance) times the mean.

    Returns:
        Whole tokens, each of which is computed exactly once.

    Order: ties go to the lower rank and the lower expert id.

    Raises:
        ShapeMismatch, InvalidInput, InfeasiblePlan: as `split_by_locality`; or a negative
            tolerance.
    """
    if tolerance < 0:
        raise InvalidInput(f"tolerance {tolerance} must not be negative")
    local, remote = split_by_locality(demand, hosts, resident)
    remote = np.ascontiguousarray(remote)
    if rule is ShardingRule.EXACT:
        return Sharding(local, _split_exactly(hosts, local, remote.sum(axis=0)))
    total = int(local.sum() + remote.sum())
    ranks = local.shape[0]
    # With whole tokens no split is better than the mean rounded up.
    target = -(-total // ranks)
    limit = max(float(target), (1.0 + tolerance) * total / ranks)
    bounded = rule is ShardingRule.BOUNDED
    _shard_kernel(np.ascontiguousarray(hosts), local.sum(axis=1), remote, target, limit, bounded)
    return Sharding(local, remote)


@kernel
def _shard_kernel(
    hosts: NDArray[np.bool_],
    local_load: NDArray[np.int64],
    remote: NDArray[np.int64],
    target: int,
    limit: float,
    bounded: bool,
) -> None:
    """Run Algorithm 2, or its bounded form; changes remote (R, E) in place.

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
            if _move_from(source, hosts, load, remote, target, bounded):
                moved = True
                if bounded:
                    break
        if not moved:
            return


@kernel
def _move_from(
    source: int,
    hosts: NDArray[np.bool_],
    load: NDArray[np.int64],
    remote: NDArray[np.int64],
    target: int,
    bounded: bool,
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
        if bounded:
            amount = min(amount, load[source] - target)
        remote[source, e] -= amount
        remote[goal, e] += amount
        load[source] -= amount
        load[goal] += amount
        return True
    return False


def _split_exactly(
    hosts: NDArray[np.bool_], local: NDArray[np.int64], away: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Split (E,) remote tokens over hosts (E, R), on top of the local tokens (R, E) -> (R, E)."""
    experts, ranks = hosts.shape
    rank, expert = np.nonzero(hosts.T & (away > 0))
    number = np.bincount(rank, minlength=ranks)
    local_slot = np.arange(len(rank)) - np.repeat(number.cumsum() - number, number)
    rows = np.full((1, ranks, max(1, number.max())), -1, np.int32)
    rows[0, rank, local_slot] = expert
    row = rows.reshape(1, -1)
    first, following, order = list_layers(row, experts, ranks)
    flow, used = np.zeros(row.size), local.sum(axis=1).astype(np.float64)
    split_tokens(
        away.astype(np.float64), row[0], first[0], following[0], order[0], True, flow, used
    )
    remote = np.zeros((ranks, experts), np.int64)
    remote[rank, expert] = flow.reshape(ranks, -1)[rank, local_slot].round()
    return remote
