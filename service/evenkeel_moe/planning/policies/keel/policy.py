"""The keel policy: the least predicted MoE time, with the price of copies, by local search.

Minimised is the sum over steps and layers of the time of the slowest rank, plus a price for every
copy. Replicas, rank speeds and copies are weighed together:

1. `window`: weigh the window's steps by how much they say about the coming ones, and move the
   loads of experts to where a forecast expects them.
2. Here: start from the present placement, EPLB's, one from nothing and one without replicas.
   All are scored.
3. `search`: improve the best of them layer by layer with single moves (`moves`), on a smooth form
   of the objective (`layer`).
4. Here: choose for each layer among what was found, by the dispatcher's own time.

Where experts must survive a failure, all starts are repaired first (`survival`), and no move undoes
it.

All constants are in `options`.
"""

import heapq
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.model.cost import CostCurves
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.copies import (
    interleaved_capacity,
    pack_copies,
    replicate_experts,
)
from evenkeel_moe.planning.policies.eplb import Variant, choose_form
from evenkeel_moe.planning.policies.keel.fewest_slots import fill_for_fewest
from evenkeel_moe.planning.policies.keel.options import DEFAULT_OPTIONS, KeelOptions
from evenkeel_moe.planning.policies.keel.search import Search, copy_limit
from evenkeel_moe.planning.policies.keel.survival import spread_experts
from evenkeel_moe.planning.policies.keel.window import Window, look_ahead, reading_dominates
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry, PolicyInputs
from evenkeel_moe.planning.policies.proposal import build_proposal
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    Proposal,
    SlotBudget,
)
from evenkeel_moe.planning.problem.survival import Survive, coverage
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule.relabel import count_moves, price_of_moves, relabel


def plan_keel(problem: PlacementProblem, options: KeelOptions = DEFAULT_OPTIONS) -> Proposal:
    """Plan by keel.

    Args:
        problem: without `current` copies have no price and every slot in the budget is filled; with
            it, copies are made only where they pay, and limits hold.
        options: the constants.

    Returns:
        numbers: `change_at` (first step after the newest change), `change_strength`,
            `forecast_error` (as `Forecast.error`; NaN where the window is too short for a
            forecast), `copies`, `price` (of a copy, in layer times). With the option `survive` also
            `survive_lost` and `survive_experts`, of `Coverage`, and `survive_price`, the share of
            MoE time, copies included, that a second plan saves to which nothing has to survive.

    Raises:
        InfeasiblePlan: the slots cannot hold one copy of every expert.
        ShapeMismatch: the current placement or the curves are of another deployment.
    """
    expected, window = look_ahead(problem, options)
    price = _price(expected, window, options)
    costs = _Costs(expected, window, price)
    search = Search(expected, window, options, price)
    best = _best(expected, search, costs, options)
    numbers = {
        "change_at": float(window.change.first_step),
        "change_strength": window.change.strength,
        "forecast_error": window.forecast_error,
        "price": price,
    }
    if options.survive is not Survive.NONE:
        anyhow = replace(options, survive=Survive.NONE)
        free = _best(expected, Search(expected, window, anyhow, price), costs, anyhow)
        cost = costs.total(best)
        numbers["survive_price"] = max(0.0, 1.0 - costs.total(free) / cost) if cost > 0 else 0.0
        # Ranks must not change their node when they are renamed.
        numbers["keep_nodes"] = float(options.survive is Survive.NODE)
    proposal = build_proposal(problem, best, search.evaluations, numbers)
    copies = 0
    if problem.current is not None:
        copies = count_moves(problem.current, proposal.placement)
    proposal.numbers["copies"] = float(copies)
    if options.survive is not Survive.NONE:
        found = coverage(proposal.placement, problem.topology, options.survive)
        proposal.numbers["survive_lost"] = float(found.most_lost)
        proposal.numbers["survive_experts"] = float(found.experts)
    return proposal


def _best(
    problem: PlacementProblem, search: Search, costs: "_Costs", options: KeelOptions
) -> Placement:
    """Return the best placement that is found with these options."""
    if problem.objective.limits.max_layers is not None:
        return _plan_few_layers(problem, search, costs, options.survive)
    return costs.best_by_layer(_candidates(problem, search, costs, options))


class _Costs:
    """The cost of placements: their time under the dispatcher, and the price of their copies."""

    def __init__(self, problem: PlacementProblem, window: Window, price: float) -> None:
        self._problem, self._weights = problem, window.weights
        self.per_copy = price * window.unit_cost
        """Price of a copy inside a node per step, in the unit of the score."""
        self.by_layer = cache(self._by_layer)
        """Returns the (L,) costs of a placement over the window, in the unit of the score."""

    def _by_layer(self, placement: Placement) -> NDArray[np.float64]:
        problem, steps = self._problem, len(self._weights)
        objective = problem.objective
        times = moe_time.step_times(problem.load, placement, objective.cost, SplitModel.of(problem))
        costs = self._weights @ times * steps
        if problem.current is not None and self.per_copy > 0.0:
            copies = price_of_moves(
                problem.current, placement, problem.topology, objective.cross_node_factor
            )
            costs += self.per_copy * steps * copies
        return np.asarray(costs, np.float64)

    def total(self, placement: Placement) -> float:
        """Return the cost of a placement over the window, in the unit of the score."""
        return float(self.by_layer(placement).sum())

    def best_by_layer(self, found: list[Placement]) -> Placement:
        """Return each layer from the placement where it costs least, the first on a tie.

        Layers that share slots or a limit all come from the same placement.
        """
        costs = np.stack([self.by_layer(placement) for placement in found])
        if self._problem.shape.pooled or self._problem.objective.limits != PlanLimits():
            costs[:] = costs.sum(axis=1, keepdims=True)
        chosen = costs.argmin(axis=0)
        rows = np.stack([placement.phy2log for placement in found])
        _, _, ranks, experts = found[0].sizes
        return Placement(rows[chosen, np.arange(len(chosen))], ranks, experts)


def _candidates(
    problem: PlacementProblem, search: Search, costs: _Costs, options: KeelOptions
) -> list[Placement]:
    """Return the placements to choose from: the starts, and what the search makes of the best.

    Under fewest dispatch all tokens of an expert are on one of its replicas, chosen for the batch,
    so replicas help more or less than the search sees. A plan without any competes there, and in a
    first plan METRO's, which is made for this dispatch; and empty slots are filled by its own rule.
    """
    starts = {
        name: _spread(problem, start, options.survive)
        for name, start in _starts(problem, options).items()
    }
    present = starts.get("present")
    total = {name: costs.total(start) for name, start in starts.items()}
    if costs.per_copy > 0.0 and present is not None:
        # Copies cost, so what is there comes first, and what is better with its copies paid.
        chosen = [name for name in total if total[name] <= total["present"]]
    else:
        chosen = [name for name in total if total[name] <= options.near_start * min(total.values())]
    if "no replicas" in starts and "no replicas" not in chosen:
        chosen.append("no replicas")
    slot_prices = (0.0, options.slot_price) if problem.shape.pooled else (0.0,)
    found = [
        search.improve(starts[name], slot_price=price) for name in chosen for price in slot_prices
    ]
    if problem.objective.dispatch is DispatchModel.FEWEST:
        experts = problem.shape.num_logical_experts
        found.append(search.improve(starts["no replicas"], per_layer=experts))
        if problem.objective.limits == PlanLimits():
            found += [
                fill_for_fewest(problem, plan, options.fill_price * costs.per_copy)
                for plan in list(found)
            ]
        metro = _metro_start(problem) if _is_first(problem) else None
        if metro is not None:
            found.append(_spread(problem, metro, options.survive))
    return [*starts.values(), *found]


def _spread(problem: PlacementProblem, placement: Placement, survive: Survive) -> Placement:
    """Return the placement with as many experts in two fault domains as slots and limits allow."""
    left = copy_limit(problem)
    if problem.current is not None:
        left -= count_moves(problem.current, placement)
    return spread_experts(problem, placement, survive, left)


def _starts(problem: PlacementProblem, options: KeelOptions) -> dict[str, Placement]:
    """Return the placements from which a search may start."""
    first, found = _is_first(problem), {}
    present = _present(problem)
    if present is not None:
        found["present"] = present
    eplb = _eplb_start(problem)
    if eplb is not None:
        found["eplb"] = eplb
    if first or present is None:
        found["nothing"] = relabel(problem, _cold_start(problem))
    fewest = problem.objective.dispatch is DispatchModel.FEWEST
    if fewest or reading_dominates(problem, options.single_reading):
        single = replace(problem, replica_budget=0)
        found["no replicas"] = _present(single) or _cold_start(single)
    return found


def _present(problem: PlacementProblem) -> Placement | None:
    """Return the current placement within the budget, that of engines at their start if none is.

    None if an expert has no copy there.
    """
    current = problem.current
    if current is not None:
        return fit_to_budget(problem, current)
    try:
        return fit_to_budget(problem, Placement.initial(problem.shape))
    except InfeasiblePlan:
        return None


def _is_first(problem: PlacementProblem) -> bool:
    """Return True if engines have just started, or nothing is there, and no limit holds."""
    current, limits = problem.current, problem.objective.limits
    if current is None:
        return True
    return _is_engine_start(problem.shape, current) and limits == PlanLimits()


def _eplb_start(problem: PlacementProblem) -> Placement | None:
    """Return EPLB's placement with the fewest moves; None if EPLB cannot plan, or under limits."""
    if problem.objective.limits != PlanLimits():
        return None
    try:
        placement, _, form = choose_form(problem)
    except (InvalidInput, InfeasiblePlan):
        return None
    return relabel(problem, placement, keep_nodes=form is Variant.HIERARCHICAL)


def _metro_start(problem: PlacementProblem) -> Placement | None:
    """Return METRO's placement, EPLB's on activations, as `_eplb_start`."""
    return _eplb_start(replace(problem, load=np.minimum(problem.load, 1.0)))


def _linear_rates(costs: CostCurves | None, num_ranks: int) -> NDArray[np.float64]:
    """Return how slow each rank is, (R,): cost per token at the last stair over the mean."""
    if costs is None:
        return np.ones(num_ranks)
    tiles = costs.tile_seconds.shape[1]
    rates = costs.tile_seconds[:, -1] / (tiles * costs.tile_tokens)
    mean = float(rates.mean())
    return np.asarray(rates / mean, np.float64) if mean > 0 else np.ones(num_ranks)


def _is_engine_start(shape: ModelShape, placement: Placement) -> bool:
    """Return True if nothing was planned yet, so that engines have just started.

    Their start is one of ours, or has the same map in every layer. A single layer, or one of a pool
    with experts that do not divide by ranks, does not show the latter.
    """
    if placement.num_layers > 1 and (placement.phy2log == placement.phy2log[0]).all():
        return True
    return placement in (Placement.initial(shape), Placement.linear(shape))


def _cold_start(problem: PlacementProblem) -> Placement:
    """Build a placement from nothing: copies by load per copy, packed heaviest first by rank speed.

    Raises:
        InfeasiblePlan: too few slots.
    """
    shape = problem.shape
    layers, ranks = shape.num_layers, shape.num_ranks
    load = problem.load.sum(axis=0)
    share = SlotBudget.of(problem).equal_share(layers)
    _, logcnt = replicate_experts(load.astype(np.float32), share, ranks)
    capacity = interleaved_capacity(np.full(layers, share, np.int64), problem.topology)
    rates = _linear_rates(problem.objective.cost.curves, ranks)
    rows = pack_copies(load, logcnt, capacity, shape.slots_per_rank, rates)
    return Placement(rows, ranks, shape.num_logical_experts)


def fit_to_budget(problem: PlacementProblem, current: Placement) -> Placement | None:
    """Remove from a placement second copies on a rank, and the copies that exceed the budget.

    Args:
        problem: names the budget.
        current: a placement of its shape.

    Returns:
        None if an expert has no copy to start from.

    Raises:
        InfeasiblePlan: a rank's pool cannot hold the experts that have no other copy.
    """
    shape = problem.shape
    if (current.logcnt == 0).any():
        return None
    budget = SlotBudget.of(problem)
    rows = current.phy2log.copy()
    load = problem.load.sum(axis=0)
    # The slots of one rank in all layers side by side; both are views of `rows`.
    by_rank = rows.reshape(shape.num_layers, shape.num_ranks, shape.slots_per_rank)
    before = np.tri(shape.slots_per_rank, k=-1, dtype=np.bool_)
    again = (by_rank[..., :, None] == by_rank[..., None, :]) & before
    by_rank[again.any(axis=-1)] = EMPTY
    if budget.pool_per_rank is None:
        for layer in range(shape.num_layers):
            _drop_copies(rows[layer : layer + 1], load[layer : layer + 1], None, budget.per_layer)
    else:
        for rank in range(shape.num_ranks):
            slots = np.arange(rank * shape.slots_per_rank, (rank + 1) * shape.slots_per_rank)
            _drop_copies(rows, load, slots, budget.pool_per_rank)
        _drop_copies(rows, load, None, budget.total)
    return Placement(rows, shape.num_ranks, shape.num_logical_experts)


def _drop_copies(
    rows: NDArray[np.int32],
    load: NDArray[np.float64],
    slots: NDArray[np.int64] | None,
    most: int,
) -> None:
    """Empty slots until at most `most` are filled, always the copy whose loss matters least.

    Args:
        rows: (L, S) experts of the slots. Mutated.
        load: (L, E) [tokens].
        slots: the slots that count; None for all.
        most: filled slots to keep, over all layers.
    """
    among = np.arange(rows.shape[1]) if slots is None else slots
    surplus = int((rows[:, among] >= 0).sum()) - most
    if surplus <= 0:
        return
    copies = np.zeros(load.shape, np.int64)
    held = np.nonzero(rows >= 0)
    np.add.at(copies, (held[0], rows[held]), 1)

    def load_left(layer: int, slot: int) -> float:
        """Return the load per copy of the slot's expert without the slot; inf for its last copy."""
        expert = rows[layer, slot]
        others = int(copies[layer, expert]) - 1
        return float(load[layer, expert]) / others if others else np.inf

    filled = zip(*np.nonzero(rows[:, among] >= 0), strict=True)
    choices = [(load_left(layer, among[n]), int(among[n]), int(layer)) for layer, n in filled]
    heapq.heapify(choices)
    while surplus > 0:
        left, slot, layer = heapq.heappop(choices)
        if not np.isfinite(left):
            raise InfeasiblePlan(
                "a rank's pool is smaller than the experts that have no other copy",
                Reason.POOL_EXCEEDED,
            )
        # Since the entry was made, other copies may have gone: what is left has only risen.
        now = load_left(layer, slot)
        if now > left:
            heapq.heappush(choices, (now, slot, layer))
            continue
        copies[layer, rows[layer, slot]] -= 1
        rows[layer, slot] = EMPTY
        surplus -= 1


def _plan_few_layers(
    problem: PlacementProblem, search: Search, costs: _Costs, survive: Survive
) -> Placement:
    """Plan where few layers may change: improve all, and then only those that gain most.

    Layers in which more experts must get a second fault domain come first.
    """
    most = problem.objective.limits.max_layers
    start = _present(problem) or _cold_start(problem)
    spread = _spread(problem, start, survive)
    found = search.improve(spread)
    gains = costs.by_layer(start) - costs.by_layer(found)
    repaired = (spread.phy2log != start.phy2log).any(axis=1)
    changed = np.nonzero((found.phy2log != start.phy2log).any(axis=1))[0]
    if most is None or len(changed) <= most:
        return found
    order = np.lexsort((-gains[changed], ~repaired[changed]))
    chosen = sorted(changed[order][:most].tolist())
    return search.improve(start.with_rows(tuple(chosen), spread.phy2log[chosen]), chosen)


def _price(problem: PlacementProblem, window: Window, options: KeelOptions) -> float:
    """Return the gain per step, in layer times, that a copy must bring."""
    if problem.current is None:
        return 0.0
    price, objective = 0.0, problem.objective
    if not _is_engine_start(problem.shape, problem.current):
        per_rank = problem.shape.mean_slots_per_rank
        seen = window.unit_tokens * len(problem.load) / per_rank / window.noise
        caution = options.caution / seen**0.5
        if reading_dominates(problem) or objective.dispatch is DispatchModel.FEWEST:
            caution *= options.active_caution
        # A copy relieves one rank: the more there are, the less it brings to the layer.
        ranks = max(problem.shape.num_ranks / options.full_price_ranks, 1.0)
        price = (options.stickiness + min(caution, options.max_caution)) / per_rank / ranks
    return max(price, objective.cost_per_move / window.unit_cost)


KEEL = PolicyEntry(
    "keel",
    "the least predicted MoE time of the slowest ranks, plus a price for each copy; Evenkeel's"
    " default",
    plan_keel,
    KeelOptions,
    ("stickiness", "caution", "survive"),
    PolicyInputs(moves_old_steps=True),
)
