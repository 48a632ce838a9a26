"""Compares numbers of replicas: their balance, predicted MoE time and memory.

Two rules of placement are compared: the same number of replicas in every layer, and CRAFT, which
gives each layer its own number within R replicas per rank over all layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.model.unknown import NanIfUnknown
from evenkeel_moe.planning.decision.verdict import MIN_STEPS, Call, Verdict, judge
from evenkeel_moe.planning.policies.craft import (
    Benefit,
    CraftOptions,
    ReplicaRule,
    allocate_replicas,
    choose_factor,
    place_replicas,
    replica_benefit,
)
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.token_split import SplitModel


@dataclass(frozen=True, slots=True)
class ReplicaLevel:
    """One number of extra replicas, the same in every layer."""

    replicas_per_layer: int
    gain: NanIfUnknown
    """Share of predicted MoE time saved compared with the present number; negative if it takes
    more."""
    gain_lower: NanIfUnknown
    gain_upper: NanIfUnknown
    marginal_gain: float | None
    """Share saved compared with the level below, per replica and layer; null for the first."""
    extra_bytes_per_rank: int | None
    """Memory that the fullest rank would need in addition, negative if some is freed. Null if the
    size of an expert is unknown."""
    fits: bool | None
    """True if the rank with the least free memory could hold it. Null if free memory or the size of
    an expert is unknown."""
    balancedness: float | None
    """Mean over layers on the scored steps; null without load."""


@dataclass(frozen=True, slots=True)
class CraftLevel:
    """CRAFT's allocation for one replication factor; it needs slots pooled over layers."""

    replication_factor: int
    """R: replicas of one rank over all layers, at most."""
    replicas: int
    """Replicas used, over all layers and ranks; fewer than R x ranks where more would not help."""
    layers_with_replicas: int
    gain: NanIfUnknown
    """Share of predicted MoE time saved compared with the present number."""
    gain_lower: NanIfUnknown
    gain_upper: NanIfUnknown
    extra_bytes_per_rank: int | None
    fits: bool | None
    balancedness: float | None


@dataclass(frozen=True, slots=True)
class CraftFactors:
    """The replication factor R that each automatic rule of CRAFT would choose."""

    per_replica_gain: int
    """The rule of the paper's text: the highest gain of balancedness per replica."""
    knee: int
    """The bend of the curve of gain over log2 R."""
    memory: int | None
    """As many as fit beside the present replicas, at most one per layer. Null if free memory or the
    size of an expert is unknown."""


@dataclass(frozen=True, slots=True)
class CraftAllocation:
    """CRAFT's choice of R, the replicas that it then gives each layer, and what it is based on."""

    replication_factor: int
    """R: replicas of one rank over all layers."""
    counts: tuple[int, ...]
    """(K,) numbers of replicas tried in every layer, beside none."""
    base: tuple[float, ...]
    """(L,) balancedness without replicas, on the steps planned on."""
    gain: tuple[tuple[float, ...], ...]
    """(L, K) balancedness that a layer gains with that many replicas; may be negative."""
    replicas: tuple[int, ...]
    """(L,) replicas of each layer."""


@dataclass(frozen=True, slots=True)
class Redundancy:
    """Numbers of replicas compared: placed by simple rules and scored on the same steps."""

    present: int
    """Extra replicas per layer now; the average if slots are pooled."""
    advised: int
    """More than the present number if they save `min_gain` for sure and memory holds them; fewer if
    they cost less than `min_gain` for sure; else the present number."""
    levels: tuple[ReplicaLevel, ...]
    num_layers: int
    craft: tuple[CraftLevel, ...]
    craft_factors: CraftFactors | None
    craft_allocation: CraftAllocation | None
    moe_share: float | None
    """Predicted MoE time with the present number / time of a step; null unless both are known in
    seconds."""


@dataclass(frozen=True, eq=False, slots=True)
class LevelPart:
    """Steps on which replicas are placed, and the later steps on which they are scored."""

    planned_on: NDArray[np.generic]
    """(T, L, E) [tokens]."""
    scored_on: NDArray[np.generic]
    """(T', L, E) [tokens]."""
    split: SplitModel


@dataclass(frozen=True, eq=False, slots=True)
class LevelInputs:
    """All that a comparison of numbers of replicas needs."""

    shape: ModelShape
    topology: Topology
    cost: CostModel
    parts: tuple[LevelPart, ...]
    """At least one, oldest first."""
    min_steps: int = MIN_STEPS
    """Fewest scored steps from which other numbers are advised."""
    lifetime_steps: int = 1000
    min_gain: float = 0.0
    """Share of predicted MoE time that other numbers of replicas must save to be advised."""
    free_bytes: int | None = None
    """Free memory of the rank with least; None if unknown."""
    step_s: float | None = None
    """Seconds of a step; None if unknown."""
    craft: CraftOptions = CraftOptions()
    """By which CRAFT chooses R."""


@dataclass(frozen=True, eq=False, slots=True)
class _Scored:
    """One number of replicas on the scored steps."""

    times: NDArray[np.float64]
    """(T',) predicted MoE times of all parts."""
    balancedness: float | None
    allocations: tuple[NDArray[np.int64], ...]
    """(L,) replicas of each layer, by part."""

    @property
    def largest(self) -> NDArray[np.int64]:
        """The allocation with the most replicas: memory must hold it."""
        return max(self.allocations, key=lambda allocation: int(allocation.sum()))


def compare_levels(inputs: LevelInputs) -> Redundancy:
    """Compare powers of two, up to two replicas per rank, the present number, and CRAFT."""
    shape = inputs.shape
    present = shape.num_redundant
    most = min(2 * shape.num_ranks, shape.num_logical_experts * (shape.num_ranks - 1))
    tried = sorted({0, *_powers(most), present})
    scored = {
        replicas: _score(
            inputs, [np.full(shape.num_layers, replicas, np.int64)] * len(inputs.parts)
        )
        for replicas in tried
    }
    levels = tuple(
        _level(inputs, scored, below, replicas)
        for below, replicas in zip([None, *tried], tried, strict=False)
    )
    benefits = [_benefit(inputs, part) for part in inputs.parts]
    return Redundancy(
        present,
        _advised(inputs, levels, scored),
        levels,
        shape.num_layers,
        _craft_levels(inputs, benefits, scored[present]),
        _craft_factors(inputs, benefits[-1]),
        _craft_allocation(inputs, benefits[-1]),
        _moe_share(inputs, scored[present]),
    )


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


# --- scoring --------------------------------------------------------------------------------------


def _score(inputs: LevelInputs, allocations: Sequence[NDArray[np.int64]]) -> _Scored:
    """Place (L,) replicas for each part, and score them on the later steps of the part."""
    times, balance, steps = [], [], []
    for part, allocation in zip(inputs.parts, allocations, strict=True):
        placement = _place(inputs, part, allocation)
        times.append(
            moe_time.step_times(part.scored_on, placement, inputs.cost, part.split).sum(axis=1)
        )
        loads = metrics.rank_load(part.scored_on, placement, part.split)
        balance.append(metrics.balancedness_mean(loads))
        steps.append(len(part.scored_on))
    known = [(value, n) for value, n in zip(balance, steps, strict=True) if math.isfinite(value)]
    return _Scored(
        np.concatenate(times).astype(np.float64),
        sum(value * n for value, n in known) / sum(n for _, n in known) if known else None,
        tuple(allocations),
    )


def _place(inputs: LevelInputs, part: LevelPart, allocation: NDArray[np.int64]) -> Placement:
    ranks = inputs.shape.num_ranks
    copies = inputs.shape.num_logical_experts + int(allocation.max())
    total = part.planned_on.sum(axis=0, dtype=np.float64)
    return place_replicas(total, allocation, inputs.topology, -(-copies // ranks))


def _against(inputs: LevelInputs, base: _Scored, other: _Scored) -> Verdict:
    return judge(
        base.times,
        other.times,
        lifetime_steps=inputs.lifetime_steps,
        cost_model=inputs.cost.basis,
        min_steps=inputs.min_steps,
    )


def _level_figures(inputs: LevelInputs, present: _Scored, scored: _Scored) -> dict[str, Any]:
    """Return the fields that levels of both rules have; memory is that of the fullest rank."""
    verdict, shape = _against(inputs, present, scored), inputs.shape
    more = int(scored.largest.sum()) - shape.num_redundant * shape.num_layers
    extra = fits = None
    if shape.bytes_per_expert:
        extra = -(-more // shape.num_ranks) * shape.bytes_per_expert
        if extra <= 0 or inputs.free_bytes is not None:
            fits = extra <= max(0, inputs.free_bytes or 0)
    return {
        "gain": verdict.gain,
        "gain_lower": verdict.gain_lower,
        "gain_upper": verdict.gain_upper,
        "extra_bytes_per_rank": extra,
        "fits": fits,
        "balancedness": scored.balancedness,
    }


def extra_replicas(count: int, where: str) -> str:
    """Return a number of replicas beyond one for each expert, in words."""
    return f"{count} extra replica{'' if count == 1 else 's'} {where}"


# --- the same number in every layer ---------------------------------------------------------------


def _level(
    inputs: LevelInputs, scored: dict[int, _Scored], below: int | None, replicas: int
) -> ReplicaLevel:
    marginal = None
    if below is not None:
        step = _against(inputs, scored[below], scored[replicas])
        marginal = step.gain / (replicas - below)
    present = scored[inputs.shape.num_redundant]
    return ReplicaLevel(
        replicas_per_layer=replicas,
        marginal_gain=marginal,
        **_level_figures(inputs, present, scored[replicas]),
    )


def _advised(
    inputs: LevelInputs, levels: Sequence[ReplicaLevel], scored: dict[int, _Scored]
) -> int:
    present = advised = inputs.shape.num_redundant
    for level in levels:
        step = _against(inputs, scored[advised], scored[level.replicas_per_layer])
        if (
            level.replicas_per_layer > advised
            and level.fits is not False
            and step.call is Call.RECOMMEND
            and step.gain >= inputs.min_gain
        ):
            advised = level.replicas_per_layer
    if advised == present:
        for level in reversed(levels):
            if level.replicas_per_layer < present and level.gain_lower > -inputs.min_gain:
                advised = level.replicas_per_layer
    return advised


# --- CRAFT ----------------------------------------------------------------------------------------


def _benefit(inputs: LevelInputs, part: LevelPart) -> Benefit:
    """Return the gain of each layer from each number of replicas, up to one per rank."""
    shape = inputs.shape
    per_rank = -(-(shape.num_logical_experts + shape.num_ranks) // shape.num_ranks)
    load = np.asarray(part.planned_on, np.float64)
    return replica_benefit(load, inputs.topology, per_rank)


def _craft_levels(
    inputs: LevelInputs, benefits: Sequence[Benefit], present: _Scored
) -> tuple[CraftLevel, ...]:
    """Return the levels R = 1, 2, 4, .. and one replica per layer and rank."""
    shape = inputs.shape
    levels = []
    for factor in sorted({*_powers(shape.num_layers), shape.num_layers}):
        allocations = [allocate_replicas(benefit, factor * shape.num_ranks) for benefit in benefits]
        scored = _score(inputs, allocations)
        used, layers = int(scored.largest.sum()), int(np.count_nonzero(scored.largest))
        figures = _level_figures(inputs, present, scored)
        levels.append(CraftLevel(factor, used, layers, **figures))
    return tuple(levels)


def _craft_factors(inputs: LevelInputs, benefit: Benefit) -> CraftFactors:
    shape = inputs.shape
    most, memory = shape.num_layers, None
    if shape.bytes_per_expert and inputs.free_bytes is not None:
        held = shape.num_redundant * shape.num_layers // shape.num_ranks
        memory = min(most, held + inputs.free_bytes // shape.bytes_per_expert)

    def chosen(rule: ReplicaRule) -> int:
        return choose_factor(benefit, shape.num_ranks, most, CraftOptions(rule=rule))

    return CraftFactors(chosen(ReplicaRule.PER_REPLICA_GAIN), chosen(ReplicaRule.KNEE), memory)


def _craft_allocation(inputs: LevelInputs, benefit: Benefit) -> CraftAllocation:
    shape, options = inputs.shape, inputs.craft
    factor = choose_factor(benefit, shape.num_ranks, shape.num_layers, options)
    replicas = allocate_replicas(benefit, factor * shape.num_ranks, options.weighting)
    return CraftAllocation(
        factor,
        tuple(benefit.counts.tolist()),
        tuple(benefit.base.tolist()),
        tuple(map(tuple, benefit.gain.T.tolist())),
        tuple(replicas.tolist()),
    )


def _moe_share(inputs: LevelInputs, present: _Scored) -> float | None:
    """Return MoE time / step time; None if unknown or contradictory."""
    if inputs.cost.unit != "s" or not inputs.step_s or not len(present.times):
        return None
    share = float(present.times.mean()) / inputs.step_s
    return share if 0.0 < share <= 1.0 else None
