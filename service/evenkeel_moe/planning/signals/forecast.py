"""Forecasts the load shares of experts from how they moved within the window.

If traffic drifts, the mean of a window lags behind it; the mean of a few steps does not, but is
mostly noise. How fast to forget depends on the traffic, so the window itself decides: exponentially
fading means with several half-lives are tested at every step of its second half on the steps that
followed, and combined with the weights that would have given the least error (Bates and Granger,
1969; weights not negative, summing to one).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from evenkeel_moe.jit import kernel

_HALF_LIVES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, np.inf)
"""Shares of the window after which a step counts half; the last gives the mean of the window."""
_AHEAD = 1 / 8
"""Share of the window that is forecast at a time, at least 4 steps. The very next steps alone would
be too easy, because requests live longer than one step."""
_RIDGE = 1e-6
"""Share of the mean squared error added to the diagonal, so that rounding does not decide the
weights of nearly equal means."""
_DUST = 1e-9
"""Token counts up to this are rounding errors of zero."""
_ROUNDING = 1e-18
"""Mean squared errors up to this, in squared mean experts, are rounding errors of zero."""
_FARTHEST = 4.0
"""Largest factor by which the load of an expert is raised or lowered, because a forecast from few
tokens is no more precise."""


@dataclass(frozen=True, eq=False, slots=True)
class Forecast:
    """The expected load of the steps after a window."""

    shares: NDArray[np.float64]
    """(L, E) shares of each layer's load, summing to 1, or to 0 for a layer without load."""
    error: float
    """Mean squared error within the window, divided by that of the window's mean as known at the
    same time; in [0, 1]."""


@kernel
def _to_shares(load: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """Divide each layer of an (L, E) load by its mean over experts; zero without load."""
    layers, experts = load.shape
    for layer in range(layers):
        total = 0.0
        for expert in range(experts):
            total += load[layer, expert]
        scale = experts / total if total > 0.0 else 0.0
        for expert in range(experts):
            out[layer, expert] = load[layer, expert] * scale


@kernel
def _add_products(off: NDArray[np.float64], sums: NDArray[np.float64]) -> None:
    """Add to `sums` (F, F) the products of the rows of `off` (F, E), below and on the diagonal.

    Three products at a time: no addition waits for the one before it, and each sum still grows
    expert by expert.
    """
    fades, experts = off.shape
    for fade in range(fades):
        for other in range(0, fade + 1, 3):
            second, third = min(other + 1, fade), min(other + 2, fade)
            a, b, c = sums[fade, other], sums[fade, second], sums[fade, third]
            for expert in range(experts):
                value = off[fade, expert]
                a += value * off[other, expert]
                b += value * off[second, expert]
                c += value * off[third, expert]
            sums[fade, other], sums[fade, second], sums[fade, third] = a, b, c


@kernel
def _backtest(
    load: NDArray[np.float64], keeps: NDArray[np.float64], first: int, ahead: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Compare fading means of a window with the `ahead` steps after each step from `first` on.

    Args:
        load: (T, L, E) [tokens].
        keeps: (F,) share of its weight that a step keeps from one step to the next.
        first: steps known at the first comparison.
        ahead: steps that are forecast.

    Returns:
        (F, F) sums of products of errors, (F, L, E) shares at the end in mean experts, and the
        number of comparisons.
    """
    steps, layers, experts = load.shape
    fades = keeps.shape[0]
    means = np.zeros((fades, layers, experts))
    shares = np.zeros((fades, layers, experts))
    coming = np.zeros((layers, experts))
    came = np.zeros((layers, experts))
    errors = np.zeros((fades, fades))
    off = np.empty((fades, experts))
    looks = 0
    for known in range(1, steps + 1):
        for fade in range(fades):
            for layer in range(layers):
                for expert in range(experts):
                    means[fade, layer, expert] = (
                        means[fade, layer, expert] * keeps[fade] + load[known - 1, layer, expert]
                    )
        if known < first or known + ahead > steps:
            continue
        looks += 1
        if looks == 1:
            for step in range(known, known + ahead):
                coming += load[step]
        else:
            for layer in range(layers):
                for expert in range(experts):
                    left = coming[layer, expert] - load[known - 1, layer, expert]
                    # With counts the difference is exact; other loads leave rounding errors.
                    left = left if left > _DUST else 0.0
                    coming[layer, expert] = left + load[known + ahead - 1, layer, expert]
        _to_shares(coming, came)
        for fade in range(fades):
            _to_shares(means[fade], shares[fade])
        for layer in range(layers):
            for fade in range(fades):
                for expert in range(experts):
                    off[fade, expert] = shares[fade, layer, expert] - came[layer, expert]
            _add_products(off, errors)
    for fade in range(fades):
        _to_shares(means[fade], shares[fade])
        errors[:fade, fade] = errors[fade, :fade]
    return errors, shares, looks


def forecast(load: NDArray[np.float64]) -> Forecast | None:
    """Forecast the shares of experts, with the error relative to that of the window's mean.

    Args:
        load: (T, L, E) [tokens], oldest first.

    Returns:
        None if the window is too short for two comparisons (under 9 steps), or its mean had no
        error.
    """
    steps = len(load)
    ahead = max(4, int(steps * _AHEAD))
    keeps = 0.5 ** (1.0 / (np.array(_HALF_LIVES) * steps))
    errors, shares, looks = _backtest(
        np.ascontiguousarray(load, np.float64), keeps, max(1, round(steps / 2)), ahead
    )
    by_mean = float(errors[-1, -1])
    if looks < 2 or by_mean <= _ROUNDING * looks * load[0].size:
        return None
    fades = len(keeps)
    root = np.linalg.cholesky(errors + _RIDGE * np.trace(errors) / fades * np.eye(fades))
    # The minimum of a quadratic form scales with the square of the sum of the weights, so the
    # factor that holds this sum to one does not change their ratios.
    firm = np.sqrt(np.trace(errors))
    weights, _ = nnls(
        np.vstack([root.T, np.full((1, fades), firm)]), np.append(np.zeros(fades), firm)
    )
    weights /= weights.sum()
    expected = np.tensordot(weights, shares, axes=1) / load.shape[2]
    return Forecast(expected, min(1.0, float(weights @ errors @ weights) / by_mean))


def recentred(
    load: NDArray[np.float64], weights: NDArray[np.float64], expected: Forecast
) -> NDArray[np.float64]:
    """Scale the window so that the mean of every expert is the forecast; deviations of steps stay.

    This is better than giving the newest steps most of the weight: correlations between experts
    last longer than their means, and many steps are needed to see them.

    Args:
        load: (T, L, E) [tokens].
        weights: (T,) of the steps, summing to 1.
        expected: the forecast for that window.

    Returns:
        (T, L, E) float64 [tokens]; the weighted load of a layer stays the same, except for experts
        that had no load in the window.
    """
    mean = np.tensordot(weights, load, axes=1)
    moved = expected.shares * mean.sum(axis=1, keepdims=True)
    factor = np.divide(moved, mean, out=np.ones_like(mean), where=mean > 0)
    return np.asarray(load * np.clip(factor, 1.0 / _FARTHEST, _FARTHEST), np.float64)
