"""Works out how fast an engine serves, by the moments at which its steps were complete.

Reports carry many steps each, so one moment tells little of one step. Between two moments the mean
counts, and of these means the median over the steps: a time without requests, in which an engine
runs no step, is one long stretch and hardly moves it.
"""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from evenkeel_moe.model.delivered import ServingSpeed
from evenkeel_moe.model.load import LoadWindow
from evenkeel_moe.planning.decision.calibration import weighted_median

_APART_S = 0.2
"""Least time between two moments: ranks report one after the other."""
_MOMENTS = 1024
_FEWEST = 3
"""Stretches that are enough for a median."""


class StepTimes:
    """The moments at which the newest steps of one group were complete."""

    def __init__(self) -> None:
        self._moments: deque[tuple[float, int]] = deque(maxlen=_MOMENTS)
        """Monotonic seconds, and number of the newest step."""

    def note(self, at: float, step: int) -> None:
        """Note the newest complete step."""
        if self._moments and (at - self._moments[-1][0] < _APART_S or step <= self._moments[-1][1]):
            return
        self._moments.append((at, step))

    def step_s(self, first: int, last: int) -> float | None:
        """Return the seconds from one step to the next, of the steps `first` to `last`.

        None if too few moments lie between them.
        """
        inside = [moment for moment in self._moments if first <= moment[1] <= last]
        if len(inside) <= _FEWEST:
            return None
        stretches = np.array([(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(inside)])
        return weighted_median(stretches[:, 0] / stretches[:, 1], stretches[:, 1])

    def newest_s(self, seconds: float) -> float | None:
        """Return the seconds from one step to the next in the newest time; None if not known."""
        if not self._moments:
            return None
        at, last = self._moments[-1]
        enough = self._moments[max(0, len(self._moments) - _FEWEST - 1)][1]
        first = next(step for then, step in self._moments if then >= at - seconds)
        return self.step_s(min(first, enough), last)


def serving_speed(
    times: StepTimes,
    parts: Iterable[LoadWindow],
    epoch: int,
    until: int,
    most: int,
    *,
    newest: bool,
) -> ServingSpeed | None:
    """Return how fast steps under a placement were served; None if it is not known.

    Args:
        times: of the steps.
        parts: of the windows of all phases.
        epoch: of the placement.
        until: the last step that counts.
        most: steps that count.
        newest: True for the last `most` steps, False for the first.
    """
    rows = []
    for part in parts:
        use = (part.epochs == epoch) & (part.steps <= until) & (part.tokens >= 0).all(axis=1)
        if use.any():
            rows.append((part.steps[use], part.tokens[use].sum(axis=1)))
    if not rows:
        return None
    steps, tokens = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    order = np.argsort(steps, kind="stable")
    chosen = order[-most:] if newest else order[:most]
    step_s = times.step_s(int(steps[chosen[0]]), int(steps[chosen[-1]]))
    if step_s is None:
        return None
    return ServingSpeed(step_s, float(tokens[chosen].mean()) / step_s)
