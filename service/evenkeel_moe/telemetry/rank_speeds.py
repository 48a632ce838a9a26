"""Joins the curves that ranks measured, and logs which ranks are slow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from evenkeel_moe.model.cost import CostCurves
from evenkeel_moe.wire.link import CostCurve

_log = structlog.get_logger(__name__)


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
