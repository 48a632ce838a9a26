"""The window as the search reads it: loads by expert, and for large layers fewer, merged steps."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.planning.policies.keel.options import DEFAULT_OPTIONS, KeelOptions
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem


@dataclass(frozen=True, eq=False, slots=True)
class SearchWindow:
    """The steps that all searches of a plan look at."""

    load: NDArray[np.float64]
    """(T, L, E) [tokens]."""
    weights: NDArray[np.float64]
    """(T,) weights of the steps, summing to 1."""
    unit_tokens: float
    """Tokens of a mean rank load."""
    unit_cost: float
    """A layer time, in the unit of the score."""
    tokens: NDArray[np.float64]
    """(L, E, T) the load in mean rank loads."""
    loaded: NDArray[np.bool_]
    """(L,) True for a layer that has load."""
    merged: bool
    """True if steps were merged."""
    large: bool
    """True if the layers are large: the evaluations then last for one search from a good start."""


def counts_suffice(problem: PlacementProblem) -> bool:
    """Return True if a placement is described by the number of copies of each expert.

    Every rank has one slot and the same speed, all copies of an expert have the same load, every
    new copy has the same price, and no limit counts single moves.
    """
    shape, objective = problem.shape, problem.objective
    return (
        shape.slots_per_rank == 1
        and not shape.pooled
        and objective.cost.by_tokens
        and objective.dispatch is DispatchModel.EVEN
        and (problem.topology.num_nodes == 1 or objective.cross_node_factor == 1.0)
        and objective.limits == PlanLimits()
    )


def search_window(
    problem: PlacementProblem, weights: NDArray[np.float64], options: KeelOptions = DEFAULT_OPTIONS
) -> SearchWindow:
    """Prepare a problem's window for searches.

    The time of a search is proportional to experts x ranks x steps, or to experts x steps where
    `counts_suffice`. Beyond `options.common_layer_size` or `options.counted_layer_size`,
    neighbouring steps are merged into their weighted mean: the load of every expert counts in full,
    only its changes within a few steps are lost.

    Args:
        problem: the loads to plan for.
        weights: (T,) of its steps, summing to 1.
        options: the constants.
    """
    load, ranks = problem.load, problem.shape.num_ranks
    steps, layers, experts = load.shape
    if counts_suffice(problem):
        together = -(-experts * steps // options.counted_layer_size)
        large = together > 1
    else:
        together = -(-experts * ranks * steps // options.common_layer_size)
        large = together > 1 or experts**2 * ranks > options.many_starts_size
    if together > 1:
        first = np.append(np.arange(0, steps, together), steps)
        load = _merged_steps(load, weights, first)
        weights = np.add.reduceat(weights, first[:-1])
    by_layer = load.sum(axis=2)
    unit_tokens = float(by_layer.sum()) / (by_layer.size * ranks) or 1.0
    fluid = moe_time.fluid_bound(load, ranks, problem.objective.cost)
    return SearchWindow(
        load,
        weights,
        unit_tokens,
        fluid / by_layer.size or 1.0,
        _by_expert(load, unit_tokens),
        by_layer.any(axis=0),
        together > 1,
        large,
    )


@kernel
def _merged_steps(
    load: NDArray[np.float64], weights: NDArray[np.float64], first: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the (B, L, E) weighted means of the steps `first[b]` to `first[b + 1]` - 1."""
    out = np.zeros((len(first) - 1, *load.shape[1:]))
    for block in range(len(first) - 1):
        total = weights[first[block] : first[block + 1]].sum()
        for step in range(first[block], first[block + 1]):
            part = weights[step] / total if total > 0.0 else 0.0
            for layer in range(load.shape[1]):
                for expert in range(load.shape[2]):
                    out[block, layer, expert] += part * load[step, layer, expert]
    return out


@kernel
def _by_expert(load: NDArray[np.float64], unit: float) -> NDArray[np.float64]:
    """Return (L, E, T) a (T, L, E) load in units.

    A cache line of the load, eight experts, is read at a time.
    """
    steps, layers, experts = load.shape
    out = np.empty((layers, experts, steps))
    for layer in range(layers):
        for begin in range(0, experts, 8):
            for step in range(steps):
                for expert in range(begin, min(begin + 8, experts)):
                    out[layer, expert, step] = load[step, layer, expert] / unit
    return out
