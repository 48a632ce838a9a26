"""Statistics in which outliers have a bounded influence, of tables with a column for each rank.

NaN stands for a value that is not known; it never counts.
"""

import numpy as np
from numpy.typing import NDArray

_BLOCK = 8
"""Rows of a block, whose means show how much the errors of successive steps are alike."""
_BLOCKS = 6
"""Fewer differences of blocks tell too little."""
_LEAST_SPREAD = 1e-4


def column_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each column, NaN without a value: `np.nanmedian`, ten times as fast."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    ordered = np.sort(values, axis=0)  # NaN come last.
    count = np.isfinite(values).sum(axis=0)
    middle = np.stack([np.maximum(count - 1, 0) // 2, np.minimum(count // 2, len(values) - 1)])
    return np.asarray(np.take_along_axis(ordered, middle, axis=0).mean(axis=0), np.float64)


def spread_of(values: NDArray[np.float64]) -> float:
    """Return the standard deviation as the median absolute value shows it, at least 1e-4."""
    known = np.abs(values[np.isfinite(values)])
    return max(_LEAST_SPREAD, 1.4826 * float(np.median(known))) if len(known) else _LEAST_SPREAD


def alikeness(values: NDArray[np.float64], spread: float) -> float:
    """Return how many times more means of successive values scatter than of independent ones.

    Errors of successive steps may be alike, for example while another process uses a core. At least
    1; 1 if there are too few values. Changes of level count little, because differences of
    neighbouring blocks are compared by their median.

    Args:
        values: (T, R) in the order of the steps.
        spread: standard deviation of single values.
    """
    steps = [np.zeros(0)]
    for column in values.T:
        known = column[np.isfinite(column)]
        parts = known[len(known) % _BLOCK :].reshape(-1, _BLOCK)
        middle = column_medians(parts.T)[:, None]
        clipped = np.clip(parts, middle - 2 * spread, middle + 2 * spread)
        steps.append(np.diff(clipped.mean(axis=1)))
    joined = np.concatenate(steps)
    if len(joined) < _BLOCKS:
        return 1.0
    return max(1.0, spread_of(joined / np.sqrt(2.0)) * float(np.sqrt(_BLOCK)) / spread)
