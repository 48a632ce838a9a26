"""Regression in which outliers have a bounded influence."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

_HUBER = 1.345
"""Residuals beyond this many standard deviations lose weight."""
EFFICIENCY = 0.95
"""Of a mean with these weights, for normal errors."""
_BLOCK = 8
"""Steps of a block, whose means show how much the errors of successive steps are alike."""
_BLOCKS = 6
"""Fewer differences of blocks tell too little."""


def spread_of(values: NDArray[np.float64]) -> float:
    """Return the standard deviation as the median absolute value shows it, at least 1e-4."""
    return max(1e-4, 1.4826 * float(np.median(np.abs(values))))


def alikeness(series: Iterable[NDArray[np.float64]], spread: float) -> float:
    """Return how many times more means of successive values scatter than of independent ones.

    Errors of successive steps may be alike, for example while another process uses a core. At least
    1; 1 if there are too few values. Changes of level count little, because differences of
    neighbouring blocks are compared by their median.

    Args:
        series: values in their order; NaN are left out.
        spread: standard deviation of single values.
    """
    steps = []
    for values in series:
        known = values[np.isfinite(values)]
        blocks = len(known) // _BLOCK
        if blocks > 1:
            parts = known[len(known) - blocks * _BLOCK :].reshape(blocks, _BLOCK)
            middle = np.median(parts, axis=1)[:, None]
            clipped = np.clip(parts, middle - 2 * spread, middle + 2 * spread)
            steps.append(np.abs(np.diff(clipped.mean(axis=1))))
    if sum(map(len, steps)) < _BLOCKS:
        return 1.0
    scatter = 1.4826 * median_of(np.concatenate(steps)) / np.sqrt(2.0)
    return max(1.0, float(scatter * np.sqrt(_BLOCK) / spread))


def median_of(values: NDArray[np.float64]) -> float:
    """Return exactly `np.median` of finite values, without its checks, which take longer."""
    ordered, count = np.sort(values), len(values)
    return float((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)


def huber(values: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """Return the weights of residuals with a standard deviation, at most 1."""
    size = np.abs(values)
    return np.asarray(_HUBER * spread / np.maximum(size, _HUBER * spread), np.float64)


def solve(
    design: NDArray[np.float64], target: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the weighted least squares solution without negative coefficients."""
    root = np.sqrt(weights)
    q, r = np.linalg.qr(design * root[:, None])
    scale = np.maximum(np.abs(r).max(axis=0), 1e-300)
    return np.asarray(nnls(r / scale, q.T @ (target * root))[0] / scale, np.float64)


def inverse_of_gram(
    design: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Return the inverse of the normal equations' matrix; None if it has none."""
    gram = design.T @ (design * weights[:, None])
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    unit = gram / np.outer(scale, scale)
    if np.linalg.cond(unit) > 1e12:
        return None
    return np.asarray(np.linalg.inv(unit) / np.outer(scale, scale), np.float64)
