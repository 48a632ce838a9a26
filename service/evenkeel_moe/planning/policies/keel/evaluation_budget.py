"""Limits how many candidates one plan may evaluate, by the sizes of the problem alone.

The same problem so gives the same bytes on any machine. In a large model every layer has a share of
its own, which no other layer can use up.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from evenkeel_moe.planning.policies.keel.options import DEFAULT_OPTIONS, KeelOptions
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem


class EvaluationBudget:
    """The candidates evaluated so far, and those still allowed, over all searches of one plan.

    A plan that may evaluate just what another plan used gives the bytes of that plan.

    Attributes:
        is_pooled: True in a small model, where any layer may use all candidates.
        share: candidates that one layer may evaluate; in a small model, all layers together.
        used: candidates evaluated so far.
    """

    def __init__(self, problem: PlacementProblem, options: KeelOptions = DEFAULT_OPTIONS) -> None:
        steps, layers, experts = problem.load.shape
        ranks = problem.shape.num_ranks
        self.is_pooled = layers * experts * ranks <= options.pooled_size
        self.share = total = options.least_evaluations
        if not self.is_pooled:
            size = experts * ranks * steps
            least = options.least_evaluations
            if size > options.common_layer_size:
                least = options.large_evaluations
            for_size = options.layer_evaluations * min(1.0, options.common_layer_size / size) ** 3
            self.share = max(least // layers, int(for_size))
            total = self.share * layers
        if problem.max_evaluations is not None:
            total = min(total, problem.max_evaluations)
        self.used = 0
        self._total = total
        self._spent = np.zeros(layers, np.int64)
        self._kept = 0

    def left(self, layer: int) -> int:
        """Return the candidates that a layer may still evaluate; 0 or less if there are none."""
        return min(self.share - self._kept - int(self._spent[layer]), self._total - self.used)

    def suffice_for(self, layers: Sequence[int]) -> bool:
        """Return True if every one of these layers may use its share, whatever the others use."""
        shares = sum(max(0, self.share - self._kept - int(self._spent[one])) for one in layers)
        return not self.is_pooled and shares <= self._total - self.used

    def is_spent(self) -> bool:
        """Return True if no layer may evaluate another candidate."""
        return all(self.left(layer) <= 0 for layer in range(len(self._spent)))

    def spend(self, layer: int, count: int) -> None:
        """Book evaluated candidates on a layer."""
        self._spent[layer] += count
        self.used += count

    @contextmanager
    def keeping(self, part: float) -> Iterator[None]:
        """Keep a part of every layer's share for what follows; of a pool nothing is kept."""
        before = self._kept
        self._kept = 0 if self.is_pooled else int(part * self.share)
        try:
            yield
        finally:
            self._kept = before
