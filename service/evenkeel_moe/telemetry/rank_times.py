"""Keeps the tokens, active replicas and seconds of each rank, step by step, and fits them.

Each step is counted under the placement that it ran under, so what is known of the ranks' times
outlives a move. It is the only source of the ranks' speeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import LoadWindow, Phase, measured_seconds
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.telemetry.robust import column_medians
from evenkeel_moe.telemetry.time_fit import NoFit, TimeFit, fit_present_speeds
from evenkeel_moe.telemetry.windows import new_steps, steps_at_once

_FIT_EVERY = 16
"""New steps after which the fit is made again; it takes milliseconds to tens of milliseconds."""


class RankTimes:
    """Tokens, active replicas and seconds of the ranks in the newest steps of all phases.

    Args:
        capacity: steps that are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._newest: dict[Phase, int] = {}
        self._steps = np.zeros(0, np.int64)
        self._rows = np.zeros((0, 3, 0))
        """(T, 3, R) tokens, active replicas and seconds, oldest step first."""
        self._layers = 0
        self._speed_since = np.zeros(0, np.int64)
        """(R,) first step that counts for each rank: the first at its present speed."""
        self._fit: TimeFit | NoFit | None = None
        self._good: TimeFit | None = None
        """The newest fit that was sound. Its slopes hold although newer steps may be refused."""
        self._since_fit = self._since_good = 0
        self._change_waits = False

    def update(
        self,
        windows: Mapping[Phase, Sequence[LoadWindow]],
        placement: Placement,
        epoch: int,
        split: SplitModel,
        earlier: Mapping[Epoch, Placement] = MappingProxyType({}),
    ) -> None:
        """Add the steps that are new since the last call and have seconds, the oldest first.

        Args:
            windows: each in parts, oldest first. Of a large shape, some steps wait for later calls.
            placement: the placement of the epoch.
            epoch: the present one; steps of a later one wait until it is.
            split: how tokens split over replicas now.
            earlier: placements of other epochs; steps of an epoch without placement are left out.
        """
        if self._rows.shape[2] != placement.num_ranks:
            self.clear()
            self._rows = np.zeros((0, 3, placement.num_ranks))
            self._speed_since = np.zeros(placement.num_ranks, np.int64)
        self._layers = placement.num_layers
        known = {int(one): its for one, its in earlier.items() if its.sizes == placement.sizes}
        known[epoch] = placement
        until_now = {
            phase: [part.slice(slice(0, np.searchsorted(part.epochs, epoch + 1))) for part in parts]
            for phase, parts in windows.items()
        }
        most = steps_at_once(placement.num_layers, placement.num_slots)
        for _, parts in new_steps(until_now, self._newest, most, self._capacity):
            for part in parts:
                timed = np.isfinite(part.compute_s).any(axis=1)
                for one in np.unique(part.epochs[timed]).tolist():
                    if one in known:
                        self._add(part.slice(timed & (part.epochs == one)), known[one], split)

    def _add(self, part: LoadWindow, placement: Placement, split: SplitModel) -> None:
        try:
            tokens, active = metrics.rank_totals(part.counts, placement, split)
        except InfeasiblePlan:
            return  # The placement has lost an expert that has load: its tokens went nowhere.
        seconds = measured_seconds(part.compute_s)
        rows = np.stack([tokens, active, seconds], axis=1)
        steps = np.concatenate([self._steps, part.steps])
        order = np.argsort(steps, kind="stable")[-self._capacity :]
        self._steps = steps[order]
        self._rows = np.concatenate([self._rows, rows])[order]
        self._since_fit += len(rows)
        self._since_good += len(rows)

    def fit(self) -> TimeFit | NoFit:
        """Return the fit to the steps kept.

        A fit stands until 16 more steps came, or fewer if a speed seems to have changed. If newer
        steps are refused, the last sound fit stands until its steps are no longer kept, and says
        why.
        """
        sound = isinstance(self._fit, TimeFit) and not self._fit.refused
        due = _FIT_EVERY if sound and not self._change_waits else 1
        if self._fit is None or self._since_fit >= due:
            self._fit = self._fit_again()
            self._since_fit = 0
        return self._fit

    def _fit_again(self) -> TimeFit | NoFit:
        tokens, active, seconds = self._rows.swapaxes(0, 1)
        first = np.searchsorted(self._steps, self._speed_since)
        found, changes = fit_present_speeds(
            tokens, active, seconds, self._layers, self._good, first
        )
        self._change_waits = changes.waiting
        for rank in np.flatnonzero(changes.first > first).tolist():
            self._speed_since[rank] = self._steps[changes.first[rank]]
        if isinstance(found, TimeFit):
            self._good, self._since_good = found, 0
        elif self._good is not None and self._since_good < self._capacity:
            return replace(self._good, refused=found.reason)
        return found

    def speed_factors(self) -> NDArray[np.float64]:
        """Return the (R,) seconds of each rank relative to the median rank at the same work.

        1.2 takes a fifth longer; 1 where no difference is clear; NaN if unknown. Factors are known
        also where the seconds are no sound cost model, for example because the tokens hardly vary.
        """
        factors = self.fit().factors
        return np.full(self._rows.shape[2], np.nan) if factors is None else factors

    def seconds_per_token(self) -> NDArray[np.float64]:
        """Return the (R,) median compute seconds per token carried in a layer.

        NaN if not measured; empty before the first step.
        """
        tokens, _, seconds = self._rows.swapaxes(0, 1)
        return column_medians(np.where(tokens > 0, seconds / np.maximum(tokens, 1.0), np.nan))
