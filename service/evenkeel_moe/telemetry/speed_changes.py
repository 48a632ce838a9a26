"""Finds the steps since which each rank has its present speed, and fits the seconds of these.

A fit to steps of two speeds gives a speed between them, which never was true. So when the speed of
a rank changes, its earlier steps no longer count. Those of other ranks and the slopes are kept.

The seconds of a rank, relative to what the fit expects, are compared between the newest steps and
those just before, for windows of growing length. Outliers are clipped, so a few of them are no
change. What all ranks have in common is no change either. A change that is seen in too few steps to
measure the new speed waits: until then neither speed is mixed with the other, and the earlier one
is used.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.telemetry.robust_regression import alikeness
from evenkeel_moe.telemetry.step_times import MIN_STEPS, NoFit, TimeFit, best_fit, judged

_WINDOWS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
"""Newest steps that are compared with the four times as many before them."""
_LEAST_CHANGE = 0.05
"""Smallest change of a logarithmic factor."""
_STANDARD_ERRORS = 5.0
"""A change must also be this many standard errors. Windows of many ranks are compared in every
fit, so a lower limit would find changes in noise."""
_CLIP = 2.0
"""Values count as at most this many standard deviations from their median."""
_PASSES = 4
"""A fit without the earlier steps of one rank may show the change of another."""


@dataclass(frozen=True, eq=False, slots=True)
class SpeedChanges:
    """The rows of a table of steps that hold each rank's present speed: `first <= row < end`."""

    first: NDArray[np.int64]
    """(R,) first row since the newest change that was found; 0 without change."""
    end: NDArray[np.int64]
    """(R,) row from which on the speed may be another, seen in too few steps; T without that."""
    waiting: bool = False
    """True if a change may have begun."""


def fit_present_speeds(
    tokens: NDArray[np.float64],
    active: NDArray[np.float64],
    seconds: NDArray[np.float64],
    layers: int,
    before: TimeFit | None = None,
    first: NDArray[np.int64] | None = None,
) -> tuple[TimeFit | NoFit, SpeedChanges]:
    """Fit the steps of each rank since its speed changed last.

    Args:
        tokens: (T, R) tokens each rank carried in a step, over all layers; oldest step first.
        active: (T, R) replicas with tokens of each rank, over all layers.
        seconds: (T, R) compute of each rank, over all layers; NaN if not measured.
        layers: number of layers.
        before: the newest earlier fit that was used; None if there was none.
        first: (R,) first row of each rank that counts, as found before; None for all.

    Returns:
        The fit as `fit_times` makes it, or why there is none, and the rows that count.
    """
    steps, ranks = tokens.shape
    first = np.zeros(ranks, np.int64) if first is None else first
    row = np.arange(steps)[:, None]
    changes = SpeedChanges(first, np.full(ranks, steps))
    for _ in range(_PASSES):
        counted = (row >= changes.first) & (row < changes.end)
        found = best_fit(tokens, active, np.where(counted, seconds, np.nan), layers, before)
        if isinstance(found, NoFit):
            break
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(seconds / found.expected_s(tokens, active, layers))
        logs[~np.isfinite(logs) | (row < changes.first)] = np.nan
        newer = find_changes(logs)
        newer = replace(newer, first=np.maximum(newer.first, changes.first))
        if np.array_equal(newer.first, changes.first) and np.array_equal(newer.end, changes.end):
            break
        changes = newer
    found = judged(found, before)
    if isinstance(found, TimeFit):
        found = replace(found, drifted=tuple(np.flatnonzero(changes.first > 0).tolist()))
    return found, changes


def find_changes(logs: NDArray[np.float64]) -> SpeedChanges:
    """Find the newest change of each rank's level.

    Args:
        logs: (T, R) logarithm of measured over expected seconds, oldest step first; NaN where not
            measured or not to be counted.
    """
    steps, ranks = logs.shape
    first, end = np.zeros(ranks, np.int64), np.full(ranks, steps)
    if steps < _WINDOWS[0] + MIN_STEPS:
        return SpeedChanges(first, end)
    level = logs - _medians(logs)[0]
    level = level - _medians(level.T)[0][:, None]
    spread = _spread(level)
    alike = alikeness(level.T, spread)
    direction = np.zeros(ranks)
    for window in _WINDOWS:
        if window + MIN_STEPS > steps:
            break
        start = max(0, steps - 5 * window)
        new, new_count = _centres(level[steps - window :], spread)
        old, old_count = _centres(level[start : steps - window], spread)
        enough = (new_count >= _WINDOWS[0]) & (old_count >= MIN_STEPS)
        share = 1.0 / np.maximum(new_count, 1) + 1.0 / np.maximum(old_count, 1)
        least = np.maximum(_LEAST_CHANGE, _STANDARD_ERRORS * alike * spread * np.sqrt(share))
        changed = enough & (first == 0) & (np.abs(new - old) > least)
        for rank in np.flatnonzero(changed).tolist():
            row = start + _change_row(level[start:, rank], old[rank], new[rank])
            measured = int(np.isfinite(level[row:, rank]).sum())
            sign = np.sign(new[rank] - old[rank])
            if measured < MIN_STEPS:
                end[rank], direction[rank] = min(end[rank], row), sign
                continue
            first[rank] = row
            if sign == direction[rank] or end[rank] <= row:
                end[rank] = steps  # It was the same change. One in the other direction waits.
    return SpeedChanges(first, end, bool((end < steps).any()))


def _change_row(level: NDArray[np.float64], old: float, new: float) -> int:
    """Return the most likely first row of the new level; the levels are given.

    Source: Page, Continuous Inspection Schemes, 1954: the cumulative sum of the logarithm of the
    likelihood ratio. Values beyond both levels are clipped.
    """
    shift = new - old
    score = (level - (new + old) / 2) * np.sign(shift)
    score = np.clip(np.where(np.isfinite(score), score, 0.0), -abs(shift), abs(shift))
    return len(level) - 1 - int(np.argmax(np.cumsum(score[::-1])))


def _medians(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the median of each column, NaN without a value, and the number of its values."""
    ordered = np.sort(values, axis=0)  # NaN come last.
    count = np.isfinite(values).sum(axis=0)
    column = np.arange(values.shape[1])
    lower = ordered[np.maximum(count - 1, 0) // 2, column]
    upper = ordered[np.minimum(count // 2, max(len(values) - 1, 0)), column]
    return np.asarray(np.where(count > 0, (lower + upper) / 2, np.nan)), count


def _centres(
    values: NDArray[np.float64], spread: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the mean of each column with outliers clipped, and the number of its values."""
    middle, count = _medians(values)
    beyond = np.clip(values - middle, -_CLIP * spread, _CLIP * spread)
    return middle + np.nansum(beyond, axis=0) / np.maximum(count, 1), count


def _spread(level: NDArray[np.float64]) -> float:
    """Return the standard deviation of all values, from differences of successive steps.

    A change of level changes one difference, so it does not count as spread.
    """
    steps = np.abs(np.diff(level, axis=0))
    known = steps[np.isfinite(steps)]
    return max(1e-4, 1.4826 * float(np.median(known)) / np.sqrt(2.0)) if len(known) else 1e-4
