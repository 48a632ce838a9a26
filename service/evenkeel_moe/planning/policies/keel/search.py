"""All layers under search at once: one price, one move budget, shared pools."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.policies.keel.budget_trades import edges
from evenkeel_moe.planning.policies.keel.descent import descend
from evenkeel_moe.planning.policies.keel.evaluation_budget import Evaluations
from evenkeel_moe.planning.policies.keel.moves import apply_change, copies_of_change
from evenkeel_moe.planning.policies.keel.state import (
    SHARP,
    SMOOTH,
    Curves,
    Layer,
    Split,
    build_layer,
    load_ranks,
    refresh,
)
from evenkeel_moe.planning.policies.slot_budget import SlotBudget
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import DispatchModel
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, origin_shares

__all__ = ["Fleet"]

_LEAST = 1e-6
"""Smallest gain of a move, in layer times: less is not worth a place in a move limit."""
_MANY_TOKENS = 16_384
"""Tokens of a rank in one step from which its load says more than chance."""
_UNLIMITED = 1 << 40
_KEPT_FOR_CHOSEN = 0.5
"""Share of the evaluations left for the few layers that may change, once all were searched to choose them."""
_FALLING = (4.0, 2.0, 1.0)
"""Prices, over the last one, by which a search goes: the copies that save most come first."""
_TOP_PRICE = 0.05
_LEVEL_RATIO = 6.0
_LEVELS = 6
"""With a move limit the price falls through these levels, so that the copies that save most come first."""


@dataclass(slots=True)
class _Tally:
    copies: int = 0
    """Copies between ranks the layer needs."""
    filled: int = 0
    """Slots the layer fills."""


class Fleet:
    """The search state of one problem. Loads are in mean rank loads, costs in fluid layer times."""

    def __init__(
        self,
        problem: PlacementProblem,
        start: Placement,
        weights: NDArray[np.float64],
        evaluations: Evaluations,
        *,
        sharp: bool = False,
    ) -> None:
        self.problem = problem
        self.start = start
        self.evaluations = evaluations
        self._most = _UNLIMITED
        steps, num_layers, _ = problem.load.shape
        ranks = problem.shape.num_ranks
        self.unit_tokens = float(problem.load.sum()) / (steps * num_layers * ranks) or 1.0
        fluid = metrics.fluid_bound(problem.load, ranks, problem.objective.costs) / (
            steps * num_layers
        )
        self.unit_cost = fluid or 1.0
        self.curves = _scaled_curves(problem, self.unit_tokens, self.unit_cost, sharp)
        self.split = Split(
            problem.objective.dispatch is DispatchModel.NEAREST,
            np.array(problem.topology.node_of_rank, np.int64),
        )
        source = _origin_shares(problem)
        self.layers: list[Layer] = [
            build_layer(
                problem.load[:, layer].T / self.unit_tokens,
                weights,
                source[layer],
                start.phy2log[layer],
                None if problem.current is None else problem.current.phy2log[layer],
                self.split,
                problem.objective.cross_node_factor,
            )
            for layer in range(num_layers)
        ]
        self.budget = SlotBudget.of(problem)
        self._settle()
        self._copies_at_start = [tally.copies for tally in self.tallies]

    def price_of(self, cost_per_move: float) -> float:
        """A price per copy in score units, in layer times."""
        return cost_per_move / self.unit_cost

    def placement(self) -> Placement:
        """What the layers hold now."""
        rows = np.stack([layer.row for layer in self.layers])
        return Placement(rows, self.problem.shape.num_ranks, self.problem.shape.num_logical_experts)

    def search(self, price: float) -> None:
        """Improve every layer until no move gains more than its price, within limits and what may be evaluated."""
        every, most = range(len(self.layers)), self.problem.objective.limits.max_layers
        if most is None or most >= len(every):
            self._descend_levels(every, price)
            return
        with self.evaluations.keeping(_KEPT_FOR_CHOSEN):
            self._descend_levels(every, price)
        changed = [
            i for i, layer in enumerate(self.layers) if (layer.row != self.start.phy2log[i]).any()
        ]
        if len(changed) <= most:
            return
        gains = {i: self._gain(i, price) for i in changed}
        chosen = sorted(sorted(changed, key=lambda i: -gains[i])[:most])
        self._reset()
        self._descend_levels(chosen, price)

    def search_few(self, share: float, price: float, before: float) -> None:
        """After a search at the price `before`, go on at a lower one until all copies together change `share` of the slots."""
        self._most = int(share * self.problem.shape.num_slots * len(self.layers))
        if self._copies < self._most:
            for level in (level * price for level in _FALLING if level * price < before):
                self._descend_all(range(len(self.layers)), level)
        self._most = _UNLIMITED

    def undo_small(self, price: float, least: float) -> None:
        """Put back to the start every layer whose moves together gain `least` layer times or less.

        Layers that share slots or a move limit go back together, by their mean gain, or not at all.
        """
        gains = np.array([self._gain(i, price) for i in range(len(self.layers))])
        if self.budget.pool_per_rank is not None or self._allowance() < _UNLIMITED:
            gains[:] = gains.mean()
        for i in np.nonzero(gains <= least)[0]:
            self.layers[i].row[:] = self.start.phy2log[i]
            load_ranks(self.layers[i], self.split)
        self._settle()

    def _descend_levels(self, which: "range | list[int]", price: float) -> None:
        if price == 0.0 and self._allowance() >= _UNLIMITED:
            levels = [0.0]
        elif self._allowance() >= _UNLIMITED:
            levels = [level * price for level in _FALLING]
        else:
            top = max(_TOP_PRICE, price)
            levels = [max(price, top * _LEVEL_RATIO**-level) for level in range(_LEVELS)] + [price]
        for level in levels:
            if level > price and self._allowance() <= self._copies:
                continue
            self._descend_all(which, level)

    def _descend_all(self, which: "range | list[int]", price: float) -> None:
        for i in which:
            self._descend(i, price)
        if self.budget.pool_per_rank is not None:
            self._trade(which, price)

    def _descend(self, i: int, price: float) -> None:
        left = self.evaluations.left(i)
        if left <= 0 or not self.layers[i].load.any():
            return
        layer, tally = self.layers[i], self.tallies[i]
        copies, added, used = descend(
            layer,
            self.curves,
            self.split,
            self.rooms[i],
            self._spare(i),
            price,
            self._allowance() - self._copies,
            _LEAST,
            left,
        )
        tally.copies += copies
        tally.filled += added
        self._copies += copies
        self._filled += added
        self.evaluations.spend(i, used)

    def _trade(self, which: "range | list[int]", price: float) -> None:
        """Add copies where they save most, paid for by spare slots or by copies of other layers."""
        offers: dict[int, list[NDArray[Any]]] = {}

        def look(i: int) -> None:
            if self.evaluations.left(i) > 0:
                *offer, used = edges(self.layers[i], self.curves, self.split, price)
                offers[i] = offer
                self.evaluations.spend(i, used)
            else:
                offers.pop(i, None)

        for i in which:
            if self.layers[i].load.any():
                look(i)
        touched: set[int] = set()
        for _ in range(self.problem.shape.num_slots * len(self.layers)):
            best = self._best_trade(offers)
            if best is None:
                break
            giver, taker, rank = best
            add_slot, add_expert = int(offers[taker][1][rank]), int(offers[taker][2][rank])
            if giver >= 0:
                self._change(giver, int(offers[giver][4][rank]), EMPTY)
            self._change(taker, add_slot, add_expert)
            for i in {giver, taker} - {-1}:
                touched.add(i)
                look(i)
        for i in sorted(touched):
            self._descend(i, price)

    def _best_trade(self, offers: dict[int, list[NDArray[Any]]]) -> tuple[int, int, int] | None:
        """(layer that gives a copy up or -1, layer that adds one, rank) with the largest net gain."""
        if not offers:
            return None
        keys = sorted(offers)
        add = np.stack([offers[i][0] for i in keys])
        drop = np.stack([offers[i][3] for i in keys])
        allowance = self._allowance() - self._copies
        if allowance < 1:
            new = np.array(
                [[not self._had(i, offers[i][2][r], r) for r in range(add.shape[1])] for i in keys]
            )
            add = np.where(new, -np.inf, add)
        best, found = _LEAST, None
        for rank in range(add.shape[1]):
            taker = int(np.argmax(add[:, rank]))
            if self.rooms[0][rank] > 0 and self._spare(keys[taker]) > 0 and add[taker, rank] > best:
                best, found = add[taker, rank], (-1, keys[taker], rank)
            both = drop[:, rank][:, None] + add[:, rank][None, :]
            np.fill_diagonal(both, -np.inf)
            if both.size and both.max() > best:
                giver, taker = divmod(int(np.argmax(both)), both.shape[1])
                best, found = both[giver, taker], (keys[giver], keys[taker], rank)
        return found

    def _had(self, i: int, expert: float, rank: int) -> bool:
        return bool(expert >= 0 and self.layers[i].had[int(expert), rank])

    def _change(self, i: int, slot: int, expert: int) -> None:
        layer, tally = self.layers[i], self.tallies[i]
        rank = slot // self.problem.shape.slots_per_rank
        old = int(layer.row[slot])
        copies = copies_of_change(layer, rank, old, expert)[0]
        change = int(expert >= 0) - int(old >= 0)
        tally.copies += copies
        tally.filled += change
        self._copies += copies
        self._filled += change
        self.rooms[i][rank] -= change
        apply_change(layer, self.split, slot, expert)

    def _gain(self, i: int, price: float) -> float:
        """Net objective layer i has gained since the start."""
        layer = self.layers[i]
        after = refresh(layer, self.curves)
        row = layer.row.copy()
        layer.row[:] = self.start.phy2log[i]
        load_ranks(layer, self.split)
        before = refresh(layer, self.curves)
        layer.row[:] = row
        load_ranks(layer, self.split)
        return before - after - price * (self.tallies[i].copies - self._copies_at_start[i])

    def _reset(self) -> None:
        for layer, row in zip(self.layers, self.start.phy2log, strict=True):
            layer.row[:] = row
            load_ranks(layer, self.split)
        self._settle()

    def _settle(self) -> None:
        """Count copies and free places from the rows."""
        self.tallies = [
            _Tally(int(((layer.held > 0) & ~layer.had).sum()), int((layer.row >= 0).sum()))
            for layer in self.layers
        ]
        self._copies = sum(tally.copies for tally in self.tallies)
        self._filled = sum(tally.filled for tally in self.tallies)
        ranks = self.problem.shape.num_ranks
        pool = self.budget.pool_per_rank
        if pool is None:
            self.rooms = [np.full(ranks, _UNLIMITED) for _ in self.layers]
            return
        filled = np.stack(
            [(layer.row.reshape(ranks, -1) >= 0).sum(axis=1) for layer in self.layers]
        )
        shared = np.asarray(pool - filled.sum(axis=0), np.int64)
        self.rooms = [shared] * len(self.layers)

    def _spare(self, i: int) -> int:
        if self.budget.pool_per_rank is None:
            return self.budget.per_layer - self.tallies[i].filled
        return self.budget.total - self._filled

    def _allowance(self) -> int:
        limits, shape = self.problem.objective.limits, self.problem.shape
        allowed = self._most
        if self.problem.current is None:
            return allowed
        if limits.max_moves is not None:
            allowed = min(allowed, limits.max_moves)
        if limits.max_bytes is not None and shape.bytes_per_expert > 0:
            allowed = min(allowed, limits.max_bytes // shape.bytes_per_expert)
        return allowed


def _scaled_curves(
    problem: PlacementProblem, unit_tokens: float, unit_cost: float, sharp: bool
) -> Curves:
    """The problem's cost curves in search units; straight ones without stairs."""
    ranks = problem.shape.num_ranks
    costs = problem.objective.costs
    doublings = SHARP if sharp or unit_tokens >= _MANY_TOKENS else SMOOTH
    if costs is None:
        return Curves(
            np.ones(ranks) * unit_tokens / unit_cost, 0.0, np.zeros((ranks, 1)), doublings
        )
    _, stairs, slope = metrics.cost_arrays(costs, ranks)
    rates = slope * unit_tokens / unit_cost
    straight = np.arange(1, stairs.shape[1] + 1) * costs.tile_tokens * slope[:, None]
    if costs.tile_tokens == 1 and np.allclose(stairs, straight, rtol=1e-9, atol=0.0):
        return Curves(rates, 0.0, np.zeros((ranks, 1)), doublings)
    return Curves(rates, costs.tile_tokens / unit_tokens, stairs / unit_cost, doublings)


def _origin_shares(problem: PlacementProblem) -> NDArray[np.float64]:
    """(L, E, R) share of each expert's tokens that start on each rank; even where unknown."""
    shape = problem.shape
    if problem.source_load is None:
        sizes = (shape.num_layers, shape.num_logical_experts, shape.num_ranks)
        return np.full(sizes, 1.0 / shape.num_ranks)
    return np.ascontiguousarray(np.moveaxis(origin_shares(problem.source_load, shape), 0, 2))
