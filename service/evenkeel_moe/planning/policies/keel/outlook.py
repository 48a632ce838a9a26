"""Derives loads, weights and noise of the steps to plan for from the window."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.signals.change_detection import Change, step_weights
from evenkeel_moe.planning.signals.forecast import forecast, recentred


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
    expected = forecast(problem.load)
    # `usual` is NaN where there are too few steps to tell.
    noise = change.usual**options.noise_exponent if change.usual > 1.0 else 1.0
    if expected is None:
        return problem, Outlook(weights, noise, False, float("nan"), change)
    moving = expected.error < 1.0 - options.foresight
    if moving and not reading_dominates(problem):
        problem = replace(problem, load=recentred(problem.load, weights, expected))
    return problem, Outlook(weights, noise, moving, expected.error, change)


def reading_dominates(problem: PlacementProblem) -> bool:
    """Return True if the mean replica reads for longer than it computes.

    What counts is then whether an expert is active at all, about which a forecast of its mean
    tokens says nothing.
    """
    replica = problem.objective.cost.replica
    return replica.read_tokens + replica.start_tokens > float(problem.load.mean())


def shrink_origins(problem: PlacementProblem, trust: float) -> PlacementProblem:
    """Move the origins of tokens towards even ones, keeping the share `trust` of the difference."""
    if problem.source_load is None:
        return problem
    even = problem.source_load.mean(axis=0, keepdims=True)
    return replace(problem, source_load=even + trust * (problem.source_load - even))
