"""Keeps what is needed to check the counts of the newest steps against themselves, step by step."""

from collections.abc import Mapping, Sequence

import numpy as np

from evenkeel_moe.model.finding import Finding
from evenkeel_moe.model.load import MAX_STEP, LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.signals.live_findings import StepSums, check_live
from evenkeel_moe.planning.signals.load_findings import MOST_DEVIATION
from evenkeel_moe.telemetry.step_kernels import sum_counts
from evenkeel_moe.telemetry.windows import new_steps, steps_at_once


class LoadCheck:
    """Checks the newest steps of all phases of one deployment.

    Steps whose counts do not add up never enter a window (R19), but they tell most about a counter
    that is broken. They are added apart, and are checked among the steps of the windows.

    Args:
        capacity: newest steps that count.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._newest: dict[Phase, int] = {}
        """The newest step of each window that was added."""
        self._steps = np.zeros((2, 0), np.int64)
        """Step and epoch of each step, in rising order."""
        self._choices = np.zeros((0, 0), np.int64)
        """(T, L) [tokens] sum over the experts."""
        self._counted_at = np.zeros((0, 0), np.int64)
        """(L, E) newest step up to which an expert counted a token, -1 if it never did. Steps that
        were added together have the number of their last one."""

    def update(self, windows: Mapping[Phase, Sequence[LoadWindow]]) -> None:
        """Add the steps that are new since the last call, the oldest first.

        Args:
            windows: each in parts, oldest first. Of a large shape, some steps wait for later calls.
        """
        for phase, parts in windows.items():
            most = steps_at_once(*parts[-1].counts.shape[1:])
            for _, new in new_steps({phase: parts}, self._newest, most, self._capacity):
                for part in new:
                    self.add(part)

    def add(self, steps: LoadWindow) -> None:
        """Add steps, at least one, that are not those of an earlier call."""
        sizes = steps.counts.shape[1:]
        if sizes != self._counted_at.shape:
            # Not `clear`: `update` has noted the newest step of this window by now.
            self._steps = np.zeros((2, 0), np.int64)
            self._choices = np.zeros((0, sizes[0]), np.int64)
            self._counted_at = np.full(sizes, -1, np.int64)
        known = np.hstack([self._steps, np.stack([steps.steps, steps.epochs])])
        # Those of other phases may be newer.
        order = np.argsort(known[0], kind="stable")[-self._capacity :]
        sums, of_experts = sum_counts(steps.counts)
        self._steps = known[:, order]
        self._choices = np.concatenate([self._choices, sums])[order]
        last = np.where(of_experts > 0, steps.steps[-1], -1)
        self._counted_at = np.maximum(self._counted_at, last)

    def findings(
        self,
        placement: Placement,
        epoch: int,
        *,
        most_deviation: float = MOST_DEVIATION,
        most_idle: float = 0,
    ) -> tuple[Finding, ...] | None:
        """Return what the newest steps show; None without a step of the placement's sizes.

        Args:
            placement: the present one.
            epoch: of the placement.
            most_deviation: share of its choices by which a layer may differ from the others.
            most_idle: share of the experts that may be idle in every layer.
        """
        sizes = placement.num_layers, placement.num_logical_experts
        if not self._choices.any() or self._counted_at.shape != sizes:
            return None
        steps, epochs = self._steps
        window, present = (
            StepSums(self._choices[chosen], self._counted_at >= steps[chosen].min(initial=MAX_STEP))
            for chosen in (np.ones(len(steps), np.bool_), epochs >= epoch)
        )
        return check_live(
            window, present, placement, most_deviation=most_deviation, most_idle=most_idle
        )
