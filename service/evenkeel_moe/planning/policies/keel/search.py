"""The search over all layers of a problem, which share a price, a move limit and pooled slots.

Units: loads are in mean rank loads, costs in layer times. A layer time is the time of one layer if
load were spread perfectly over the ranks, so prices and gains mean the same for every model and
fleet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.planning.policies.keel.budget_trades import CopyOffers, best_copies
from evenkeel_moe.planning.policies.keel.build_layer import build_layer, working_memory
from evenkeel_moe.planning.policies.keel.descent import descend
from evenkeel_moe.planning.policies.keel.evaluation_budget import EvaluationBudget
from evenkeel_moe.planning.policies.keel.moves import apply_replacement, copies_of_replacement
from evenkeel_moe.planning.policies.keel.options import DEFAULT_OPTIONS, KeelOptions
from evenkeel_moe.planning.policies.keel.outlook import reading_dominates
from evenkeel_moe.planning.policies.keel.search_inputs import (
    scaled_objective,
    source_shares,
    unplanned,
)
from evenkeel_moe.planning.policies.keel.state import (
    LayerState,
    load_ranks,
    refresh,
)
from evenkeel_moe.planning.policies.keel.window import SearchWindow
from evenkeel_moe.planning.policies.slot_budget import SlotBudget
from evenkeel_moe.planning.problem.layer_threads import map_layers
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.schedule import relabel

_UNLIMITED = 1 << 40
"""Stands for no limit on copies or slots."""


@dataclass(slots=True)
class _Count:
    """The copies of one layer, or of all layers."""

    copies: int = 0
    """Copies between ranks that are needed to get there from the current placement."""
    filled: int = 0
    """Slots that are filled."""


class Search:
    """The search of one problem from one start.

    Attributes:
        problem: names the objective, the budget and the current placement.
        objective: what the search minimises.
        layers: the state of each layer.
        rooms: (R,) further slots that each rank may fill, by layer; with pooled slots all layers
            share one array.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        start: Placement,
        window: SearchWindow,
        evaluations: EvaluationBudget,
        options: KeelOptions = DEFAULT_OPTIONS,
        *,
        sharp: bool = False,
    ) -> None:
        self.problem = problem
        self._window = window
        self._start = start
        self._evaluations = evaluations
        self._options = options
        sharp = sharp or window.unit_tokens >= options.sharp_tokens or reading_dominates(problem)
        self.objective = scaled_objective(problem, window, options, sharp)
        origin = source_shares(problem)
        base, floor = unplanned(problem, window.load)
        experts, ranks = problem.shape.num_logical_experts, problem.shape.num_ranks
        self._threads = 1 if evaluations.is_pooled else problem.threads
        memory = [working_memory(experts, ranks, len(window.weights)) for _ in range(self._threads)]

        def build(layer: int) -> LayerState:
            return build_layer(
                window.tokens[layer],
                window.weights,
                origin[layer % len(origin)],
                start.phy2log[layer],
                None if problem.current is None else problem.current.phy2log[layer],
                self.objective,
                problem.objective.cross_node_factor,
                base[layer % len(base)] / window.unit_tokens,
                floor[:, layer] / window.unit_cost,
                memory[layer % self._threads],
            )

        self.layers = map_layers(build, range(problem.shape.num_layers), self._threads)
        self._budget = SlotBudget.of(problem)
        self._copy_limit = _copy_limit(problem)
        self._few_limit = _UNLIMITED
        self._recount()

    def placement(self) -> Placement:
        """Return the placement that the layers hold now."""
        rows = np.stack([layer.row for layer in self.layers])
        return Placement(rows, self.problem.shape.num_ranks, self.problem.shape.num_logical_experts)

    def search(self, price: float) -> None:
        """Improve every layer until no move gains more than the price of its copies.

        With a limit on layers, all layers are searched, those that gain most are chosen, and only
        these are searched again from the start.
        """
        every, most = range(len(self.layers)), self.problem.objective.limits.max_layers
        if most is None or most >= len(every):
            self._run_passes(every, price)
            return
        with self._evaluations.keeping(self._options.layer_choice_reserve):
            self._run_passes(every, price)
        changed = [i for i in every if (self.layers[i].row != self._start.phy2log[i]).any()]
        if len(changed) <= most:
            return
        gains = {i: self._gain(i, price) for i in changed}
        chosen = sorted(sorted(changed, key=lambda i: -gains[i])[:most])
        self._return_to_start(every)
        self._run_passes(chosen, price)

    def search_few(self, share: float, price: float, before: float) -> None:
        """Go on at a lower price until all copies together change `share` of the slots.

        `before` is the price of the search that came before.
        """
        shape = self.problem.shape
        slots = shape.mean_slots_per_rank * shape.num_ranks
        self._few_limit = int(share * slots * shape.num_layers)
        if self._total.copies < self._few_limit:
            for level in self._options.price_levels:
                if level * price < before:
                    self._run_pass(range(len(self.layers)), level * price)
        self._few_limit = _UNLIMITED

    def undo_small(self, price: float, least: float) -> None:
        """Return every layer to the start whose moves together gain `least` layer times or less.

        Layers that share slots or a move limit return together, by their mean gain, or not at all.
        """
        gains = np.array([self._gain(i, price) for i in range(len(self.layers))])
        if self._budget.pool_per_rank is not None or self._copy_limit < _UNLIMITED:
            gains[:] = gains.mean()
        self._return_to_start(np.nonzero(gains <= least)[0].tolist())

    def _run_passes(self, which: Sequence[int], price: float) -> None:
        """Search some layers at falling prices, so that the copies that save most come first."""
        options, limited = self._options, self._allowed_copies() < _UNLIMITED
        if limited:
            top, ratio = max(options.limited_top_price, price), options.limited_price_ratio
            levels = [max(price, top * ratio**-i) for i in range(options.limited_passes)] + [price]
        elif price == 0.0:
            levels = [0.0]
        else:
            levels = [level * price for level in options.price_levels]
        for level in levels:
            if level <= price or self._total.copies < self._allowed_copies():
                self._run_pass(which, level)

    def _run_pass(self, which: Sequence[int], price: float) -> None:
        if self._share_nothing(which):
            found = map_layers(lambda i: self._descended(i, price), which, self._threads)
            for i, result in zip(which, found, strict=True):
                self._book_descent(i, *result)
        else:
            for i in which:
                self._descend(i, price)
        if self._budget.pool_per_rank is not None:
            self._trade(which, price)

    def _share_nothing(self, which: Sequence[int]) -> bool:
        """Return True if no layer's search takes from what another one may use."""
        return (
            self._budget.pool_per_rank is None
            and self._allowed_copies() == _UNLIMITED
            and self._evaluations.suffice_for(which)
        )

    def _descend(self, i: int, price: float) -> None:
        """Search layer i by itself."""
        self._book_descent(i, *self._descended(i, price))

    def _descended(self, i: int, price: float) -> tuple[int, int, int]:
        """Search layer i; return copies, filled slots and evaluations, which are not booked yet."""
        left = self._evaluations.left(i)
        if left <= 0 or not self._window.loaded[i]:
            return 0, 0, 0
        return descend(
            self.layers[i],
            self.objective,
            self.rooms[i],
            self.spare(i),
            price,
            self._allowed_copies() - self._total.copies,
            self._options.least_gain,
            left,
        )

    def _book_descent(self, i: int, copies: int, filled: int, evaluations: int) -> None:
        self._book(i, copies, filled)
        self._evaluations.spend(i, evaluations)

    def _trade(self, which: Sequence[int], price: float) -> None:
        """Add copies where they save most, in spare slots or in those of other layers' copies."""
        offers: dict[int, CopyOffers] = {}

        def update(i: int) -> None:
            if self._evaluations.left(i) > 0:
                offers[i], used = best_copies(self.layers[i], self.objective, price)
                self._evaluations.spend(i, used)
            else:
                offers.pop(i, None)

        for i in which:
            if self._window.loaded[i]:
                update(i)
        touched: set[int] = set()
        for _ in range(self.problem.shape.num_slots * len(self.layers)):
            best = self._best_trade(offers)
            if best is None:
                break
            giver, taker, rank = best
            slot, expert = offers[taker].add_slot[rank], offers[taker].add_expert[rank]
            if giver >= 0:
                self._replace(giver, int(offers[giver].drop_slot[rank]), EMPTY)
            self._replace(taker, int(slot), int(expert))
            for i in {giver, taker} - {-1}:
                touched.add(i)
                update(i)
        for i in sorted(touched):
            self._descend(i, price)

    def _best_trade(self, offers: dict[int, CopyOffers]) -> tuple[int, int, int] | None:
        """Return the trade with the largest net gain, None if none gains `least_gain`.

        A trade is (layer that gives up a copy or -1, layer that adds one, rank).
        """
        if not offers:
            return None
        keys = sorted(offers)
        add = np.stack([offers[i].add for i in keys])
        drop = np.stack([offers[i].drop for i in keys])
        if self._total.copies >= self._allowed_copies():
            # Only copies that the rank has in the current placement are free.
            ranks = range(add.shape[1])
            free = [[self._had(i, offers[i].add_expert[r], r) for r in ranks] for i in keys]
            add = np.where(free, add, -np.inf)
        best, found = self._options.least_gain, None
        for rank in range(add.shape[1]):
            taker = int(np.argmax(add[:, rank]))
            if self.rooms[0][rank] > 0 and self.spare(keys[taker]) > 0 and add[taker, rank] > best:
                best, found = add[taker, rank], (-1, keys[taker], rank)
            both = drop[:, rank][:, None] + add[:, rank][None, :]
            np.fill_diagonal(both, -np.inf)
            if both.size and both.max() > best:
                giver, taker = divmod(int(np.argmax(both)), both.shape[1])
                best, found = both[giver, taker], (keys[giver], keys[taker], rank)
        return found

    def _had(self, i: int, expert: int, rank: int) -> bool:
        return bool(expert >= 0 and self.layers[i].had[expert, rank])

    def _replace(self, i: int, slot: int, expert: int) -> None:
        """Put an expert (EMPTY: none) into a slot of layer i."""
        layer, rank = self.layers[i], slot // self.problem.shape.slots_per_rank
        old = int(layer.row[slot])
        added = int(expert >= 0) - int(old >= 0)
        self._book(i, copies_of_replacement(layer, rank, old, expert)[0], added)
        self.rooms[i][rank] -= added
        apply_replacement(layer, self.objective, slot, expert)

    def _book(self, i: int, copies: int, filled: int) -> None:
        for count in (self._counts[i], self._total):
            count.copies += copies
            count.filled += filled

    def _gain(self, i: int, price: float) -> float:
        """Return the net gain of layer i since the start, in layer times."""
        layer = self.layers[i]
        after = refresh(layer, self.objective) + price * _copies_paid(layer)
        row = layer.row.copy()
        layer.row[:] = self._start.phy2log[i]
        load_ranks(layer, self.objective)
        before = refresh(layer, self.objective) + price * _copies_paid(layer)
        layer.row[:] = row
        load_ranks(layer, self.objective)
        return before - after

    def _return_to_start(self, which: Sequence[int]) -> None:
        for i in which:
            self.layers[i].row[:] = self._start.phy2log[i]
            load_ranks(self.layers[i], self.objective)
        self._recount()

    def _recount(self) -> None:
        """Count the copies, the filled slots and the room of ranks from the slots."""
        now, current = self.placement(), self.problem.current
        copies = np.zeros(now.num_layers, np.int64)
        if current is not None:
            copies = relabel.moves_by_layer(current, now)
        filled = (now.phy2log >= 0).sum(axis=1)
        self._counts = list(map(_Count, copies.tolist(), filled.tolist()))
        self._total = _Count(
            sum(count.copies for count in self._counts), sum(count.filled for count in self._counts)
        )
        ranks, pool = self.problem.shape.num_ranks, self._budget.pool_per_rank
        if pool is None:
            self.rooms = [np.full(ranks, _UNLIMITED) for _ in self.layers]
            return
        rows = np.stack([layer.row.reshape(ranks, -1) for layer in self.layers])
        shared = np.asarray(pool - (rows >= 0).sum(axis=(0, 2)), np.int64)
        self.rooms = [shared] * len(self.layers)

    def spare(self, i: int) -> int:
        """Return the number of further copies that layer i may hold."""
        if self._budget.pool_per_rank is None:
            return self._budget.per_layer - self._counts[i].filled
        return self._budget.total - self._total.filled

    def _allowed_copies(self) -> int:
        """Return the copies between ranks that the whole plan may need."""
        return min(self._copy_limit, self._few_limit)


def _copies_paid(layer: LayerState) -> float:
    """Return the price of the copies that a layer needs, in copies inside a node."""
    return float(layer.copy_price[layer.held > 0].sum(dtype=np.float64))


def _copy_limit(problem: PlacementProblem) -> int:
    """Return the copies between ranks that the limits of a problem allow."""
    limits, shape = problem.objective.limits, problem.shape
    allowed = _UNLIMITED
    if problem.current is None:
        return allowed
    if limits.max_moves is not None:
        allowed = min(allowed, limits.max_moves)
    if limits.max_bytes is not None and shape.bytes_per_expert > 0:
        allowed = min(allowed, limits.max_bytes // shape.bytes_per_expert)
    return allowed
