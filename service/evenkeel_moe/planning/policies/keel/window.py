"""The window as the search reads it: the loads to plan for, weights of steps, and units."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.signals.change_detection import Change, step_weights
from evenkeel_moe.planning.signals.forecast import forecast, recentred

_PARTS = 4
"""Parts of a window whose numbers of tokens are compared."""


@dataclass(frozen=True, eq=False, slots=True)
class Window:
    """The expectation of the coming steps."""

    weights: NDArray[np.float64]
    """(T,) weights of the problem's steps, summing to 1."""
    noise: float
    """Squared noise of a move's gain over that of tokens that come one by one, >= 1: the window's
    tokens count for so much less."""
    forecast_error: float
    """`Forecast.error`; NaN where the window is too short for a forecast."""
    change: Change
    """The newest change in the window."""
    blocks: NDArray[np.float64]
    """(B, L, E) [tokens], the load to plan for in blocks of neighbouring steps; of single steps
    unless layers are large."""
    block_weights: NDArray[np.float64]
    """(B,) weights of the blocks, summing to 1."""
    unit_tokens: float
    """Tokens of a mean rank load."""
    unit_cost: float
    """A layer time, in the unit of the score."""


def look_ahead(problem: PlacementProblem, options: KeelOptions) -> tuple[PlacementProblem, Window]:
    """Return the problem with the loads to plan for, and its window.

    Loads are the window's; if a forecast proved itself within the window, they are moved to it,
    unless reading dominates. Under nearest dispatch origins of tokens move towards even ones.
    """
    weights, change = step_weights(problem.load)
    scale = _volume_scale(problem, options.volume_spread)
    if (scale != 1.0).any():
        problem = replace(problem, load=problem.load * scale[:, None, None])
    expected = forecast(problem.load)
    moving = expected is not None and expected.error < 1.0 - options.foresight
    if expected is not None and moving and not reading_dominates(problem):
        problem = replace(problem, load=recentred(problem.load, weights, expected))
    if problem.source_load is not None and problem.objective.dispatch is DispatchModel.NEAREST:
        even = problem.source_load.mean(axis=0, keepdims=True)
        shrunk = even + options.origin_trust * (problem.source_load - even)
        problem = replace(problem, source_load=shrunk)
    ranks = problem.shape.num_ranks
    steps, layers, experts = problem.load.shape
    blocks, block_weights = problem.load, weights
    together = -(-experts * ranks * steps // options.merged_size)
    if together > 1:
        first = np.append(np.arange(0, steps, together), steps)
        blocks = _merged(problem.load, weights, first)
        block_weights = np.add.reduceat(weights, first[:-1])
    rank_loads = len(blocks) * layers * ranks
    fluid = moe_time.fluid_bound(blocks, ranks, problem.objective.cost)
    return problem, Window(
        weights,
        # `usual` is NaN where there are too few steps to tell.
        change.usual**options.noise_exponent if change.usual > 1.0 else 1.0,
        float("nan") if expected is None else expected.error,
        change,
        blocks,
        block_weights,
        float(blocks.sum()) / rank_loads or 1.0,
        fluid / (len(blocks) * layers) or 1.0,
    )


def _volume_scale(problem: PlacementProblem, spread: float) -> NDArray[np.float64]:
    """Return (T,) factors giving the steps more and fewer tokens, in turn, if that number moves.

    Whether reading or computing dominates depends on the number of tokens. If it moved from one
    part of the window to another, by more than from step to step, the coming steps have another
    number than the window. Where work is proportional to tokens, this does not matter.
    """
    tokens = problem.load.sum(axis=(1, 2))
    if problem.objective.cost.replica.proportional or len(tokens) < 2 * _PARTS or not tokens.any():
        return np.ones(len(tokens))
    parts = np.array_split(tokens, _PARTS)
    between = float(np.var([part.mean() for part in parts], ddof=1))
    within = float(np.mean([part.var(ddof=1) / len(part) for part in parts]))
    moved = max(0.0, between - within) ** 0.5 / float(tokens.mean())
    factor = 1.0 + spread * moved
    more = np.arange(len(tokens)) % 2 == 0
    return np.asarray(np.where(more, factor, 1.0 / factor), np.float64)


def reading_dominates(problem: PlacementProblem, times: float = 1.0) -> bool:
    """Return True if reading an expert takes longer than so many times computing its mean tokens.

    Where it takes longer than once, what counts is whether an expert is active at all, about which
    a forecast of its mean tokens says nothing.
    """
    replica = problem.objective.cost.replica
    reading = replica.read_tokens + replica.start_tokens
    # The mean of a large window takes as long as some hundred evaluations of the search.
    return reading > 0.0 and reading > times * float(problem.load.mean())


def _merged(
    load: NDArray[np.float64], weights: NDArray[np.float64], first: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the (B, L, E) weighted means of the steps `first[b]` to `first[b + 1]` - 1."""
    out = np.zeros((len(first) - 1, *load.shape[1:]))
    for block, mean in enumerate(out):
        steps = slice(first[block], first[block + 1])
        total = weights[steps].sum()
        for weight, step in zip(weights[steps], load[steps], strict=True):
            mean += (weight / total if total > 0.0 else 0.0) * step
    return out
