"""Compares numbers of ranks by balance, MoE time, memory, and the bytes that have to move.

Today's placement is carried over to each width with the fewest copies, and the deployment's policy
plans from there on the older steps of a window. The plan is scored on the newer ones. Taken as
given:

- Each step routes as many tokens at every width.
- A rank that joins is as fast as the mean of today's, and tokens start evenly on all ranks.
- All memory of a rank but its experts stays as it is, apart from what the caller says that a group
  on several nodes needs. The KV cache gets what experts leave.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.cost import CostBasis, CostCurves, CostModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.quantities import bytes_text, counted, duration_text, numbered, saving
from evenkeel_moe.model.topology import ModelShape, Topology, slots_of_rank
from evenkeel_moe.model.unknown import NanIfUnknown
from evenkeel_moe.planning.decision.cycle import (
    CycleInputs,
    ask_policy,
    change_of,
    split_window,
)
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory
from evenkeel_moe.planning.decision.recommendation import unfit_window
from evenkeel_moe.planning.decision.verdict import judge
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.survivors import rows_that_stay
from evenkeel_moe.planning.schedule.width_change import (
    carry_over,
    check_retired,
    choose_retired,
    copies_to,
    holders,
    node_size,
    stranded,
    widened,
)

_MOST_WIDTHS = 8
"""Widths that are weighed if none is named: a large fleet takes seconds for each."""
MOST_RANKS = 4608
"""Largest width that may be asked for."""


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """The widths to weigh."""

    to_ranks: tuple[int, ...] = ()
    """Numbers of ranks. Empty: up to eight from few ranks to twice today's, in whole nodes if there
    are several."""
    to_slots: int | None = None
    """Slots of a layer over all ranks at these widths. None: at least as many replicas in a layer
    as today, in as few slots as divide over the ranks."""
    retire: tuple[int, ...] = ()
    """Ranks to retire, instead of `to_ranks`. Empty: those on which the fewest experts live
    alone."""
    whole_nodes: bool = False
    """True if only all ranks of a node may retire or join."""
    multi_node_bytes: int = 0
    """Memory of a rank that only a group on several nodes needs, such as buffers of its
    transport."""


@dataclass(frozen=True, eq=False, slots=True)
class CapacityInputs:
    """The inputs of a comparison of widths. Shape, topology, cost and memory are those of today."""

    group: CycleInputs
    """The group, its policy and objective; the window in it is not read."""
    planned_on: NDArray[np.generic]
    """(T, L, E) [tokens] steps to plan on; T is 0 where no step may be used."""
    scored_on: NDArray[np.generic]
    """(T', L, E) [tokens] later steps."""
    asked: CapacityRequest
    kv: KvMemory | None = None
    """The KV cache of the rank that holds the fewest tokens; None if unknown."""
    free_bytes: int | None = None
    """Free memory of the rank with least, beside the KV cache; None if unknown."""
    unfit: tuple[str, ...] = ()
    """Why no step may be used, in sentences; empty if they may."""


@dataclass(frozen=True, eq=False, slots=True)
class Width:
    """A width to weigh."""

    shape: ModelShape
    topology: Topology
    retired: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WidthRow:
    """One number of ranks. Null is unknown, never zero."""

    present: bool
    """True for today's placement as it is. All other rows are plans, also the one of today's
    width."""
    ranks: int
    slots: int
    """Slots of a layer over all ranks; the average if they are pooled."""
    nodes: int
    moe_time: NanIfUnknown
    """Mean predicted MoE time of a step, in the unit of the cost model."""
    gain: NanIfUnknown
    """Share of today's predicted MoE time that is saved; negative if it takes longer."""
    gain_lower: NanIfUnknown
    gain_upper: NanIfUnknown
    balancedness: NanIfUnknown
    """Mean over layers on the later steps."""
    expert_bytes: int | None
    """Bytes of the experts of a rank, over all layers."""
    kv_tokens: int | None
    """Tokens that the KV cache of a rank holds."""
    fits: bool | None
    """True if the memory of a rank holds its experts; false only if its free memory is known."""
    copies: int
    """Experts that ranks receive to reach the plan."""
    bytes_to_move: int | None
    least_copies: int
    """The fewest that any placement of this width needs, by an optimal assignment of experts to
    slots."""
    least_bytes: int | None
    retire: tuple[int, ...]
    """Present ranks to retire."""
    stranded: int
    """Experts over all layers that live on those ranks alone."""
    stranded_bytes: int | None
    words: str
    """The row as a sentence."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Widths compared."""

    words: tuple[str, ...]
    """The assumptions of all rows, in sentences."""
    rows: tuple[WidthRow, ...]
    """Today's placement first, then the widths in rising order."""
    cost_model: CostBasis


def prepare_capacity(
    cycle: CycleInputs, asked: CapacityRequest, kv: KvMemory | None, free_bytes: int | None
) -> tuple[CapacityInputs, tuple[Width, ...]]:
    """Return the inputs on the steps that a cycle would plan and score on, and `widths_of` them.

    `kv` and `free_bytes` are those of `CapacityInputs`.
    """
    unfit, split = unfit_window(cycle), split_window(cycle, change_of(cycle))
    inputs = CapacityInputs(
        # Each width is weighed by a call to another process: the window need not go along twice.
        group=replace(cycle, load=cycle.load[:0], source_load=None),
        planned_on=split.planned_on(cycle.load, cycle.policy_inputs),
        scored_on=cycle.load[split.cut :],
        asked=asked,
        kv=kv,
        free_bytes=free_bytes,
        unfit=() if unfit is None else unfit[1],
    )
    return inputs, widths_of(inputs)


def weigh_capacity(inputs: CapacityInputs) -> Capacity:
    """Weigh all widths that were asked for; `widths_of` has the errors."""
    widths = (None, *widths_of(inputs))
    return capacity_of(inputs, [weigh_width(inputs, width) for width in widths])


# --- the widths -----------------------------------------------------------------------------------


def widths_of(inputs: CapacityInputs) -> tuple[Width, ...]:
    """Return the widths to weigh, in rising order.

    Raises:
        InvalidInput: a rank to retire does not exist, or ranks are named in two ways.
        ShapeMismatch: slots that do not divide over the ranks or cannot hold the experts, or a
            width that is not of whole nodes.
    """
    asked, shape, topology = inputs.asked, inputs.group.shape, inputs.group.topology
    if asked.multi_node_bytes < 0:
        raise InvalidInput(f"multi_node_bytes is {asked.multi_node_bytes}, must not be negative")
    if asked.retire:
        if asked.to_ranks:
            raise InvalidInput("to_ranks and retire name the width in two ways: give one")
        check_retired(asked.retire, shape.num_ranks)
        numbers = [shape.num_ranks - len(asked.retire)]
    else:
        numbers = sorted(set(asked.to_ranks)) or _numbers(shape, topology, asked)
    held = holders(inputs.group.current)
    return tuple(_width(inputs, held, number) for number in numbers)


def _numbers(shape: ModelShape, topology: Topology, asked: CapacityRequest) -> list[int]:
    """Return the numbers of ranks to weigh if none is named, those that fit the request."""
    ranks, experts = shape.num_ranks, shape.num_logical_experts
    most = min(2 * ranks, MOST_RANKS)
    several = topology.num_nodes > 1 or asked.whole_nodes
    unit = node_size(topology) if several else 1
    step = unit * -(-most // (unit * _MOST_WIDTHS))
    slots, numbers = asked.to_slots, sorted({*range(step, most + 1, step), min(ranks, most)})
    if slots is None:
        return numbers
    fitting = [each for each in numbers if slots % each == 0 and slots <= each * experts]
    if not fitting:
        raise ShapeMismatch(
            f"{slots} slots do not divide over {', '.join(map(str, numbers))} ranks into at most"
            f" {experts} a rank"
        )
    return fitting


def _width(inputs: CapacityInputs, held: NDArray[np.bool_], number: int) -> Width:
    asked, shape, topology = inputs.asked, inputs.group.shape, inputs.group.topology
    if not 1 <= number <= MOST_RANKS:
        raise InvalidInput(f"{number} ranks: a width has 1 to {MOST_RANKS}")
    if asked.whole_nodes and number % (size := node_size(topology)):
        raise ShapeMismatch(
            f"{number} ranks are not whole nodes of {size}: {number - number % size or size} or"
            f" {number - number % size + size} would be"
        )
    fewer = max(0, shape.num_ranks - number)
    retired = choose_retired(held, topology, fewer, asked.retire, whole_nodes=asked.whole_nodes)
    kept = [rank for rank in range(shape.num_ranks) if rank not in retired]
    return Width(_shape_at(shape, number, asked.to_slots), widened(topology, kept, number), retired)


def _shape_at(shape: ModelShape, ranks: int, slots: int | None) -> ModelShape:
    """Return the shape of another width; without slots, with at least as many replicas."""
    experts = shape.num_logical_experts
    wanted = experts + shape.num_redundant if slots is None else slots
    if slots is None:
        if ranks == shape.num_ranks:
            return shape
        wanted = min(-(-wanted // ranks), experts) * ranks
    per_rank = slots_of_rank(wanted, ranks, experts)
    if not shape.pooled:
        return replace(shape, num_ranks=ranks, slots_per_rank=per_rank)
    return replace(
        shape,
        num_ranks=ranks,
        slots_per_rank=min(experts, max(per_rank, shape.slots_per_rank)),
        pool_slots_per_rank=per_rank * shape.num_layers,
    )


def cost_at_width(cost: CostModel, kept: Sequence[int], num_ranks: int) -> CostModel:
    """Return the cost model of the kept ranks and of others that are as fast as today's mean."""
    if cost.curves is None:
        return cost
    joins = num_ranks - len(kept)
    seconds, slope = cost.curves.tile_seconds, cost.curves.slope_s_per_token
    curves = CostCurves(
        cost.curves.tile_tokens,
        np.concatenate([seconds[list(kept)], np.tile(seconds.mean(axis=0), (joins, 1))]),
        np.concatenate([slope[list(kept)], np.full(joins, slope.mean())]),
    )
    return replace(cost, curves=curves)


# --- one width ------------------------------------------------------------------------------------


def weigh_width(inputs: CapacityInputs, width: Width | None) -> WidthRow:
    """Plan and score one width; None scores today's placement as it is.

    Raises:
        InvalidInput, InfeasiblePlan: the policy cannot plan at this width.
    """
    shape, objective = inputs.group.shape, inputs.group.objective
    split = SplitModel(objective.dispatch, inputs.group.topology)
    before, balance = _scored(inputs, inputs.group.current, objective.cost, split)
    copies = least = alone = 0
    after, at = before, Width(shape, inputs.group.topology)
    if width is not None:
        at, retired, held = width, width.retired, holders(inputs.group.current)
        ranks = at.shape.num_ranks
        kept = [rank for rank in range(shape.num_ranks) if rank not in retired]
        joining = (None,) * (ranks - len(kept))
        held_there = holders(rows_that_stay(inputs.group.current, (*kept, *joining)))
        alone = stranded(held, retired)
        cost = cost_at_width(objective.cost, kept, ranks)
        load = inputs.planned_on.sum(axis=0, dtype=np.float64)
        start = inputs.group.current
        if at.shape != shape:
            start = carry_over(held_there, at.shape, load)
        least = copies_to(held_there, start)
        target = _planned(inputs, at, start, cost)
        copies = copies_to(held_there, target)
        after, balance = _scored(inputs, target, cost, SplitModel(objective.dispatch, at.topology))
    verdict = judge(before, after, seed=inputs.group.seed)
    kv_tokens, fits = _memory(inputs, at)
    row = WidthRow(
        present=width is None,
        ranks=at.shape.num_ranks,
        slots=at.shape.num_logical_experts + at.shape.num_redundant,
        nodes=at.topology.num_nodes,
        moe_time=float(after.mean()) if len(after) else math.nan,
        gain=verdict.gain,
        gain_lower=verdict.gain_lower,
        gain_upper=verdict.gain_upper,
        balancedness=balance,
        expert_bytes=at.shape.expert_bytes_per_rank,
        kv_tokens=kv_tokens,
        fits=fits,
        copies=copies,
        bytes_to_move=shape.bytes_of(copies),
        least_copies=least,
        least_bytes=shape.bytes_of(least),
        retire=at.retired,
        stranded=alone,
        stranded_bytes=shape.bytes_of(alone),
        words="",
    )
    return replace(row, words=_row_words(inputs, row))


def _planned(inputs: CapacityInputs, at: Width, start: Placement, cost: CostModel) -> Placement:
    """Return the policy's plan at a width; the start itself where no step may be used."""
    if inputs.unfit or not len(inputs.planned_on):
        return start
    there = replace(
        inputs.group,
        shape=at.shape,
        topology=at.topology,
        current=start,
        replica_budget=_budget_at(inputs, at.shape),
        # A resize moves what it must, whatever a plan of the deployment may move.
        objective=replace(inputs.group.objective, cost=cost, limits=PlanLimits()),
    )
    return ask_policy(there, inputs.planned_on.astype(np.float64))[1]


def _budget_at(inputs: CapacityInputs, shape: ModelShape) -> int | None:
    """Return today's replica budget in slots that divide over the ranks of a width and fit it."""
    budget, experts, ranks = inputs.group.replica_budget, shape.num_logical_experts, shape.num_ranks
    if budget is None or shape == inputs.group.shape:
        return budget
    return min(-(-(experts + budget) // ranks) * ranks - experts, shape.num_redundant)


def _scored(
    inputs: CapacityInputs, placement: Placement, cost: CostModel, split: SplitModel
) -> tuple[NDArray[np.float64], float]:
    """Return the (T',) predicted MoE times of a placement on the later steps, and its balance.

    Without load there are no times, and the balance is unknown.
    """
    load = inputs.scored_on[:0] if inputs.unfit else inputs.scored_on
    if not load.any():
        return np.zeros(0), math.nan
    times = moe_time.step_times(load, placement, cost, split).sum(axis=1)
    return times, metrics.balancedness_mean(metrics.rank_load(load, placement, split))


def _memory(inputs: CapacityInputs, at: Width) -> tuple[int | None, bool | None]:
    """Return the KV tokens that the experts of a rank leave, and whether they fit, if known."""
    now, then = inputs.group.shape.expert_bytes_per_rank, at.shape.expert_bytes_per_rank
    if now is None or then is None:
        return None, None
    several = (at.topology.num_nodes > 1) - (inputs.group.topology.num_nodes > 1)
    more = then - now + several * inputs.asked.multi_node_bytes
    kv, free = inputs.kv, inputs.free_bytes
    room = (0 if kv is None else kv.free_bytes) + (free or 0)
    fits = more <= room or (None if kv is None or free is None else False)
    return (None if kv is None else kv.tokens(more)), fits


# --- words ----------------------------------------------------------------------------------------


def capacity_of(inputs: CapacityInputs, rows: Sequence[WidthRow]) -> Capacity:
    """Return the rows with the sentences about all of them."""
    basis, policy = inputs.group.objective.cost.basis, inputs.group.policy
    planned_on, scored_on = len(inputs.planned_on), len(inputs.scored_on)
    words = [
        f"Planned by {policy} on {planned_on} steps, scored on the {scored_on} after them.",
        f"Cost model: {basis.words}.",
    ]
    if inputs.unfit:
        without = "Balance and MoE time are unknown, and experts only move where they must."
        words = [*inputs.unfit, without]
    reserve = inputs.asked.multi_node_bytes
    apart = f" and {bytes_text(reserve)} on several nodes" if reserve else ""
    words.append(
        "Assumed: as many tokens a step at every width, joining ranks as fast as today's mean, and"
        f" the memory of a rank unchanged but for experts{apart}."
    )
    if inputs.kv is None:
        words.append("KV tokens are unknown: the KV cache of a rank is not known.")
    return Capacity(tuple(words), tuple(rows), basis)


def _row_words(inputs: CapacityInputs, row: WidthRow) -> str:
    basis = inputs.group.objective.cost.basis
    nodes = f", {row.nodes} nodes" if row.nodes > 1 else ""
    name = f"{counted(row.ranks, 'rank')} ({row.slots} slots a layer{nodes})"
    time = "MoE time unknown"
    if math.isfinite(row.moe_time):
        shown = duration_text(row.moe_time)
        if basis.unit != "s":
            shown = f"{row.moe_time:.4g} {basis.unit}"
        against = "" if row.present else f" ({saving(row.gain)})"
        time = f"{basis.moe_time} {shown} a step{against}, balancedness {row.balancedness:.3f}"
    parts = [time]
    if row.expert_bytes is not None:
        parts.append(f"{bytes_text(row.expert_bytes)} of experts a rank")
    if row.kv_tokens is not None:
        parts.append(f"{row.kv_tokens:,} KV tokens a rank")
    if row.fits is False:
        parts.append("more than the memory of a rank holds")
    if row.present:
        return f"Today, {name}: {'; '.join(parts)}."
    slots, now = row.slots / row.ranks, inputs.group.shape.mean_slots_per_rank
    if slots > now:
        parts.append(f"needs a start with {slots:.4g} slots a rank in a layer, now {now:.4g}")
    parts.append(
        f"{_moved(row.copies, row.bytes_to_move)} to move,"
        f" at least {_moved(row.least_copies, row.least_bytes)} at this width"
    )
    words = f"{name}: {'; '.join(parts)}."
    if row.retire:
        on = "no expert lives on them alone"
        if row.stranded:
            on = f"{_moved(row.stranded, row.stranded_bytes)} live on them alone"
        words += f" Retire rank{'' if len(row.retire) == 1 else 's'} {numbered(row.retire)}: {on}."
    return words


def _moved(copies: int, nbytes: int | None) -> str:
    size = "" if nbytes is None or not copies else f" ({bytes_text(nbytes)})"
    return f"{counted(copies, 'expert')}{size}"
