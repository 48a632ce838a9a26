"""Keeps the balance of the window under the present placement up to date, step by step."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan
from evenkeel_moe.model.load import LoadWindow, Phase, measured_seconds
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT, SplitModel
from evenkeel_moe.telemetry.windows import newest_parts, oldest_parts, steps_at_once


class _PhaseBalance:
    """The figures of the newest steps of one phase, oldest first."""

    def __init__(self, placement: Placement) -> None:
        layers, ranks = placement.num_layers, placement.num_ranks
        self.steps = np.zeros(0, np.int64)
        self.balance = np.zeros((0, layers))
        """(T, L) in (0, 1], NaN without load."""
        self.tokens = np.zeros((0, ranks))
        """(T, R) tokens each rank carried over all layers."""
        self.compute_s = np.zeros((0, ranks))
        """(T, R) MoE compute seconds; NaN if not measured."""


class Balance:
    """Computes balancedness, load shares and seconds per token of the windows of one deployment.

    The rank loads of a step are computed once; only another placement or another split of tokens
    makes all of them be computed again.

    Args:
        capacity: newest steps of a phase that count.
        split: returns how tokens split over replicas at present; a change of its dispatcher or
            topology is noticed.
    """

    def __init__(self, capacity: int, split: Callable[[], SplitModel] = lambda: EVEN_SPLIT) -> None:
        self._capacity = capacity
        self._split_now = split
        self._split = EVEN_SPLIT
        self._placement: Placement | None = None
        self._phases: dict[Phase, _PhaseBalance] = {}

    def clear(self) -> None:
        """Forget all steps."""
        self._placement = None
        self._phases.clear()

    def update(self, windows: Mapping[Phase, Sequence[LoadWindow]], placement: Placement) -> None:
        """Add the steps that are new since the last call, the oldest first.

        Args:
            windows: each in parts, oldest first. Of a large shape, some steps wait for later calls.
            placement: the placement under which balance is computed.
        """
        split = self._split_now()
        same = (split.dispatch, split.topology) == (self._split.dispatch, self._split.topology)
        if self._placement is None or placement.digest != self._placement.digest or not same:
            self.clear()
            self._placement, self._split = placement, split
        most = steps_at_once(placement.num_layers, placement.num_slots)
        for phase, parts in windows.items():
            known = self._phases.setdefault(phase, _PhaseBalance(placement))
            newest = int(known.steps[-1]) if len(known.steps) else -1
            new = oldest_parts(newest_parts(parts, newest, self._capacity), most)
            if not new:
                continue
            try:
                by_rank = [metrics.rank_load(part.counts, placement, self._split) for part in new]
            except InfeasiblePlan:
                # The placement has lost an expert that still has load in the window: the balance is
                # unknown until these steps leave the window.
                del self._phases[phase]
                continue
            cut = slice(-self._capacity, None)
            balance = map(metrics.balancedness, by_rank)
            tokens = (load.sum(axis=1) for load in by_rank)
            compute_s = (part.compute_s for part in new)
            known.steps = np.concatenate([known.steps, *(part.steps for part in new)])[cut]
            known.balance = np.concatenate([known.balance, *balance])[cut]
            known.tokens = np.concatenate([known.tokens, *tokens])[cut]
            known.compute_s = np.concatenate([known.compute_s, *compute_s])[cut]

    def summary(self, phase: Phase | None = None) -> tuple[float | None, float | None]:
        """Return (mean, worst layer) of one phase or of all; None without load."""
        by_layer = self.by_layer(phase)
        if by_layer is None or np.isnan(by_layer).all():
            return None, None
        return float(np.nanmean(by_layer)), float(np.nanmin(by_layer))

    def by_layer(self, phase: Phase | None = None) -> NDArray[np.float64] | None:
        """Return the (L,) balancedness of each layer, averaged over its steps with load.

        NaN for a layer without load; None before the first step.
        """
        values = self._joined("balance", phase)
        if values is None or not len(values):
            return None
        known = ~np.isnan(values)
        steps = known.sum(axis=0)
        total = np.where(known, values, 0.0).sum(axis=0)
        return np.where(steps > 0, total / np.maximum(steps, 1), np.nan)

    def load_shares(self) -> NDArray[np.float64] | None:
        """Return the (R,) share of the tokens that each rank carried; None without load."""
        tokens = self._joined("tokens")
        if tokens is None or tokens.sum() <= 0:
            return None
        return np.asarray(tokens.sum(axis=0) / tokens.sum(), np.float64)

    def seconds_per_token(self) -> NDArray[np.float64]:
        """Return the (R,) median compute seconds per token carried in a layer.

        NaN if not measured; empty before the first step.
        """
        tokens, seconds = self._joined("tokens"), self._joined("compute_s")
        if tokens is None or seconds is None:
            return np.zeros(0)
        seconds = measured_seconds(seconds)
        measured = np.where(tokens > 0, seconds / np.maximum(tokens, 1.0), np.nan)
        return np.array(
            [
                np.median(column[~np.isnan(column)]) if (~np.isnan(column)).any() else math.nan
                for column in measured.T
            ]
        )

    def _joined(self, name: str, phase: Phase | None = None) -> NDArray[np.float64] | None:
        """Concatenate a figure over one phase or all; None before the first step."""
        parts = [
            getattr(known, name) for key, known in self._phases.items() if phase in (None, key)
        ]
        return np.concatenate(parts) if parts else None
