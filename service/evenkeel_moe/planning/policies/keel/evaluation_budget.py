"""How many candidates keel may evaluate: in a large model a share for every layer that no other layer can use up."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

__all__ = ["Evaluations"]

_LEAST_TOTAL = 2_000_000
_SMALL = 1 << 15
"""Layers x experts x ranks up to which the least total is one pool: replans there use a sixth of it at most."""
_PER_LAYER = 300_000
"""Candidates that bring a strongly skewed layer of 256 experts on 32 ranks from the engines' start to its
end: 175,000, on 64 ranks more."""
_COMMON_SIZE = 256 * 64 * 256
"""Experts x ranks x steps of a layer up to which a candidate takes about a microsecond. From there on the share falls with
the square, as the time does: 18 microseconds on 288 ranks, mostly to bring slopes up to date after every move."""


class Evaluations:
    """What was evaluated by now, over all searches of one plan.

    Shares follow from the sizes alone, so the same problem gives the same bytes on any machine, and a total that is
    just what was used gives them again.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        layers, experts, ranks = (
            problem.load.shape[1],
            problem.load.shape[2],
            problem.shape.num_ranks,
        )
        size = experts * ranks * len(problem.load)
        self._pooled = layers * experts * ranks <= _SMALL
        self.share = total = _LEAST_TOTAL
        if not self._pooled:
            for_size = int(_PER_LAYER * min(1.0, _COMMON_SIZE / size) ** 2)
            self.share = max(_LEAST_TOTAL // layers, for_size)
            total = self.share * layers
        self.used = 0
        self._total = (
            total if problem.max_evaluations is None else min(total, problem.max_evaluations)
        )
        self._spent = np.zeros(layers, np.int64)
        self._kept = 0

    def left(self, layer: int) -> int:
        """What a layer may still use; 0 or less where nothing is left."""
        return min(self.share - self._kept - int(self._spent[layer]), self._total - self.used)

    def spend(self, layer: int, count: int) -> None:
        """Book candidates on a layer."""
        self._spent[layer] += count
        self.used += count

    @contextmanager
    def keeping(self, part: float) -> Iterator[None]:
        """Within, a part of every share is kept for what comes after; of a pool nothing is."""
        before = self._kept
        self._kept = 0 if self._pooled else int(part * self.share)
        try:
            yield
        finally:
            self._kept = before
