"""Derives loads, weights and noise of the steps to plan for from the window."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.signals.change_detection import Change, step_weights
from evenkeel_moe.planning.signals.forecast import forecast, recentred

_PARTS = 4
"""Parts of a window whose numbers of tokens are compared."""


@dataclass(frozen=True, eq=False, slots=True)
class Outlook:
    """The expectation of the coming steps, beside their loads."""

    weights: NDArray[np.float64]
    """(T,) weights of the window's steps, summing to 1."""
    noise: float
    """Squared noise of a move's gain over that of tokens that come one by one, >= 1: the window's
    tokens count for so much less."""
    moving: bool
    """True if loads are expected to differ from those of the window."""
    forecast_error: float
    """`Forecast.error`; NaN where the window is too short for a forecast."""
    change: Change
    """The newest change in the window."""


def look_ahead(problem: PlacementProblem, options: KeelOptions) -> tuple[PlacementProblem, Outlook]:
    """Return the problem with the loads to plan for, and the outlook.

    Loads are the window's; if a forecast proved itself within the window, they are moved to it,
    unless reading dominates.
    """
    weights, change = step_weights(problem.load, options.change)
    scale = _volume_scale(problem, options.volume_spread)
    if (scale != 1.0).any():
        problem = replace(problem, load=problem.load * scale[:, None, None])
    expected = forecast(problem.load)
    # `usual` is NaN where there are too few steps to tell.
    noise = change.usual**options.noise_exponent if change.usual > 1.0 else 1.0
    if expected is None:
        return problem, Outlook(weights, noise, False, float("nan"), change)
    moving = expected.error < 1.0 - options.foresight
    if moving and not reading_dominates(problem):
        problem = replace(problem, load=recentred(problem.load, weights, expected))
    return problem, Outlook(weights, noise, moving, expected.error, change)


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


def reading_dominates(problem: PlacementProblem) -> bool:
    """Return True if the mean replica reads for longer than it computes.

    What counts is then whether an expert is active at all, about which a forecast of its mean
    tokens says nothing.
    """
    reading = _reading_tokens(problem)
    # The mean of a large window takes as long as some hundred evaluations of the search.
    return reading > 0.0 and reading > float(problem.load.mean())


def reading_matters(problem: PlacementProblem, share: float) -> bool:
    """Return True if reading takes the mean replica more than a share of the time of computing.

    That is in the half of the steps that have the fewest tokens, where reading matters most.
    """
    reading = _reading_tokens(problem)
    if reading == 0.0:
        return False
    tokens = np.sort(problem.load.mean(axis=(1, 2)))
    return reading > share * float(tokens[: (len(tokens) + 1) // 2].mean())


def _reading_tokens(problem: PlacementProblem) -> float:
    """Return the tokens that take as long as reading one replica."""
    replica = problem.objective.cost.replica
    return replica.read_tokens + replica.start_tokens


def shrink_origins(problem: PlacementProblem, trust: float) -> PlacementProblem:
    """Move the origins of tokens towards even ones, keeping the share `trust` of the difference."""
    if problem.source_load is None:
        return problem
    even = problem.source_load.mean(axis=0, keepdims=True)
    return replace(problem, source_load=even + trust * (problem.source_load - even))
