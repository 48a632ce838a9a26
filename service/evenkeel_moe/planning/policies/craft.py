"""The CRAFT policy: replicas in those layers where a replay of the window shows that they help.

Source: CRAFT section 4.2 and Appendix A, Algorithms 1-3.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.copies import (
    interleaved_capacity,
    pack_copies,
    replicate_experts,
)
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry
from evenkeel_moe.planning.policies.proposal import build_proposal
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Proposal, SlotBudget

_BLOCK = 64
"""Steps replayed together, in single precision: their rank loads stay in the first-level cache."""


class GainWeighting(StrEnum):
    """The value in the knapsack of giving a layer r replicas.

    The paper's text and its Algorithm 2 differ. Out of sample, 8 ranks, pooled slots, mean
    balancedness on the next steps (plain / by_replicas) at R = 4 and 8: DeepSeek-V2-Lite prefill in
    phases 0.792 / 0.783 and 0.798 / 0.794, decode in phases 0.770 / 0.767 and 0.773 / 0.770,
    prefill mixed 0.887 / 0.884 and 0.889 / 0.889; decode mixed within 0.001. On a small model with
    6 layers by_replicas is 0.0006 better on average. Plain is the default.
    """

    PLAIN = "plain"
    """The layer's gain in balancedness, as in the paper's text."""
    BY_REPLICAS = "by_replicas"
    """r times the gain, as in its Algorithm 2."""


class ReplicaRule(StrEnum):
    """The rule that chooses the replication factor R, replicas per rank."""

    MEMORY = "memory"
    """As many as the replica budget or the free slots hold."""
    MARGINAL_GAIN = "marginal_gain"
    """Double R while that gains at least `min_marginal_gain` balancedness per further replica."""
    KNEE = "knee"
    """The R at which the curve of gain over log2 R is farthest above its chord."""
    PER_REPLICA_GAIN = "per_replica_gain"
    """The R with the highest gain per replica: the automatic rule of the paper's section 4.2.1.
    Where each further replica gains less than the one before, this is the smallest R. The paper
    names R = 8 for its deployments; on all recorded traces this rule gives 1."""


@dataclass(frozen=True, slots=True)
class CraftOptions:
    """The choices that the paper leaves open."""

    weighting: GainWeighting = GainWeighting.PLAIN
    rule: ReplicaRule | None = None
    """None, as in the paper: all that a replica budget or `max_replicas_per_rank` allows, where an
    operator sets one; else PER_REPLICA_GAIN. Where each layer owns its slots, MEMORY: a slot left
    empty there gives its memory to nobody."""
    min_marginal_gain: float = 0.001
    """Balancedness, summed over layers, per replica; for the rule of that name."""
    max_replicas_per_rank: int | None = None
    """Upper bound on R: replicas of one rank over all layers. None: what the slots hold."""

    def __post_init__(self) -> None:
        if self.max_replicas_per_rank is not None and self.max_replicas_per_rank < 0:
            raise InvalidInput(
                f"max_replicas_per_rank is {self.max_replicas_per_rank}, must not be negative"
            )
        if not self.min_marginal_gain >= 0:
            raise InvalidInput(
                f"min_marginal_gain is {self.min_marginal_gain}, must not be negative"
            )


@dataclass(frozen=True, eq=False, slots=True)
class Benefit:
    """The result of Algorithm 1: the gain of each layer from each number of replicas."""

    counts: NDArray[np.int64]
    """(K,) replica counts tried: 2^0 .. 2^k up to R, as far as slots allow."""
    gain: NDArray[np.float64]
    """(K, L) mean balancedness with that many replicas minus that with none; may be negative."""
    base: NDArray[np.float64]
    """(L,) mean balancedness with none."""


def plan_craft(problem: PlacementProblem, options: CraftOptions = CraftOptions()) -> Proposal:
    """Plan by CRAFT: benefit, knapsack, interleaved capacity, greedy packing.

    Args:
        problem: move limits and the current placement are ignored. Where each layer owns its slots,
            layers share no memory; the knapsack still leaves out replicas that lose balance.
        options: weighting of gains and choice of R.

    Returns:
        numbers: `replicas` used over all layers, `replication_factor` allowed.

    Raises:
        InfeasiblePlan: a replica budget that cannot be met.
    """
    shape = problem.shape
    ranks, layers, experts = shape.num_ranks, shape.num_layers, shape.num_logical_experts
    budget = SlotBudget.of(problem)
    benefit = replica_benefit(problem.load, problem.topology, shape.slots_per_rank)
    if budget.pool_per_rank is None:
        fits = benefit.counts <= budget.per_layer - experts
        benefit = Benefit(benefit.counts[fits], benefit.gain[fits], benefit.base)
    replicas = budget.total - layers * experts
    if options.rule is None and (not shape.pooled or problem.replica_budget is not None):
        options = replace(options, rule=ReplicaRule.MEMORY)
    factor = choose_factor(benefit, ranks, replicas // ranks, options)
    if factor < replicas // ranks:
        replicas = factor * ranks
    allocation = allocate_replicas(benefit, replicas, options.weighting)
    total = problem.load.sum(axis=0)
    placement = place_replicas(total, allocation, problem.topology, shape.slots_per_rank)
    placed = int(placement.logcnt.sum()) - layers * experts
    return build_proposal(
        problem,
        placement,
        (len(benefit.counts) + 1) * layers,
        {"replicas": float(placed), "replication_factor": float(factor)},
    )


def replica_benefit(load: NDArray[np.float64], topology: Topology, slots_per_rank: int) -> Benefit:
    """Replay a window under placements with 0, 1, 2, 4, ... replicas in every layer (Algorithm 1).

    Args:
        load: (T, L, E) [tokens].
        topology: the ranks.
        slots_per_rank: most slots of a layer that a placement fills on a rank; all together hold
            one copy of every expert at least.

    Returns:
        Gains per layer, each against the layer's own placement without replicas.
    """
    _, layers, experts = load.shape
    ranks = topology.num_ranks
    slots = ranks * slots_per_rank
    most = min(slots, ranks * experts) - experts
    counts = [2**k for k in range(ranks.bit_length()) if 2**k <= min(ranks, most)]
    total = load.sum(axis=0)
    rows = np.empty((layers, 1 + len(counts), slots), np.int32)
    share = np.empty(rows.shape, np.float32)
    for k, replicas in enumerate([0, *counts]):
        placement = place_replicas(total, np.full(layers, replicas), topology, slots_per_rank)
        rows[:, k], copies = placement.phy2log, placement.logcnt
        held = np.maximum(rows[:, k], 0)
        share[:, k] = np.where(rows[:, k] >= 0, 1.0 / np.take_along_axis(copies, held, axis=1), 0.0)
    balance = np.stack(
        [replay_layer(load[:, layer], rows[layer], share[layer], ranks) for layer in range(layers)],
        axis=1,
    )
    return Benefit(np.array(counts, np.int64), balance[1:] - balance[0], balance[0])


def allocate_replicas(
    benefit: Benefit, budget: int, weighting: GainWeighting = GainWeighting.PLAIN
) -> NDArray[np.int64]:
    """Choose the replicas of every layer under a total budget, by the knapsack of Algorithm 2.

    Args:
        benefit: gains by layer and count.
        budget: most replicas over all layers, at least 0; fewer are used where more would lose
            balance.
        weighting: the value of a gain.

    Returns:
        (L,) int64 - 0 or one of `benefit.counts`.
    """
    layers = len(benefit.base)
    allocation = np.zeros(layers, np.int64)
    if len(benefit.counts) == 0 or budget == 0:
        return allocation
    value = benefit.gain
    if weighting is GainWeighting.BY_REPLICAS:
        value = value * benefit.counts[:, None]
    best, choice = knapsack(value, benefit.counts, budget)
    # Use the smallest budget that reaches the highest value: memory that gains nothing stays free.
    left = int(np.nonzero(best == best[-1])[0][0])
    for layer in range(layers - 1, -1, -1):
        taken = choice[layer, left]
        if taken >= 0:
            allocation[layer] = benefit.counts[taken]
            left -= int(benefit.counts[taken])
    return allocation


def gain_of(benefit: Benefit, allocation: NDArray[np.int64]) -> float:
    """Return the balancedness that an allocation (L,) gains, summed over layers."""
    index = np.searchsorted(benefit.counts, allocation)
    taken = allocation > 0
    return float(benefit.gain[index[taken], np.nonzero(taken)[0]].sum())


def factor_by_memory(free_bytes_per_rank: int, bytes_per_expert: int) -> int:
    """Return the R that fits the free memory of a rank: each replica is one expert of some layer.

    Raises:
        InvalidInput: a negative size, or experts without bytes.
    """
    if free_bytes_per_rank < 0 or bytes_per_expert < 1:
        raise InvalidInput(
            f"{free_bytes_per_rank} free bytes / {bytes_per_expert} bytes per expert is not a"
            " number of replicas"
        )
    return free_bytes_per_rank // bytes_per_expert


def choose_factor(
    benefit: Benefit, num_ranks: int, most: int, options: CraftOptions = CraftOptions()
) -> int:
    """Choose the replication factor R by the rule of the options.

    Args:
        benefit: gains by layer and count.
        num_ranks: a factor of R is R * num_ranks replicas.
        most: largest factor that memory allows.
        options: rule, threshold and upper bound.

    Returns:
        0..most; factors are tried in powers of two, and the largest one itself.
    """
    rule, bound = options.rule, options.max_replicas_per_rank
    if rule is None:
        rule = ReplicaRule.PER_REPLICA_GAIN if bound is None else ReplicaRule.MEMORY
    most = most if bound is None else min(most, bound)
    if most < 1 or rule is ReplicaRule.MEMORY:
        return int(max(most, 0))
    factors = [2**k for k in range(most.bit_length()) if 2**k <= most]
    if factors[-1] != most:
        factors.append(most)
    gains = np.array(
        [
            gain_of(benefit, allocate_replicas(benefit, f * num_ranks, options.weighting))
            for f in factors
        ]
    )
    if rule is ReplicaRule.MARGINAL_GAIN:
        chosen, before = 0, 0.0
        for factor, gain in zip(factors, gains, strict=True):
            if gain - before < options.min_marginal_gain * (factor - chosen) * num_ranks:
                break
            chosen, before = factor, gain
        return int(chosen)
    if rule is ReplicaRule.PER_REPLICA_GAIN:
        best = int(np.argmax(gains / np.array(factors)))
        return int(factors[best]) if gains[best] > 0 else 0
    if len(factors) < 3 or gains[-1] <= gains[0]:
        return int(factors[0])
    at = np.log2(factors)
    chord = gains[0] + (gains[-1] - gains[0]) * (at - at[0]) / (at[-1] - at[0])
    return int(factors[int(np.argmax(gains - chord))])


def place_replicas(
    total: NDArray[np.float64],
    allocation: NDArray[np.int64],
    topology: Topology,
    slots_per_rank: int,
) -> Placement:
    """Place a given allocation: copies by load, interleaved capacity, greedy packing.

    No expert gets more copies than there are ranks: load must not be divided by copies that no rank
    can hold.

    Args:
        total: (L, E) [tokens] over the window.
        allocation: (L,) replicas of each layer; fewer are placed where no rank can take another.
        topology: the ranks.
        slots_per_rank: local slots of a layer.

    Raises:
        InfeasiblePlan: more copies than slots.
    """
    ranks, experts = topology.num_ranks, total.shape[1]
    capacity = interleaved_capacity(experts + allocation, topology)
    copies = np.empty(total.shape, np.int32)
    for layer, replicas in enumerate(allocation.tolist()):
        weight = total[layer : layer + 1].astype(np.float32)
        copies[layer] = replicate_experts(weight, experts + replicas, ranks)[1][0]
    return Placement(pack_copies(total, copies, capacity, slots_per_rank), ranks, experts)


@kernel
def replay_layer(
    load: NDArray[np.float64], rows: NDArray[np.int32], share: NDArray[np.float32], num_ranks: int
) -> NDArray[np.float64]:
    """Return the mean balancedness of one layer, over the steps that have load, for each placement.

    Args:
        load: (T, E) [tokens]; may be a strided view.
        rows: (K, S) slots of each placement.
        share: (K, S) share of its expert's tokens that each slot takes.
        num_ranks: R.

    Returns:
        (K,) float64; 1 where the window has no load, because nothing can be gained then.
    """
    steps, experts = load.shape
    plans, slots = rows.shape
    per_rank = slots // num_ranks
    tokens = np.empty((experts, _BLOCK), np.float32)
    total = np.empty(_BLOCK, np.float32)
    rank_load = np.empty(_BLOCK, np.float32)
    peak = np.empty(_BLOCK, np.float32)
    sums = np.zeros(plans)
    counted = 0
    for start in range(0, steps, _BLOCK):
        width = min(_BLOCK, steps - start)
        if width < _BLOCK:
            tokens[:] = np.float32(0.0)
        for b in range(width):
            for expert in range(experts):
                tokens[expert, b] = np.float32(load[start + b, expert])
        total[:] = np.float32(0.0)
        for expert in range(experts):
            for b in range(_BLOCK):
                total[b] += tokens[expert, b]
        for b in range(width):
            counted += total[b] > 0.0
        for plan in range(plans):
            peak[:] = np.float32(0.0)
            for rank in range(num_ranks):
                rank_load[:] = np.float32(0.0)
                for slot in range(rank * per_rank, (rank + 1) * per_rank):
                    part = share[plan, slot]
                    if part > 0.0:
                        held = np.uint32(rows[plan, slot])
                        for b in range(_BLOCK):
                            rank_load[b] += part * tokens[held, b]
                for b in range(_BLOCK):
                    if rank_load[b] > peak[b]:
                        peak[b] = rank_load[b]
            for b in range(width):
                if total[b] > 0.0:
                    sums[plan] += float(total[b]) / num_ranks / float(peak[b])
    if counted == 0:
        return np.ones(plans)
    return sums / counted


@kernel
def knapsack(
    value: NDArray[np.float64], counts: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Run Algorithm 2 for every capacity at once.

    Args:
        value: (K, L) value of giving layer l `counts[k]` replicas.
        counts: (K,) replicas, positive.
        capacity: C.

    Returns:
        best: (C + 1,) highest value with at most c replicas. Zero replicas have the value 0, so it
            never falls below 0 and never falls with c.
        choice: (L, C + 1) index into `counts` taken for a layer, -1 for none.

    Complexity: O(L C K) time, O(L C) space.
    """
    options, layers = value.shape
    best = np.zeros(capacity + 1)
    choice = np.full((layers, capacity + 1), -1)
    for layer in range(layers):
        before = best.copy()
        for c in range(capacity + 1):
            for k in range(options):
                if counts[k] <= c and before[c - counts[k]] + value[k, layer] > best[c]:
                    best[c] = before[c - counts[k]] + value[k, layer]
                    choice[layer, c] = k
    return best, choice


CRAFT = PolicyEntry(
    "craft",
    "for each layer its own number of replicas, so that they use little memory",
    plan_craft,
    CraftOptions,
    ("rule", "max_replicas_per_rank", "min_marginal_gain", "weighting"),
)
