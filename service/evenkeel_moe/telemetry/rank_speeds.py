"""Determines the speeds of ranks, from measured curves or from serving, and reports slow ranks.

Speed factors need neither a pause nor a profile: a step gives the tokens and the pre-collective
    seconds of every rank. Seconds per token alone would make a rank with few tokens look slow,
    because a layer has a cost at any count. All ranks together therefore give one curve of seconds
    by tokens, and the factor of a rank is the median of its seconds divided by this curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from evenkeel_moe.model.cost import CostCurves
from evenkeel_moe.wire.link import CostCurve

_log = structlog.get_logger(__name__)
_BINS = 12
_PASSES = 12
"""Iterations between the curve and the factors; ranks whose tokens hardly overlap need this many to
converge."""
_MIN_STEPS = 16


def speed_factors(tokens: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of each rank relative to the median rank at the same number of tokens.

    Args:
        tokens: (T, R) tokens each rank carried in a step, over all layers.
        seconds: (T, R) its compute before the collective; NaN if not measured.

    Returns:
        (R,) float64: 1 is the median rank, 1.2 takes a fifth longer; NaN for a rank with fewer than
        16 measured steps. All averages are medians: outliers in up to half the steps of a rank have
        no effect.
    """
    ranks = tokens.shape[1] if tokens.ndim == 2 else 0
    known = (tokens > 0) & (seconds > 0) & np.isfinite(seconds)
    enough = known.sum(axis=0) >= _MIN_STEPS if ranks else np.zeros(0, bool)
    if not enough.any():
        return np.full(ranks, np.nan)
    known &= enough
    # Passes only change the seconds, so the tokens are sorted and divided into bins once.
    carried = tokens[known]
    parts = np.array_split(np.argsort(carried, kind="stable"), min(_BINS, len(carried)))
    at = np.array([_median(carried[part]) for part in parts])
    keep = np.concatenate([[True], np.diff(at) > 0])
    rows = [np.flatnonzero(column) for column in known.T]
    factors = np.where(enough, 1.0, np.nan)
    for _ in range(_PASSES):
        level = _rising(parts, (seconds / factors)[known])
        expected = np.interp(tokens, at[keep], level[keep])
        ratios = [seconds[row, rank] / expected[row, rank] for rank, row in enumerate(rows)]
        factors = np.array([_median(ratio) if len(ratio) else np.nan for ratio in ratios])
        factors /= _median(factors[enough])
    return factors


def _rising(parts: list[NDArray[np.int64]], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the curve of all ranks in each bin: the largest median of this and earlier bins."""
    return np.asarray(np.maximum.accumulate([_median(seconds[part]) for part in parts]), np.float64)


def _median(values: NDArray[np.float64]) -> float:
    """Return exactly `np.median` of finite values, without its checks, which take longer."""
    ordered, count = np.sort(values), len(values)
    return float((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)


def join_curves(curves: Sequence[CostCurve | None]) -> CostCurves | None:
    """Return the measured curves of all ranks in the form of the planner.

    None unless every rank has a curve, all with the same tile.
    """
    told = [curve for curve in curves if curve is not None]
    if not told or len(told) < len(curves) or len({curve.tile_tokens for curve in told}) > 1:
        return None
    tile, width = told[0].tile_tokens, max(len(curve.tile_seconds) for curve in told)
    rows = np.empty((len(told), width))
    for row, curve in zip(rows, told, strict=True):
        have = len(curve.tile_seconds)
        row[:have] = curve.tile_seconds
        beyond = np.arange(1, width - have + 1) * tile * curve.slope_s_per_token
        row[have:] = curve.tile_seconds[-1] + beyond
    return CostCurves(tile, rows, np.array([curve.slope_s_per_token for curve in told]))


@dataclass(frozen=True, slots=True)
class Device:
    """The hardware that a rank runs on."""

    node: str
    gpu_uuid: str


class SlowRanks:
    """Logs once when a rank becomes slow, and once when it is no longer slow.

    Args:
        above: factor above which a rank becomes slow.
        below: factor below which a slow rank is no longer slow.
        checks: updates in a row that must agree.
    """

    def __init__(self, above: float = 1.15, below: float = 1.08, checks: int = 3) -> None:
        self._above = above
        self._below = below
        self._checks = checks
        self._streak: dict[int, int] = {}
        self.slow: dict[int, float] = {}
        """Factors of the slow ranks."""

    def update(
        self, deployment: str, factors: NDArray[np.float64], devices: Mapping[int, Device]
    ) -> None:
        """Take the newest factors and log ranks that have become slow or are no longer slow."""
        for rank, factor in enumerate(factors.tolist()):
            if np.isnan(factor):
                continue
            was_slow = rank in self.slow
            changes = factor < self._below if was_slow else factor > self._above
            self._streak[rank] = self._streak.get(rank, 0) + 1 if changes else 0
            if was_slow and not changes:
                self.slow[rank] = factor
            if self._streak[rank] < self._checks:
                continue
            self._streak[rank] = 0
            device = devices.get(rank, Device("", ""))
            fields = {
                "deployment": deployment,
                "rank": rank,
                "node": device.node,
                "gpu_uuid": device.gpu_uuid,
            }
            if was_slow:
                del self.slow[rank]
                _log.info("rank_no_longer_slow", factor=round(factor, 3), **fields)
            else:
                self.slow[rank] = factor
                _log.warning("rank_slow", factor=round(factor, 3), **fields)
        self.slow = {rank: factor for rank, factor in self.slow.items() if rank < len(factors)}
