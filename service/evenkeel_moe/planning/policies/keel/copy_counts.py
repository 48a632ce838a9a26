"""The search where every rank has one slot: only the numbers of copies of each expert count.

Under an even split all ranks with copies of an expert then have the same load, so a layer is
described by the copies of each expert, not by experts and ranks. The objective is that of
`state`: the p-norm over ranks of their load, step by step, averaged over the window. A rank's load
is x / n, for an expert with x tokens and n copies, so the power sum of a step is the sum over
experts of x ** p * n ** (1 - p).

A copy of one expert is exchanged for a copy of another. For every expert the exact gain of one copy
more and the exact loss of one copy less are computed; the best exchanges are made, and all is
computed again, until none gains more than the price of its copies.

Units are those of `search`: loads in mean rank loads, gains and prices in layer times.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import kernel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.state import power, root
from evenkeel_moe.planning.policies.keel.window import SearchWindow
from evenkeel_moe.planning.policies.slot_budget import SlotBudget
from evenkeel_moe.planning.problem.layer_threads import map_layers
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

_MOST_PASSES = 256
"""Bounds the search of a layer. Each pass may make many exchanges."""
_UNLIMITED = 1 << 40
"""Stands for no limit on copies."""


class CountSearch:
    """The search of one problem from one start, where `window.counts_suffice`.

    Its methods are those of `search.Search`. It spends no evaluations: a layer takes milliseconds.

    Attributes:
        copies: (L, E) copies of each expert.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        start: Placement,
        window: SearchWindow,
        options: KeelOptions,
        *,
        sharp: bool = False,
    ) -> None:
        self._problem, self._window, self._options = problem, window, options
        sharp = sharp or window.unit_tokens >= options.sharp_tokens
        self._doublings = options.sharp_doublings if sharp else options.smooth_doublings
        self._most = SlotBudget.of(problem).per_layer
        self.copies = start.logcnt.astype(np.int64)
        self._base = start if problem.current is None else problem.current
        # Without a current placement no copy has a price.
        self._had = np.full_like(self.copies, _UNLIMITED)
        if problem.current is not None:
            self._had = problem.current.logcnt.astype(np.int64)

    def search(self, price: float) -> None:
        """Improve every layer until no exchange gains more than the price of its copies."""

        def improve(layer: int) -> int:
            return self._improve(layer, price, _UNLIMITED)

        map_layers(improve, range(len(self.copies)), self._problem.threads)

    def search_few(self, share: float, price: float, before: float) -> None:
        """Go on at a lower price until all copies together change `share` of the slots.

        `before` is the price of the search that came before.
        """
        moves = int(np.maximum(self.copies - self._had, 0).sum())
        left = int(share * self._base.phy2log.size) - moves
        for level in self._options.price_levels:
            if level * price < before:
                for layer in range(len(self.copies)):
                    if left > 0:
                        left = self._improve(layer, level * price, left)

    def placement(self) -> Placement:
        """Return a placement with these copies that needs the fewest moves."""
        rows = _place(self._base.phy2log.copy(), self.copies)
        return Placement(rows, self._base.num_ranks, self._base.num_logical_experts)

    def _improve(self, layer: int, price: float, allowance: int) -> int:
        """Improve one layer; return how many further copies between ranks are still allowed."""
        window = self._window
        if not window.loaded[layer]:
            return allowance
        return _improve_counts(
            window.tokens[layer] * (window.unit_tokens / window.unit_cost),
            window.weights,
            self.copies[layer],
            self._had[layer],
            allowance,
            _Rules(self._most, price, self._options.least_gain, self._doublings),
        )


class _Rules(NamedTuple):
    """The search of a layer keeps to these numbers."""

    most: int
    """Copies of all experts together."""
    price: float
    """The gain that a copy beyond those of the current placement must bring, in layer times."""
    least: float
    """The smallest gain of an exchange, in layer times."""
    doublings: int
    """p of the norm is 2 to this power."""


class _Layer(NamedTuple):
    """One layer under search. Kernels change `copies` and `left`."""

    copies: NDArray[np.int64]
    """(E,) copies of each expert, at least 1."""
    had: NDArray[np.int64]
    """(E,) copies in the current placement: up to these a copy is free."""
    left: NDArray[np.int64]
    """(1,) further copies that may be made beyond `had`."""
    powers: NDArray[np.float64]
    """(E, T) time of each expert's tokens on one rank, to the power p."""
    weight: NDArray[np.float64]
    """(T,) weight of each step, summing to 1."""
    shrink: NDArray[np.float64]
    """n ** (1 - p) by n; 1 for n = 0."""


@kernel
def _improve_counts(
    load: NDArray[np.float64],
    weight: NDArray[np.float64],
    copies: NDArray[np.int64],
    had: NDArray[np.int64],
    allowance: int,
    rules: _Rules,
) -> int:
    """Improve the counts of one layer; return what is left of the allowance.

    Args:
        load: (E, T) time of each expert's tokens on one rank, in layer times.
        weight: (T,) summing to 1.
        copies: (E,) copies of each expert, at least 1. Mutated.
        had: (E,) copies in the current placement.
        allowance: further copies beyond `had`.
        rules: of the search.
    """
    powers = np.empty(load.shape)
    for expert in range(load.shape[0]):
        for t in range(load.shape[1]):
            powers[expert, t] = power(load[expert, t], rules.doublings)
    shrink = np.ones(rules.most + 2)
    for n in range(1, rules.most + 2):
        shrink[n] = n / power(float(n), rules.doublings)
    layer = _Layer(copies, had, np.full(1, allowance), powers, weight, shrink)
    for _ in range(_MOST_PASSES):
        if not _make_exchanges(layer, rules):
            break
    return int(layer.left[0])


@kernel
def _power_sums(layer: _Layer) -> NDArray[np.float64]:
    """Return the (T,) power sums of the rank loads."""
    total = np.zeros(layer.powers.shape[1])
    for expert in range(layer.powers.shape[0]):
        factor = layer.shrink[layer.copies[expert]]
        for t in range(layer.powers.shape[1]):
            total[t] += factor * layer.powers[expert, t]
    return total


@kernel
def _norm(layer: _Layer, rules: _Rules) -> float:
    """Return the objective of a layer."""
    out, total = 0.0, _power_sums(layer)
    for t in range(total.shape[0]):
        out += layer.weight[t] * root(total[t], rules.doublings)
    return out


@kernel
def _make_exchanges(layer: _Layer, rules: _Rules) -> bool:
    """Make the best exchanges; return True if the norm fell by more than the price of copies.

    Each expert takes part in one exchange. Exchanges made together may gain less than each alone:
    if they gain nothing, only the best one is kept, if that gains.
    """
    copies, left = layer.copies, layer.left
    old, allowance = copies.copy(), left[0]
    more, less = _gains(layer, rules)
    before = _norm(layer, rules)
    first = (-1, -1, 0)
    paid = 0
    while True:
        add, drop, further = _exchange(layer, rules, more, less)
        if add < 0:
            break
        if first[0] < 0:
            first = (add, drop, further)
        paid += further
        more[add], less[add] = -np.inf, np.inf
        if drop >= 0:
            more[drop], less[drop] = -np.inf, np.inf
    if first[0] < 0:
        return False
    if _norm(layer, rules) + rules.price * paid < before - rules.least:
        return True
    add, drop, further = first
    copies[:] = old
    copies[add] += 1
    if drop >= 0:
        copies[drop] -= 1
    left[0] = allowance - further
    if _norm(layer, rules) + rules.price * further < before - rules.least:
        return True
    copies[:] = old
    left[0] = allowance
    return False


@kernel
def _gains(layer: _Layer, rules: _Rules) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (E,) by how much one copy more lowers the norm, and (E,) one less raises it."""
    total, shrink = _power_sums(layer), layer.shrink
    experts, steps = layer.powers.shape
    more, less = np.zeros(experts), np.zeros(experts)
    for t in range(steps):
        now = root(total[t], rules.doublings)
        for expert in range(experts):
            n, part = layer.copies[expert], layer.powers[expert, t]
            lower = max(total[t] - part * (shrink[n] - shrink[n + 1]), 0.0)
            raised = total[t] + part * (shrink[n - 1] - shrink[n])
            more[expert] += layer.weight[t] * (now - root(lower, rules.doublings))
            less[expert] += layer.weight[t] * (root(raised, rules.doublings) - now)
    return more, less


@kernel
def _exchange(
    layer: _Layer, rules: _Rules, more: NDArray[np.float64], less: NDArray[np.float64]
) -> tuple[int, int, int]:
    """Make the best exchange, if it gains more than `least`.

    Args:
        layer, rules: of the search.
        more: (E,) gain of one copy more, without its price.
        less: (E,) loss by one copy less.

    Returns:
        The expert with a copy more (-1: no exchange), the expert with one less (-1: a slot was
        free), and the further copies beyond `had`.
    """
    copies, had = layer.copies, layer.had
    add, drop, best, cheapest = -1, -1, -np.inf, np.inf
    for expert in range(copies.shape[0]):
        paid = copies[expert] >= had[expert]
        gain = more[expert] - rules.price * paid
        if gain > best and (layer.left[0] > 0 or not paid):
            best, add = gain, expert
        loss = less[expert] - rules.price * (copies[expert] > had[expert])
        if copies[expert] > 1 and loss < cheapest:
            cheapest, drop = loss, expert
    if copies.sum() < rules.most:
        drop, cheapest = -1, 0.0
    elif drop < 0:
        return -1, -1, 0
    if add < 0 or add == drop or best - cheapest <= rules.least:
        return -1, -1, 0
    further = int(copies[add] >= had[add])
    copies[add] += 1
    if drop >= 0:
        further -= int(copies[drop] > had[drop])
        copies[drop] -= 1
    layer.left[0] -= further
    return add, drop, further


@kernel
def _place(rows: NDArray[np.int32], copies: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the (L, S) slots with (L, E) copies that change the fewest slots of (L, S) rows."""
    out = np.full(rows.shape, np.int32(EMPTY), np.int32)
    for layer in range(rows.shape[0]):
        left = copies[layer].copy()
        for slot in range(rows.shape[1]):
            expert = rows[layer, slot]
            if expert >= 0 and left[expert] > 0:
                out[layer, slot] = expert
                left[expert] -= 1
        slot = 0
        for expert in range(left.shape[0]):
            for _ in range(left[expert]):
                while out[layer, slot] >= 0:
                    slot += 1
                out[layer, slot] = expert
    return out
