"""How balanced the window is under the present placement, kept up to date step by step."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT, SplitModel
from evenkeel_moe.telemetry.rank_speeds import speed_factors
from evenkeel_moe.telemetry.windows import newest_parts

__all__ = ["Balance"]

_FACTORS_EVERY = 16
"""New steps after which speed factors are worked out again: they are medians of hundreds, and cost milliseconds."""


class _PhaseBalance:
    """Figures of the newest steps of one phase, oldest first."""

    def __init__(self, placement: Placement) -> None:
        layers, ranks = placement.num_layers, placement.num_ranks
        self.steps = np.zeros(0, np.int64)
        self.balance = np.zeros((0, layers))
        """(T, L) in (0, 1], NaN where nothing was routed."""
        self.tokens = np.zeros((0, ranks))
        """(T, R) tokens each rank carried over all layers."""
        self.compute_s = np.zeros((0, ranks))
        """(T, R) MoE compute seconds; NaN where not measured."""


class Balance:
    """Balancedness, load shares and speeds of one deployment's windows.

    A step costs its own rank loads once; only a new placement, or another split, makes everything be worked out again.

    Args:
        capacity: newest steps of a phase that count.
        split: tells how tokens split over replicas now; its dispatcher and topology are looked at.
    """

    def __init__(self, capacity: int, split: Callable[[], SplitModel] = lambda: EVEN_SPLIT) -> None:
        self._capacity = capacity
        self._split_now = split
        self._split = EVEN_SPLIT
        self._placement: Placement | None = None
        self._phases: dict[Phase, _PhaseBalance] = {}
        self._factors: NDArray[np.float64] | None = None
        """None while none is known; see `speed_factors`."""
        self._steps_since_factors = 0

    def clear(self) -> None:
        """Forget everything: the windows begin anew."""
        self._placement = self._factors = None
        self._phases.clear()

    def update(self, windows: Mapping[Phase, Sequence[LoadWindow]], placement: Placement) -> None:
        """Take in the steps that are new since the last call.

        Args:
            windows: each in parts, oldest first.
            placement: the map they are balanced, or not, under.
        """
        split = self._split_now()
        same = (split.dispatch, split.topology) == (self._split.dispatch, self._split.topology)
        if self._placement is None or placement.digest != self._placement.digest or not same:
            self.clear()
            self._placement, self._split = placement, split
        for phase, parts in windows.items():
            known = self._phases.setdefault(phase, _PhaseBalance(placement))
            newest = int(known.steps[-1]) if len(known.steps) else -1
            new = newest_parts(parts, newest, self._capacity)
            if not new:
                continue
            try:
                by_rank = [metrics.rank_load(part.counts, placement, self._split) for part in new]
            except (
                InfeasiblePlan
            ):  # The map lost an expert the window still has load of: unknown until it slides out.
                del self._phases[phase]
                self._factors = None
                continue
            cut = slice(-self._capacity, None)
            balance, tokens = (
                map(metrics.balancedness, by_rank),
                (load.sum(axis=1) for load in by_rank),
            )
            known.steps = np.concatenate([known.steps, *(part.steps for part in new)])[cut]
            known.balance = np.concatenate([known.balance, *balance])[cut]
            known.tokens = np.concatenate([known.tokens, *tokens])[cut]
            known.compute_s = np.concatenate([known.compute_s, *(part.compute_s for part in new)])[
                cut
            ]
            self._steps_since_factors += sum(map(len, new))

    def summary(self, phase: Phase | None = None) -> tuple[float | None, float | None]:
        """(mean, worst layer) of one phase or of all; None where no load is known."""
        by_layer = self.by_layer(phase)
        if by_layer is None or np.isnan(by_layer).all():
            return None, None
        return float(np.nanmean(by_layer)), float(np.nanmin(by_layer))

    def by_layer(self, phase: Phase | None = None) -> NDArray[np.float64] | None:
        """(L,) balancedness of each layer over its steps with load; NaN for a layer without any, None before load."""
        values = self._joined("balance", phase)
        if values is None or not len(values):
            return None
        known = ~np.isnan(values)
        steps = known.sum(axis=0)
        total = np.where(known, values, 0.0).sum(axis=0)
        return np.where(steps > 0, total / np.maximum(steps, 1), np.nan)

    def load_shares(self) -> NDArray[np.float64] | None:
        """(R,) each rank's share of the tokens carried; None without load."""
        tokens = self._joined("tokens")
        if tokens is None or tokens.sum() <= 0:
            return None
        return np.asarray(tokens.sum(axis=0) / tokens.sum(), np.float64)

    def seconds_per_token(self) -> NDArray[np.float64]:
        """(R,) median compute seconds per token carried in a layer; NaN where not measured. Empty before load."""
        tokens, seconds = self._joined("tokens"), self._joined("compute_s")
        if tokens is None or seconds is None:
            return np.zeros(0)
        measured = np.where((tokens > 0) & (seconds > 0), seconds / np.maximum(tokens, 1.0), np.nan)
        return np.array(
            [
                np.median(column[~np.isnan(column)]) if (~np.isnan(column)).any() else math.nan
                for column in measured.T
            ]
        )

    def speed_factors(self) -> NDArray[np.float64]:
        """(R,) each rank's seconds over the median rank's at the same tokens; NaN where not known. Empty before load.

        Once some are known they stand until 16 more steps came.
        """
        if self._factors is not None and self._steps_since_factors < _FACTORS_EVERY:
            return self._factors
        tokens, seconds = self._joined("tokens"), self._joined("compute_s")
        if tokens is None or seconds is None:
            return np.zeros(0)
        found = speed_factors(tokens, seconds)
        self._factors = found if np.isfinite(found).any() else None
        self._steps_since_factors = 0
        return found

    def paces(self) -> NDArray[np.float64]:
        """(R,) seconds per token a planner may compare: the median rank's, times each rank's factor.

        A rank's own seconds per token would make it look slow for carrying little. Where factors are not yet
        known, and only then, they are what there is. NaN where not measured; empty before load.
        """
        own, factors = self.seconds_per_token(), self.speed_factors()
        if len(own) and np.isfinite(own).all() and np.isfinite(factors).all():
            return np.asarray(np.median(own) * factors, np.float64)
        return own

    def _joined(self, name: str, phase: Phase | None = None) -> NDArray[np.float64] | None:
        parts = [
            getattr(known, name) for key, known in self._phases.items() if phase in (None, key)
        ]
        return np.concatenate(parts) if parts else None
