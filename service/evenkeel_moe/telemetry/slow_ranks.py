"""Logs which ranks are slow."""

from collections.abc import Mapping

import numpy as np
import structlog
from numpy.typing import NDArray

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol.messages import Hello

_log = structlog.get_logger(__name__)
_ABOVE = 1.15
"""Factor above which a rank becomes slow."""
_BELOW = 1.08
"""Factor below which a slow rank is no longer slow."""
_CHECKS = 3
"""Updates in a row that must agree."""


class SlowRanks:
    """Logs once when a rank becomes slow, and once when it is no longer slow."""

    def __init__(self) -> None:
        self._slow: set[EpRank] = set()
        self._streak: dict[EpRank, int] = {}
        """Updates in a row in which a rank was found to have changed."""

    def update(
        self, deployment: str, factors: NDArray[np.float64], hellos: Mapping[EpRank, Hello]
    ) -> None:
        """Take the newest factors and log ranks that have become slow or are no longer slow.

        Args:
            deployment: name for the log.
            factors: (R,) seconds of each rank relative to the median rank; NaN if unknown.
            hellos: which device each rank runs on.
        """
        self._slow = {rank for rank in self._slow if rank < len(factors)}
        for rank, hello in hellos.items():
            factor = factors[rank] if rank < len(factors) else np.nan
            if np.isnan(factor):
                continue
            was_slow = rank in self._slow
            changes = factor < _BELOW if was_slow else factor > _ABOVE
            self._streak[rank] = self._streak.get(rank, 0) + 1 if changes else 0
            if self._streak[rank] < _CHECKS:
                continue
            self._streak[rank] = 0
            self._slow ^= {rank}
            (_log.info if was_slow else _log.warning)(
                "rank_no_longer_slow" if was_slow else "rank_slow",
                deployment=deployment,
                rank=int(rank),
                factor=round(float(factor), 3),
                node=hello.node,
                gpu_uuid=hello.gpu_uuid,
            )
