"""The search where every rank has one slot: only the numbers of copies of each expert count.

Under an even split all ranks with copies of an expert then have the same load, so a layer is
described by the copies of each expert, not by experts and ranks. The objective is that of
`state`: the p-norm over ranks of their load, step by step, averaged over the window. A rank's load
is x / n, for an expert with x tokens and n copies, so the power sum of a step is the sum over
experts of x ** p * n ** (1 - p).

Two stages find the counts of a layer. Both exchange a copy of one expert for a copy of another.

1. The norm is concave in the power sum, so a tangent at the present sum is never below it, and
   counts that lower the tangent lower the norm more. The tangent is a sum of one term for each
   expert, so the best exchange is found in O(E). A new tangent follows until nothing changes.
2. A tangent promises too little for a copy that changes the power sum much. So the gain of one copy
   more and of one copy less is computed exactly for every expert, and the best exchanges are made.

Units are those of `search`: loads in mean rank loads, gains and prices in layer times.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.jit import inlined, kernel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.window import SearchWindow
from evenkeel_moe.planning.policies.slot_budget import SlotBudget
from evenkeel_moe.planning.problem.layer_threads import map_layers
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

_TANGENTS = 64
"""Most tangents of a layer; most layers need a dozen."""
_EXACT_PASSES = 64
"""Most passes with exact gains. Each may make many exchanges."""
_UNLIMITED = 1 << 40


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
        nodes = np.array(self._problem.topology.node_of_rank, np.int64)
        rows = [
            _place(row.copy(), copies, nodes)
            for row, copies in zip(self._base.phy2log, self.copies, strict=True)
        ]
        return Placement(np.stack(rows), len(nodes), self._base.num_logical_experts)

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


@inlined
def _power(value: float, doublings: int) -> float:
    for _ in range(doublings):
        value *= value
    return value


@inlined
def _root(value: float, doublings: int) -> float:
    for _ in range(doublings):
        value = np.sqrt(value)
    return value


class _Rules(NamedTuple):
    """What a search of one layer must keep to."""

    most: int
    """Copies of all experts together."""
    price: float
    """Of a copy beyond those of the current placement, as `least` in layer times."""
    least: float
    """Smallest gain of an exchange."""
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
    power: NDArray[np.float64]
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
    power = np.empty(load.shape)
    for expert in range(load.shape[0]):
        for t in range(load.shape[1]):
            power[expert, t] = _power(load[expert, t], rules.doublings)
    shrink = np.ones(rules.most + 2)
    for n in range(1, rules.most + 2):
        shrink[n] = n / _power(float(n), rules.doublings)
    layer = _Layer(copies, had, np.full(1, allowance), power, weight, shrink)
    for _ in range(_TANGENTS):
        if not _follow_tangent(layer, rules):
            break
    for _ in range(_EXACT_PASSES):
        if not _exchange_exactly(layer, rules):
            break
    return int(layer.left[0])


@kernel
def _power_sums(layer: _Layer) -> NDArray[np.float64]:
    """Return the (T,) power sums of the rank loads."""
    total = np.zeros(layer.power.shape[1])
    for expert in range(layer.power.shape[0]):
        factor = layer.shrink[layer.copies[expert]]
        for t in range(layer.power.shape[1]):
            total[t] += factor * layer.power[expert, t]
    return total


@kernel
def _norm(layer: _Layer, rules: _Rules) -> float:
    """Return the objective of a layer."""
    out, total = 0.0, _power_sums(layer)
    for t in range(total.shape[0]):
        out += layer.weight[t] * _root(total[t], rules.doublings)
    return out


@kernel
def _tangent_gains(layer: _Layer, expert: int, factor: NDArray[np.float64]) -> tuple[float, float]:
    """Return by how much one copy more lowers, and one less raises, the tangent of the norm."""
    n, shrink = layer.copies[expert], layer.shrink
    lower, raised = shrink[n] - shrink[n + 1], shrink[n - 1] - shrink[n]
    return factor[expert] * lower, factor[expert] * raised


@kernel
def _follow_tangent(layer: _Layer, rules: _Rules) -> bool:
    """Make all exchanges that lower the tangent of the norm; return True if there were any."""
    slope = _power_sums(layer)
    for t in range(slope.shape[0]):
        if slope[t] > 0.0:
            norm = _root(slope[t], rules.doublings)
            slope[t] = layer.weight[t] * norm / (slope[t] * 2.0**rules.doublings)
    # Written out: a library's product adds in another order on another machine.
    factor = np.zeros(layer.power.shape[0])
    for expert in range(factor.shape[0]):
        for t in range(slope.shape[0]):
            factor[expert] += layer.power[expert, t] * slope[t]
    more, less = np.empty(factor.shape[0]), np.empty(factor.shape[0])
    for expert in range(factor.shape[0]):
        more[expert], less[expert] = _tangent_gains(layer, expert, factor)
    made = False
    while True:
        add, drop, _ = _exchange(layer, rules, more, less)
        if add < 0:
            return made
        made = True
        more[add], less[add] = _tangent_gains(layer, add, factor)
        if drop >= 0:
            more[drop], less[drop] = _tangent_gains(layer, drop, factor)


@kernel
def _exchange_exactly(layer: _Layer, rules: _Rules) -> bool:
    """Make exchanges by their exact gains; return True if the norm fell, with copies paid.

    Each expert takes part in one exchange. Exchanges made together may gain less than each alone:
    if they gain nothing, only the best one is kept, if that gains.
    """
    copies, left = layer.copies, layer.left
    old, allowance = copies.copy(), left[0]
    more, less = _exact_gains(layer, rules)
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
def _exact_gains(layer: _Layer, rules: _Rules) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (E,) by how much one copy more lowers the norm, and (E,) one less raises it."""
    total, shrink = _power_sums(layer), layer.shrink
    experts, steps = layer.power.shape
    more, less = np.zeros(experts), np.zeros(experts)
    for t in range(steps):
        now = _root(total[t], rules.doublings)
        for expert in range(experts):
            n, part = layer.copies[expert], layer.power[expert, t]
            lower = max(total[t] - part * (shrink[n] - shrink[n + 1]), 0.0)
            raised = total[t] + part * (shrink[n - 1] - shrink[n])
            more[expert] += layer.weight[t] * (now - _root(lower, rules.doublings))
            less[expert] += layer.weight[t] * (_root(raised, rules.doublings) - now)
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
def _place(
    row: NDArray[np.int32], copies: NDArray[np.int64], nodes: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the (R,) slots with these copies that keep most of a row.

    A new copy goes to a node that has the expert, if a rank there is free: it is cheaper to send.
    """
    ranks, experts = row.shape[0], copies.shape[0]
    out = np.full(ranks, np.int32(EMPTY), np.int32)
    left = copies.copy()
    on_node = np.zeros((nodes.max() + 1, experts), np.bool_)
    for rank in range(ranks):
        expert = row[rank]
        if expert >= 0:
            on_node[nodes[rank], expert] = True
            if left[expert] > 0:
                out[rank] = expert
                left[expert] -= 1
    free = np.nonzero(out < 0)[0]
    for near in (True, False):
        for expert in range(experts):
            if left[expert] == 0:
                continue
            for slot in free:
                if (
                    left[expert] > 0
                    and out[slot] < 0
                    and (on_node[nodes[slot], expert] or not near)
                ):
                    out[slot] = expert
                    left[expert] -= 1
    return out
