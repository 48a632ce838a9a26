"""Calibrates the gain of a verdict by what earlier plans delivered.

The factor is the slope of the line through the origin that fits delivered to modelled gains with
least absolute deviations: the median of their ratios, weighted by the modelled gains. One odd plan
hardly moves it, and plans with small gains, whose ratios are noise, count little. With few plans it
is shrunk to 1, as if four further plans had delivered exactly what was modelled.

Source: Bloomfield and Steiger, Least Absolute Deviations (1983), 1.2, for the weighted median.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.delivered import GainPair

PLANS = 8
"""Newest plans that count; more would remember an engine that has changed."""
_PRIOR_PLANS = 4
_LEAST, _MOST = 0.25, 1.5
"""Bounds of the factor: however little was delivered, a large modelled gain can still be tried."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The factor by which modelled gains are multiplied, by what earlier plans delivered."""

    factor: float
    plans: int
    """Measured plans that it rests on; 0 if nothing is calibrated."""


NOT_CALIBRATED = Calibration(1.0, 0)


def calibrate(pairs: Sequence[GainPair]) -> Calibration:
    """Return the factor for the next verdict.

    Args:
        pairs: measured plans, the oldest first.
    """
    usable = [pair for pair in pairs if pair.counts][-PLANS:]
    if not usable:
        return NOT_CALIBRATED
    weights = np.array([pair.modelled for pair in usable])
    ratios = np.array([pair.delivered for pair in usable]) / weights
    share = len(usable) / (len(usable) + _PRIOR_PLANS)
    factor = 1.0 + share * (weighted_median(ratios, weights) - 1.0)
    return Calibration(min(max(factor, _LEAST), _MOST), len(usable))


def weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the least value with at least half of the weight at or below it."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, 0.5 * reached[-1])])
