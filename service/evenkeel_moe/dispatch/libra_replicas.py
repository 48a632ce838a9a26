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
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement


class PlanningRule(StrEnum):
    """The rule that follows phase 1, in which each rank fetches what its own tokens choose most."""

    PUBLISHED = "published"
    """Phase 2 of Algorithm 1 as printed: the hottest remote expert of the fullest rank goes to the
    rank with the least load; phase 2 ends at the first expert that would overfill that rank."""
    BALANCED = "balanced"
    """Phase 2 counts remote tokens where token sharding will put them, on existing copies before
    it makes new ones. If the hottest expert cannot be placed, it tries the next one."""
    FULL = "full"
    """BALANCED, then the rest of N for further copies of the experts with the most remote tokens
    per host: N copies fit the window anyway, and predictions are never exact."""


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


def resident_mask(placement: Placement, layer: int) -> NDArray[np.bool_]:
    """Return (E, R) True if rank r holds expert e in the placement."""
    row = placement.phy2log[layer]
    held = row >= 0
    mask = np.zeros((placement.num_logical_experts, placement.num_ranks), np.bool_)
    mask[row[held], placement.rank_of_slot()[held]] = True
    return mask


def plan_replicas(
    demand: NDArray[np.generic],
    resident: NDArray[np.bool_],
    max_extra: int,
    *,
    locality: float = 0.5,
    rule: PlanningRule = PlanningRule.FULL,
) -> TransientReplicas:
    """Choose transient replicas in two phases: for the own tokens of a rank, then for balance.

    Args:
        demand: (R, E) [tokens] predicted choices of the tokens of each rank.
        resident: (E, R) True if the rank holds the expert in the placement.
        max_extra: N, transient experts per rank.
        locality: alpha, the share of N that phase 1 may use.
        rule: phase 2, and what follows it.

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
    hosts = np.array(resident, np.bool_, order="C")
    extra = np.full((load.shape[0], max_extra), -1, np.int64)
    taken = np.zeros(load.shape[0], np.int64)
    local_extra = int(max_extra * locality)
    _own_tokens_kernel(load, hosts, extra, taken, local_extra)
    if rule is PlanningRule.PUBLISHED:
        passes = (max_extra - local_extra) * len(load)
        _published_kernel(load, resident, hosts, extra, taken, passes)
    else:
        _balance_kernel(load, resident, hosts, extra, taken)
    if rule is PlanningRule.FULL:
        _fill_kernel(load, hosts, extra, taken)
    return TransientReplicas(hosts, extra)


@kernel
def _own_tokens_kernel(
    demand: NDArray[np.float64],
    hosts: NDArray[np.bool_],
    extra: NDArray[np.int64],
    taken: NDArray[np.int64],
    local_extra: int,
) -> None:
    """Run phase 1: each rank fetches the remote experts that its own tokens choose most.

    Writes hosts (E, R), extra (R, N) and taken (R,).
    """
    ranks, experts = demand.shape
    for rank in range(ranks):
        for _ in range(local_extra):
            best = -1
            for e in range(experts):
                if not hosts[e, rank] and demand[rank, e] > 0.0:
                    if best < 0 or demand[rank, e] > demand[rank, best]:
                        best = e
            if best < 0:
                break
            hosts[best, rank] = True
            extra[rank, taken[rank]] = best
            taken[rank] += 1


@kernel
def _predicted_load(
    demand: NDArray[np.float64], resident: NDArray[np.bool_], hosts: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the load (R,) and its remote part (R, E) under these hosts (E, R).

    Own tokens stay; remote ones are split evenly over the residents (E, R).
    """
    ranks, experts = demand.shape
    remote = np.zeros((ranks, experts))
    load = np.zeros(ranks)
    for e in range(experts):
        away = 0.0
        homes = 0
        for rank in range(ranks):
            homes += resident[e, rank]
            if hosts[e, rank]:
                load[rank] += demand[rank, e]
            else:
                away += demand[rank, e]
        for rank in range(ranks):
            if resident[e, rank]:
                remote[rank, e] = away / homes
                load[rank] += remote[rank, e]
    return load, remote


@kernel
def _published_kernel(
    demand: NDArray[np.float64],
    resident: NDArray[np.bool_],
    hosts: NDArray[np.bool_],
    extra: NDArray[np.int64],
    taken: NDArray[np.int64],
    passes: int,
) -> None:
    """Run lines 7 to 19 of Algorithm 1. They try one expert and one rank at a time.

    Where line 15 refuses that pair, nothing changes, so every later pass would refuse it too.
    """
    ranks, most = extra.shape
    load, remote = _predicted_load(demand, resident, hosts)
    target = load.sum() / ranks
    for _ in range(passes):
        source = int(np.argmax(load))
        if load[source] <= target:
            return
        e = int(np.argmax(remote[source]))
        if remote[source, e] <= 0.0:
            return
        goal = -1
        for rank in range(ranks):
            if not hosts[e, rank] and taken[rank] < most and (goal < 0 or load[rank] < load[goal]):
                goal = rank
        if goal < 0 or load[goal] + demand[goal, e] > target:
            return
        hosts[e, goal] = True
        extra[goal, taken[goal]] = e
        taken[goal] += 1
        # The own tokens of the new host were split evenly over the residents.
        share = demand[goal, e] / resident[e].sum()
        load[goal] += demand[goal, e]
        for rank in range(ranks):
            if resident[e, rank]:
                remote[rank, e] -= share
                load[rank] -= share


@kernel
def _balance_kernel(
    demand: NDArray[np.float64],
    resident: NDArray[np.bool_],
    hosts: NDArray[np.bool_],
    extra: NDArray[np.int64],
    taken: NDArray[np.int64],
) -> None:
    """Relieve the fullest rank over existing hosts of its experts, else by a copy.

    It ends: each move fills or relieves a rank or moves an expert away; each copy uses up budget.
    """
    ranks, experts = demand.shape
    load, remote = _predicted_load(demand, resident, hosts)
    target = load.sum() / ranks
    for _ in range(4 * ranks * experts):
        source = int(np.argmax(load))
        if load[source] <= target * (1.0 + 1e-9):
            return
        if _relieve(source, False, target, demand, hosts, extra, taken, remote, load, target):
            continue
        if _relieve(source, True, target, demand, hosts, extra, taken, remote, load, target):
            continue
        # If the own tokens of every rank exceed the target, a rank below the fullest is still a
        # relief.
        if not _relieve(
            source, True, load[source], demand, hosts, extra, taken, remote, load, target
        ):
            return


@kernel
def _fill_kernel(
    demand: NDArray[np.float64],
    hosts: NDArray[np.bool_],
    extra: NDArray[np.int64],
    taken: NDArray[np.int64],
) -> None:
    """Copy the experts with the most remote tokens per host to the ranks with the most room."""
    ranks, experts = demand.shape
    away = np.zeros(experts)
    count = np.zeros(experts, np.int64)
    for e in range(experts):
        for rank in range(ranks):
            if hosts[e, rank]:
                count[e] += 1
            else:
                away[e] += demand[rank, e]
    while True:
        best = -1
        for e in range(experts):
            if away[e] > 0.0 and (best < 0 or away[e] * count[best] > away[best] * count[e]):
                best = e
        if best < 0:
            return
        goal = -1
        for rank in range(ranks):
            if hosts[best, rank] or taken[rank] >= extra.shape[1]:
                continue
            if goal < 0 or taken[rank] < taken[goal]:
                goal = rank
        if goal < 0:
            away[best] = 0.0
            continue
        hosts[best, goal] = True
        extra[goal, taken[goal]] = best
        taken[goal] += 1
        count[best] += 1
        away[best] -= demand[goal, best]


@kernel
def _relieve(
    source: int,
    copying: bool,
    ceiling: float,
    demand: NDArray[np.float64],
    hosts: NDArray[np.bool_],
    extra: NDArray[np.int64],
    taken: NDArray[np.int64],
    remote: NDArray[np.float64],
    load: NDArray[np.float64],
    target: float,
) -> bool:
    """Move tokens of the fullest rank's hottest remote expert to the emptiest rank with a copy.

    With `copying`, that rank first gets a copy. It then always computes its own tokens for the
    expert, and must stay below `ceiling` with them.
    """
    ranks = remote.shape[0]
    for e in np.argsort(-remote[source], kind="mergesort"):
        if remote[source, e] <= 0.0:
            return False
        goal = -1
        for rank in range(ranks):
            if rank == source or hosts[e, rank] == copying:
                continue
            if copying and (
                taken[rank] >= extra.shape[1] or load[rank] + demand[rank, e] >= ceiling
            ):
                continue
            if goal < 0 or load[rank] < load[goal]:
                goal = rank
        if goal < 0 or load[goal] >= target * (1.0 - 1e-9):
            continue
        # The new host must have own tokens that so far go to another rank, else nothing is gained.
        if copying and ceiling > target and demand[goal, e] <= 0.0:
            continue
        if copying:
            hosts[e, goal] = True
            extra[goal, taken[goal]] = e
            taken[goal] += 1
            _localise(e, goal, source, demand[goal, e], remote, load)
        moved = max(min(remote[source, e], target - load[goal], load[source] - target), 0.0)
        remote[source, e] -= moved
        remote[goal, e] += moved
        load[source] -= moved
        load[goal] += moved
        return True
    return False


@kernel
def _localise(
    e: int,
    goal: int,
    source: int,
    tokens: float,
    remote: NDArray[np.float64],
    load: NDArray[np.float64],
) -> None:
    """Move the own tokens of a new host to it, first from the fullest rank."""
    load[goal] += tokens
    for turn in range(remote.shape[0] + 1):
        rank = source if turn == 0 else turn - 1
        taken = min(tokens, remote[rank, e])
        remote[rank, e] -= taken
        load[rank] -= taken
        tokens -= taken
