"""The search over all layers of a problem, which may share slots or a limit on copies."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.cost import ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.planning.policies.keel.layer import CopyWork, Inputs, Terms, build_layer
from evenkeel_moe.planning.policies.keel.moves import Rules, SearchRoom, descend
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.single_slots import exchange_copies
from evenkeel_moe.planning.policies.keel.survival import least_copies
from evenkeel_moe.planning.policies.keel.window import Window, reading_dominates
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.kernels import map_layers
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    SlotBudget,
    origin_shares,
)
from evenkeel_moe.planning.problem.survival import Survive, domain_of_rank
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import copy_prices, count_moves

_UNLIMITED = 1 << 40
"""Stands for no limit on copies or slots."""


class Search:
    """Improves placements of one problem, layer by layer.

    Attributes:
        terms: the objective.
        evaluations: exact gains that the costliest search of a layer computed so far, times the
            layers; with this as `max_evaluations` every search does the same.
    """

    def __init__(
        self, problem: PlacementProblem, window: Window, options: KeelOptions, price: float
    ) -> None:
        """Prepare for the loads of a problem.

        Args:
            problem: the loads to plan for.
            window: of these loads.
            options: the constants.
            price: of a copy inside a node, in layer times.
        """
        self._problem, self._window, self._options, self._price = problem, window, options, price
        cost, dispatch = problem.objective.cost, problem.objective.dispatch
        ranks = problem.shape.num_ranks
        nearest = dispatch is DispatchModel.NEAREST
        rates, fixed = _rates(problem, window)
        sharp = reading_dominates(problem) or window.unit_tokens >= options.sharp_tokens
        self.terms = Terms(
            rates,
            options.sharp_doublings if sharp else options.doublings,
            _work(cost.replica, window.unit_tokens, single=dispatch is DispatchModel.FEWEST),
            nearest,
            np.array(problem.topology.node_of_rank, np.int64),
        )
        self._base = np.zeros((len(window.blocks), problem.shape.num_layers, ranks)) + fixed
        self._floor = np.zeros(self._base.shape[:2])
        if dispatch is DispatchModel.WATERFILL and cost.shared_tokens > 0.0:
            # Shared experts run where there is room: only the level that they reach counts.
            level = moe_time.waterline_times(window.blocks, ranks, cost) - cost.fixed
            scaled = np.maximum(level, 0.0) / window.unit_cost
            self._floor = scaled ** (2.0**self.terms.doublings)
        elif cost.shared_tokens > 0.0:
            shared = moe_time.shared_work(window.blocks, ranks, cost, SplitModel.of(problem))
            self._base += shared / window.unit_tokens
        self._budget = SlotBudget.of(problem)
        self._counts_suffice = _counts_suffice(problem, options)
        self._domains = domain_of_rank(options.survive, problem.topology)
        self._origin = np.zeros((1, problem.shape.num_logical_experts, ranks))
        if nearest:
            self._origin += 1.0 / ranks
            if problem.source_load is not None:
                shares = origin_shares(problem.source_load, problem.shape)
                self._origin = np.ascontiguousarray(np.moveaxis(shares, 0, 2))
        layers = problem.shape.num_layers
        most = problem.max_evaluations
        self._most = max(1, options.layer_effort // problem.shape.num_slots**3)
        if most is not None:
            self._most = min(self._most, max(1, most // layers))
        self.evaluations = 0

    def improve(
        self,
        start: Placement,
        which: Sequence[int] | None = None,
        per_layer: int | None = None,
        slot_price: float = 0.0,
    ) -> Placement:
        """Return the placement that single moves make of a start.

        Args:
            start: a placement within the budget.
            which: the layers that may change; None for all.
            per_layer: copies that a layer may hold, in a pool on average; None for the budget.
            slot_price: of a filled slot in layer times, in all descents but the last.
        """
        problem, window, budget = self._problem, self._window, self._budget
        _, _, ranks, experts = start.sizes
        rows, pool = start.phy2log.copy(), budget.pool_per_rank
        least = least_copies(start, problem, self._options.survive)
        filled = (rows.reshape(len(rows), ranks, -1) >= 0).sum(axis=2)
        most = budget.per_layer if per_layer is None else per_layer
        total = budget.total if per_layer is None else per_layer * len(rows)
        limit = copy_limit(problem)
        made = 0 if problem.current is None else count_moves(problem.current, start)
        copies = np.array([limit - made])
        pooled = SearchRoom(
            np.full(ranks, _UNLIMITED) if pool is None else pool - filled.sum(axis=0),
            np.array([total - filled.sum()]),
            copies,
        )
        spent = np.zeros(len(rows), np.int64)

        def improve_layer(layer: int, descents: Sequence[Rules]) -> None:
            room = pooled
            if pool is None:
                own = np.array([most - (rows[layer] >= 0).sum()])
                room = SearchRoom(pooled.slots.copy(), own, copies if limited else copies.copy())
            for rules in descents:
                rows[layer], used = self._descend(
                    layer, rows[layer], rules, room, spent[layer], least[layer]
                )
                spent[layer] += used

        chosen = range(len(rows)) if which is None else which
        layers = [n for n in chosen if window.blocks[:, n].any()]
        limited = limit < _UNLIMITED
        descents = self._descents(slot_price, limited=limited)
        if pool is None and not limited:
            map_layers(lambda layer: improve_layer(layer, descents), layers, problem.threads)
        else:
            for rules in descents:
                for layer in layers:
                    improve_layer(layer, [rules])
        self.evaluations = max(self.evaluations, int(spent.max()) * len(rows))
        return Placement(rows, ranks, experts)

    def _descend(
        self,
        layer: int,
        row: NDArray[np.int32],
        rules: Rules,
        room: SearchRoom,
        spent: int,
        least: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], int]:
        """Return the slots of a layer after a descent, and the exact gains that it computed."""
        current, terms = self._problem.current, self.terms
        inputs = self.inputs_of(layer)._replace(least=least)
        if self._counts_suffice:
            present = np.full_like(row, EMPTY) if current is None else current.phy2log[layer]
            # Of many nodes hardly any has the expert already.
            far = self._problem.topology.num_nodes > 1
            price = rules.price * (self._problem.objective.cross_node_factor if far else 1.0)
            row = exchange_copies(
                inputs.tokens * terms.rates[0],
                inputs.weight,
                row,
                present,
                rules._replace(price=price),
                terms.doublings,
                self._budget.per_layer,
            )
            return row, 0
        state = build_layer(inputs, row, terms)
        used = descend(state, terms, rules, room, self._most - spent)
        return state.row, used

    def _descents(self, slot_price: float, *, limited: bool) -> list[Rules]:
        """Return the rules of the descents, from high prices to low: what saves most comes first.

        The last one, at the final price, takes no account of `slot_price`.
        """
        price, options = self._price, self._options
        if limited:
            before = [max(level, price) for level in options.shared_levels]
        else:
            before = [level * price for level in options.price_levels]
        prices = [*((level, slot_price) for level in before), (price, 0.0)]
        return [
            Rules(
                copy,
                slot,
                not self.terms.work.proportional or slot > 0.0,
                options.listed,
                options.trials,
                options.move_share,
                options.least_gain,
            )
            for copy, slot in dict.fromkeys(prices)
        ]

    def inputs_of(self, layer: int) -> Inputs:
        """Return what no move changes of a layer."""
        problem, window = self._problem, self._window
        prices = copy_prices(problem, layer)
        if problem.current is None:  # Nothing is there to copy: a first plan has no copies.
            prices[:] = 0.0
        return Inputs(
            np.ascontiguousarray(window.blocks[:, layer].T) / window.unit_tokens,
            window.block_weights,
            np.ascontiguousarray(self._base[:, layer].T),
            np.ascontiguousarray(self._floor[:, layer]),
            prices,
            self._origin[layer % len(self._origin)],
            np.ones(problem.shape.num_logical_experts, np.int64),
            self._domains,
        )


def _counts_suffice(problem: PlacementProblem, options: KeelOptions) -> bool:
    """Return True if a placement is described by the number of copies of each expert.

    Every rank has one slot and the same speed, all copies of an expert have the same load, and no
    limit counts single moves. Where copies between nodes cost more, their ranks matter too, but in
    the largest layers a search over experts and ranks would take minutes.
    """
    shape, objective = problem.shape, problem.objective
    one_price = problem.topology.num_nodes == 1 or objective.cross_node_factor == 1.0
    large = shape.num_logical_experts * shape.num_ranks > options.counted_size
    return (
        (one_price or large)
        and shape.slots_per_rank == 1
        and options.survive is Survive.NONE
        and not shape.pooled
        and objective.cost.by_tokens
        and objective.dispatch is DispatchModel.EVEN
        and objective.limits == PlanLimits()
    )


def _work(replica: ReplicaWork, unit_tokens: float, *, single: bool) -> CopyWork:
    """Convert the work of a replica to search units."""
    return CopyWork(
        replica.proportional,
        max(replica.read_tokens, replica.tile_tokens) / unit_tokens,
        replica.start_tokens / unit_tokens,
        0.5 * replica.tile_tokens / unit_tokens,
        1.0 / unit_tokens,
        single,
    )


def _rates(
    problem: PlacementProblem, window: Window
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a straight line for each rank's cost curve, from half to twice a mean rank load.

    Returns:
        (R,) time per load, and (R,) the load that takes as long as the line's time without load.
    """
    ranks, curves = problem.shape.num_ranks, problem.objective.cost.curves
    unit = window.unit_tokens / window.unit_cost
    if curves is None:
        return np.full(ranks, unit), np.zeros(ranks)
    tile = curves.tile_tokens
    low = np.ceil(0.5 * window.unit_tokens / tile) * tile
    high = max(np.ceil(2.0 * window.unit_tokens / tile) * tile, low + tile)
    costs = replace(problem.objective.cost, fixed=0.0)
    at_low, at_high = (moe_time.rank_times(np.full(ranks, work), costs) for work in (low, high))
    slopes = (at_high - at_low) / (high - low)
    slopes = np.where(slopes > 0.0, slopes, at_high / high)
    fixed = np.maximum(at_low - slopes * low, 0.0) / slopes
    return slopes * unit, fixed / window.unit_tokens


def copy_limit(problem: PlacementProblem) -> int:
    """Return the copies between ranks that the limits of a problem allow."""
    limits, shape = problem.objective.limits, problem.shape
    allowed = _UNLIMITED
    if problem.current is None:
        return allowed
    if limits.max_moves is not None:
        allowed = min(allowed, limits.max_moves)
    if limits.max_bytes is not None and shape.bytes_per_expert > 0:
        allowed = min(allowed, limits.max_bytes // shape.bytes_per_expert)
    if allowed < _UNLIMITED and problem.objective.fill_slots and not shape.pooled:
        # Empty slots that have to be filled take a copy each.
        allowed = max(0, allowed - int((problem.current.phy2log == EMPTY).sum()))
    return allowed
