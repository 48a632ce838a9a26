"""Finds the step since which each rank has its present speed.

A rank's level before and after a step is compared, for every step. Values far from the median are
clipped, so a few outliers are no change. The newest change counts. One that is seen in too few
steps to measure the new speed waits: until then neither speed is mixed with the other.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.telemetry.robust import alikeness, column_medians, spread_of

MIN_STEPS = 16
"""Measured steps from which a rank's speed is known."""
_FEWEST_AFTER = 8
"""Steps after a change with which it is noticed."""
_LEAST_CHANGE = 0.05
"""Smallest change of a logarithmic factor."""
_STANDARD_ERRORS = 5.5
"""A change must also be this many standard errors. All steps of many ranks are tried in every fit,
so a lower limit would find changes in noise."""
_CLIP = 2.5
"""Values count as at most this many standard deviations from their median."""

_PASSES = 4
"""Changes of one rank that are followed at once; the next fit finds more."""


@dataclass(frozen=True, eq=False, slots=True)
class SpeedChanges:
    """The rows of a table of steps that hold each rank's present speed: `first <= row < end`."""

    first: NDArray[np.int64]
    """(R,) first row since the newest change that was found; 0 without change."""
    end: NDArray[np.int64]
    """(R,) row from which on the speed may be another, seen in too few steps; T without that."""
    waiting: bool
    """True if a change may have begun."""


def find_changes(logs: NDArray[np.float64]) -> SpeedChanges:
    """Find the newest change of each rank's level.

    Args:
        logs: (T, R) logarithm of measured over expected seconds, oldest step first; NaN where not
            measured or not to be counted.
    """
    steps, ranks = logs.shape
    row = np.arange(steps)[:, None]
    first, end = np.zeros(ranks, np.int64), np.full(ranks, steps)
    # A change of level changes one difference of successive rows, so it does not count as spread.
    spread = spread_of(np.diff(logs, axis=0) / np.sqrt(2.0))
    error = spread * alikeness(logs, spread)
    for _ in range(_PASSES if steps > MIN_STEPS else 0):
        level = np.where((first <= row) & (row < end), logs, np.nan)
        at = _best_split(level, spread)
        old, new = (np.where(side, level, np.nan) for side in (row < at, row >= at))
        before, after = np.isfinite(old).sum(axis=0), np.isfinite(new).sum(axis=0)
        share = 1.0 / np.maximum(before, 1) + 1.0 / np.maximum(after, 1)
        least = np.maximum(_LEAST_CHANGE, _STANDARD_ERRORS * error * np.sqrt(share))
        changed = (at > 0) & (np.abs(_centres(new, spread) - _centres(old, spread)) > least)
        if not changed.any():
            break
        first = np.where(changed & (after >= MIN_STEPS), at, first)
        end = np.where(changed & (after < MIN_STEPS), at, end)
    return SpeedChanges(first, end, bool((end < steps).any()))


def _centres(values: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """Return the (R,) mean of each column with outliers clipped, NaN without a value."""
    middle = column_medians(values)
    off = np.clip(values - middle, -_CLIP * spread, _CLIP * spread)
    count = np.maximum(np.isfinite(off).sum(axis=0), 1)
    return np.asarray(middle + np.nansum(off, axis=0) / count, np.float64)


def _best_split(level: NDArray[np.float64], spread: float) -> NDArray[np.int64]:
    """Divide each column where the clipped means of both sides differ most, in standard errors.

    Returns:
        (R,) first row after the split; 0 with too few values.
    """
    known = np.isfinite(level)
    off = np.clip(level - column_medians(level), -_CLIP * spread, _CLIP * spread)
    sums = np.cumsum(np.where(known, off, 0.0), axis=0)
    counts = np.cumsum(known, axis=0)
    before, after = counts[:-1], counts[-1] - counts[:-1]
    shift = (sums[-1] - sums[:-1]) / np.maximum(after, 1) - sums[:-1] / np.maximum(before, 1)
    weight = np.sqrt(before * after / np.maximum(before + after, 1))
    enough = (before >= MIN_STEPS) & (after >= _FEWEST_AFTER)
    strength = np.where(enough, np.abs(shift) * weight, 0.0)
    return np.where(enough.any(axis=0), strength.argmax(axis=0) + 1, 0)
