"""Keeps the balance of the window under the present placement up to date, step by step."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT, SplitModel
from evenkeel_moe.telemetry.windows import new_steps, steps_at_once


class _PhaseBalance(NamedTuple):
    """The figures of the newest steps of one phase, oldest first."""

    balance: NDArray[np.float64]
    """(T, L) in (0, 1], NaN without load."""
    tokens: NDArray[np.float64]
    """(T, R) tokens each rank carried over all layers."""


class Balance:
    """Computes the balancedness and the load shares of the windows of one deployment.

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
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._under: tuple[str, DispatchModel, Topology | None] | None = None
        """Digest of the placement, and the split, under which the figures are computed."""
        self._newest: dict[Phase, int] = {}
        self._phases: dict[Phase, _PhaseBalance] = {}

    def update(self, windows: Mapping[Phase, Sequence[LoadWindow]], placement: Placement) -> None:
        """Add the steps that are new since the last call, the oldest first.

        Args:
            windows: each in parts, oldest first. Of a large shape, some steps wait for later calls.
            placement: the placement under which balance is computed.
        """
        split = self._split_now()
        under = (placement.digest, split.dispatch, split.topology)
        if under != self._under:
            self.clear()
            self._under = under
        empty = _PhaseBalance(
            np.zeros((0, placement.num_layers)), np.zeros((0, placement.num_ranks))
        )
        cut = slice(-self._capacity, None)
        most = steps_at_once(placement.num_layers, placement.num_slots)
        for phase, new in new_steps(windows, self._newest, most, self._capacity):
            try:
                by_rank = [metrics.rank_load(part.counts, placement, split) for part in new]
            except InfeasiblePlan:
                # The placement has lost an expert that still has load in the window: the balance is
                # unknown until these steps leave the window.
                self._phases.pop(phase, None)
                del self._newest[phase]
                continue
            known = self._phases.get(phase, empty)
            balance = [known.balance, *map(metrics.balancedness, by_rank)]
            tokens = [known.tokens, *(load.sum(axis=1) for load in by_rank)]
            self._phases[phase] = _PhaseBalance(
                np.concatenate(balance)[cut], np.concatenate(tokens)[cut]
            )

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
        steps = np.isfinite(values).sum(axis=0)
        return np.where(steps > 0, np.nansum(values, axis=0) / np.maximum(steps, 1), np.nan)

    def load_shares(self) -> NDArray[np.float64] | None:
        """Return the (R,) share of the tokens that each rank carried; None without load."""
        tokens = self._joined("tokens")
        if tokens is None or tokens.sum() <= 0:
            return None
        return np.asarray(tokens.sum(axis=0) / tokens.sum(), np.float64)

    def _joined(self, name: str, phase: Phase | None = None) -> NDArray[np.float64] | None:
        """Concatenate a figure over one phase or all; None before the first step."""
        parts = [
            getattr(known, name) for key, known in self._phases.items() if phase in (None, key)
        ]
        return np.concatenate(parts) if parts else None
