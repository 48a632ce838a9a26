"""Compares ranks by one curve of seconds that all have in common, of no given shape.

A layer may take as long at few tokens as at some more, because it reads its weights in any case.
Then a straight line makes a rank with few tokens look slow. The curve only has to rise.
"""

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.telemetry.robust_regression import median_of

_BINS = 12
_PASSES = 12
"""Most iterations between the curve and the factors; ranks whose work hardly overlaps need this
many to converge."""
_CONVERGED = 1e-4
"""Change of a logarithmic factor in one iteration, below which the iterations end."""


def levels_by_curve(
    expected_s: NDArray[np.float64],
    seconds: NDArray[np.float64],
    rank: NDArray[np.int64],
    num_ranks: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the logarithm of each rank's factor, and the errors that remain.

    Args:
        expected_s: (N,) measure of the work, above 0; its scale has no effect.
        seconds: (N,) above 0.
        rank: (N,) every rank has values.
        num_ranks: R.

    Returns:
        (R,) logarithm of the seconds of a rank relative to the median rank at the same work, and
        (N,) logarithmic errors. All averages are medians, so outliers in up to half the steps of a
        rank have no effect.
    """
    # Passes only change the seconds, so the work is sorted and divided into bins once.
    parts = np.array_split(np.argsort(expected_s, kind="stable"), min(_BINS, len(expected_s)))
    at = np.array([median_of(expected_s[part]) for part in parts])
    keep = np.concatenate([[True], np.diff(at) > 0])
    rows = [np.flatnonzero(rank == one) for one in range(num_ranks)]
    levels = np.zeros(num_ranks)
    error = np.zeros(len(seconds))
    for _ in range(_PASSES):
        level = seconds / np.exp(levels[rank])
        curve = np.maximum.accumulate([median_of(level[part]) for part in parts])
        error = np.log(seconds / np.interp(expected_s, at[keep], curve[keep]))
        before, levels = levels, np.array([median_of(error[row]) for row in rows])
        levels -= median_of(levels)
        if np.abs(levels - before).max() < _CONVERGED:
            break
    return levels, error - levels[rank]
