"""What shares of the load experts will have, told from how they moved within the window.

Where traffic drifts, the mean of a window lags behind it; a mean of few steps does not, but is mostly chance. How
fast to forget differs between traffics, so the window itself decides: means that fade at different paces are tried at
every step of its second half on the steps that followed, and weighed so that together they would have erred
least (Bates and Granger, 1969; weights not negative, which sum to one).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from evenkeel_moe.errors import ShapeMismatch
from evenkeel_moe.jit import kernel

__all__ = ["Forecast", "forecast", "recentred"]

_HALF_LIVES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, np.inf)
"""Share of the window after which a step counts half; the last is the window's mean."""
_AHEAD = 1 / 8
"""Share of the window that is foretold at a time, and never under 4 steps: the next steps alone are alike, because requests
live longer than one."""
_RIDGE = 1e-6
"""Of the mean squared error: keeps means that are all but the same from making the weights a matter of rounding."""
_DUST = 1e-9
"""Tokens that are none."""
_ROUNDING = 1e-18
"""Mean squared error, in squared mean experts, that is none."""
_FARTHEST = 4.0
"""Times that an expert's load may be raised or lowered: what few tokens tell is no more precise than that."""


@dataclass(frozen=True, eq=False, slots=True)
class Forecast:
    """What is expected of the steps after a window."""

    shares: NDArray[np.float64]
    """(L, E) of each layer's load, summing to 1 or, where a layer had none, 0."""
    error: float
    """Mean squared error within the window over that of the window's mean as known at the same time, in [0, 1]."""


@kernel
def _to_shares(load: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """(L, E) -> each layer over its sum, in mean experts; zero where there is no load."""
    layers, experts = load.shape
    for layer in range(layers):
        total = 0.0
        for expert in range(experts):
            total += load[layer, expert]
        scale = experts / total if total > 0.0 else 0.0
        for expert in range(experts):
            out[layer, expert] = load[layer, expert] * scale


@kernel
def _backtest(
    load: NDArray[np.float64], keeps: NDArray[np.float64], first: int, ahead: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Fading means of a (T, L, E) window, held against the `ahead` steps after each step from `first` on.

    keeps: (F,) what a step keeps of its weight from one step to the next.

    Returns the (F, F) sums of products of errors, the (F, L, E) shares at the end in mean experts, and how often was
    looked ahead.
    """
    steps, layers, experts = load.shape
    fades = keeps.shape[0]
    means = np.zeros((fades, layers, experts))
    shares = np.zeros((fades, layers, experts))
    coming = np.zeros((layers, experts))
    came = np.zeros((layers, experts))
    errors = np.zeros((fades, fades))
    off = np.empty(fades)
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
                    # Of counts nothing is left by rounding, of other loads dust.
                    left = left if left > _DUST else 0.0
                    coming[layer, expert] = left + load[known + ahead - 1, layer, expert]
        _to_shares(coming, came)
        for fade in range(fades):
            _to_shares(means[fade], shares[fade])
        for layer in range(layers):
            for expert in range(experts):
                for fade in range(fades):
                    off[fade] = shares[fade, layer, expert] - came[layer, expert]
                for fade in range(fades):
                    for other in range(fades):
                        errors[fade, other] += off[fade] * off[other]
    for fade in range(fades):
        _to_shares(means[fade], shares[fade])
    return errors, shares, looks


def forecast(load: NDArray[np.float64]) -> Forecast | None:
    """What shares experts will have, and how much better than by the window's mean that was foretold within it.

    Args:
        load: (T, L, E) [tokens], oldest first.

    Returns:
        None where the window is too short to look ahead within it more than once (under 9 steps), or its mean never erred.

    Raises:
        ShapeMismatch: `load` has another number of axes.
    """
    if load.ndim != 3:
        raise ShapeMismatch(f"load must be (T, L, E), got {load.shape}")
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
    # The least of a square form grows with the square of its weights' sum, so how firmly that is held to one is all the same.
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
    """The window with every expert's mean moved to where it is expected; what steps do beside that stays.

    Better than to give newest steps most of the weight: what experts do together in a step lasts longer than their
    means, and takes many steps to see.

    Args:
        load: (T, L, E) [tokens].
        weights: (T,) of the steps, summing to 1.
        expected: the forecast for that window.

    Returns:
        (T, L, E) float64 [tokens]; the weighted load of a layer stays what it is, but for experts that come up after none.
    """
    mean = np.tensordot(weights, load, axes=1)
    moved = expected.shares * mean.sum(axis=1, keepdims=True)
    factor = np.divide(moved, mean, out=np.ones_like(mean), where=mean > 0)
    return np.asarray(load * np.clip(factor, 1.0 / _FARTHEST, _FARTHEST), np.float64)
