"""The keel policy: the least predicted MoE time, with the price of copies, by local search.

Minimised is the sum over steps and layers of the largest C_r(rank load) over ranks, plus a price
for every copy. Replicas, rank speeds and moves are weighed together. The way to a plan:

1. `outlook`: weigh the window's steps by how much they say about the coming ones, and move the
   loads of experts to where a forecast expects them.
2. `starts`: start from the current placement, so that what stays costs nothing; else from nothing.
3. `search`: improve all layers by single moves (`descent`, `swaps`, `replacements`,
   `budget_trades`) on a smooth replacement for the maximum (`state`), within an
   `evaluation_budget`. Where every rank has one slot, `copy_counts` does this faster.
4. Here: the price of a copy, the comparison with EPLB's placement, and what dispatch changes.

All constants are in `options`.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.planning.policies.eplb import place_by_eplb
from evenkeel_moe.planning.policies.keel.copy_counts import CountSearch
from evenkeel_moe.planning.policies.keel.evaluation_budget import EvaluationBudget
from evenkeel_moe.planning.policies.keel.fewest_slots import fill_for_fewest
from evenkeel_moe.planning.policies.keel.options import DEFAULT_OPTIONS, KeelOptions
from evenkeel_moe.planning.policies.keel.outlook import (
    Outlook,
    look_ahead,
    reading_dominates,
    reading_matters,
    shrink_origins,
)
from evenkeel_moe.planning.policies.keel.search import Search
from evenkeel_moe.planning.policies.keel.starts import (
    cold_start,
    fit_to_budget,
    is_engine_start,
    linear_rates,
)
from evenkeel_moe.planning.policies.keel.window import SearchWindow, counts_suffice, search_window
from evenkeel_moe.planning.policies.proposal import build_proposal
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    Proposal,
    check_current,
)
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule import relabel


def plan_keel(problem: PlacementProblem, options: KeelOptions = DEFAULT_OPTIONS) -> Proposal:
    """Plan by keel.

    Args:
        problem: without `current` copies have no price and every slot in the budget is filled; with
            it, copies are made only where they pay, and limits hold.
        options: the constants.

    Returns:
        numbers: `change_at` (first step after the newest change), `change_strength`,
            `forecast_error` (as `Forecast.error`; NaN where the window is too short for a
            forecast), `copies`, `price` (of a copy, in layer times), `gap` (score over lower
            bound, minus 1).

    Raises:
        InfeasiblePlan: the slots cannot hold one copy of every expert.
        ShapeMismatch: the current placement or the curves are of another deployment.
    """
    check_current(problem)
    expected, outlook = look_ahead(problem, options)
    window = search_window(expected, outlook.weights, options)
    planner = _Planner(expected, outlook, window, options, EvaluationBudget(problem, options))
    objective = problem.objective
    if objective.limits.max_layers is not None:
        # What the dispatchers ask for would change every layer, or count layers from another start.
        best, price = planner.plan()
    elif objective.dispatch is DispatchModel.OPTIMAL:
        best, price = planner.plan_for_optimal()
    elif objective.dispatch is DispatchModel.NEAREST and objective.cost.replica.proportional:
        best, price = planner.plan_for_nearest()
    elif objective.dispatch is DispatchModel.FEWEST:
        best, price = planner.plan_for_fewest()
    else:
        best, price = planner.plan()
    numbers = {
        "change_at": float(outlook.change.first_step),
        "change_strength": outlook.change.strength,
        "forecast_error": outlook.forecast_error,
        "price": price,
    }
    proposal = build_proposal(problem, best, planner.evaluations.used, numbers)
    bound, moves = proposal.lower_bound, 0
    if problem.current is not None:
        moves = relabel.count_moves(problem.current, proposal.placement)
    proposal.numbers["gap"] = proposal.score / bound - 1.0 if bound else 0.0
    proposal.numbers["copies"] = float(moves)
    return proposal


@dataclass(frozen=True, eq=False, slots=True)
class _Planner:
    """Searches one problem from several starts and chooses the best result.

    Every method that plans returns (placement, price of a copy in layer times).
    """

    problem: PlacementProblem
    """With the loads to plan for."""
    outlook: Outlook
    window: SearchWindow
    """The loads to plan for, in the form of the search."""
    options: KeelOptions
    evaluations: EvaluationBudget
    """Shared by all searches of the plan."""

    def plan_for_nearest(self) -> tuple[Placement, float]:
        """Plan for an even split, then refine the plan for nearest dispatch.

        A search under an even split knows less and so follows less noise.
        """
        with self.evaluations.keeping(self.options.refine_reserve):
            best, price = self._under_even_split().plan()
        shrunk = shrink_origins(self.problem, self.options.origin_trust)
        search = replace(self, problem=shrunk)._search_from(best)
        search.search(price)
        search.undo_small(price, self.options.refine_gain)
        refined, current = search.placement(), self.problem.current
        # The plan for an even split may be worse for this dispatch than what is there.
        present = None if current is None else fit_to_budget(self.problem, current)
        if present is not None and self._time(present) < self._time(refined):
            return present, price
        return refined, price

    def plan_for_optimal(self) -> tuple[Placement, float]:
        """Plan for optimal dispatch and for an even split, and choose between the two.

        Both searches minimise the cost under an even split, but choose among what they found by
        other predicted times. The choice under optimal dispatch must promise more than chance.
        """
        with self.evaluations.keeping(self.options.even_reserve):
            best, price = self.plan()
        for_even, _ = self._under_even_split().plan()
        if self._time(best) > (1.0 - self.options.optimal_gain) * self._time(for_even):
            best = for_even
        return best, price

    def plan_for_fewest(self) -> tuple[Placement, float]:
        """Plan without and with replicas, and choose for each layer by the dispatcher's own rule.

        The search takes the work of an expert as shared evenly by its copies over the steps. Under
        fewest dispatch it is on one of them in each step, chosen for the batch, so replicas help
        more or less than the search expects. What they save must be more than chance. The present
        placement competes too, in a first plan also METRO's, which is made for this dispatch.
        """
        problem = self.problem
        with self.evaluations.keeping(self.options.even_reserve):
            single, _ = replace(self, problem=replace(problem, replica_budget=0)).plan()
        best, price = self.plan()
        present: Placement | None = None
        others: list[Placement | None] = [best]
        if problem.current is not None and problem.objective.limits == PlanLimits():
            present = fit_to_budget(problem, problem.current)
            if is_engine_start(problem.shape, problem.current):
                others.append(_metro_placement(problem))
            per_step = self.options.fill_price * price * self.window.unit_cost
            others += [fill_for_fewest(problem, plan, per_step) for plan in (single, best)]
        found = [other for other in [present, single, *others] if other is not None]
        return self._best_by_layer(found, price), price

    def _best_by_layer(self, candidates: list[Placement], price: float) -> Placement:
        """Return each layer from the candidate with the least time, copies paid.

        A later candidate must be better than the earlier ones by more than chance. Where layers
        share slots or limits, they all come from the same candidate.
        """
        problem = self.problem
        per_copy = price * self.window.unit_cost * len(problem.load)
        costs = []
        for candidate in candidates:
            cost = self._layer_times(candidate)
            if problem.current is not None:
                cost = cost + per_copy * self._copies_by_layer(problem.current, candidate)
            costs.append(cost)
        table = np.array(costs)
        if problem.shape.pooled or problem.objective.limits != PlanLimits():
            table[:] = table.sum(axis=1, keepdims=True)
        table[1:] /= 1.0 - self.options.optimal_gain
        chosen = table.argmin(axis=0)
        rows = np.stack([c.phy2log for c in candidates])[chosen, np.arange(len(chosen))]
        shape = problem.shape
        return Placement(rows.copy(), shape.num_ranks, shape.num_logical_experts)

    def plan(self) -> tuple[Placement, float]:
        """Search from the current placement and EPLB's, and in a first plan also from nothing.

        Large layers are searched once, from the best of these: a search that is cut short leaves
        a plan that fits the window but not the steps after it.
        """
        problem = self.problem
        start = None if problem.current is None else fit_to_budget(problem, problem.current)
        if self._starts_without_replicas():
            start = self._without_replicas(start)
        price = self._price()
        per_copy = price * self.window.unit_cost * len(problem.load)

        @cache
        def total(placement: Placement) -> float:
            """Return the predicted time of the window plus the price of all copies."""
            time = self._time(placement)
            if problem.current is None or price == 0.0:
                return time
            return time + per_copy * float(self._copies_by_layer(problem.current, placement).sum())

        if start is None:
            start = cold_start(problem)
        rival = _eplb_placement(problem)
        if self.window.large:
            start = min((start, *self._other_starts(rival)), key=total)
        best = self._improve(start, price)
        if rival is not None and total(rival) < total(best):
            best = min((rival, self._improve(rival, price)), key=total)
        if problem.current is None:
            return self._improve_from_nothing(best), 0.0
        if self._is_first() and not self.window.large:
            fresh, _ = replace(self, problem=replace(problem, current=None)).plan()
            fresh = relabel.relabel(problem, fresh)
            if total(fresh) < (1.0 - self._restart_gain()) * total(best):
                best = fresh
        return best, price

    def _starts_without_replicas(self) -> bool:
        """Return True if replicas must pay: where reading dominates, and earlier in a first plan.

        Copies are free in a first plan, and later ones seldom remove what it made. Never under a
        limit on layers: every layer with replicas would change.
        """
        problem = self.problem
        current = problem.current
        if problem.objective.limits.max_layers is not None:
            return False
        if current is None or not is_engine_start(problem.shape, current):
            return reading_dominates(problem)
        return reading_matters(problem, self.options.reading_at_start)

    def _other_starts(self, rival: Placement | None) -> list[Placement]:
        """Return EPLB's placement if there is one, and in a first plan one from nothing."""
        starts = [] if rival is None else [rival]
        if self._is_first():
            starts.append(relabel.relabel(self.problem, cold_start(self.problem)))
        return starts

    def _is_first(self) -> bool:
        """Return True if engines have just started and no limit keeps the plan near their start."""
        problem, current = self.problem, self.problem.current
        return (
            current is not None
            and is_engine_start(problem.shape, current)
            and problem.objective.limits == PlanLimits()
        )

    def _without_replicas(self, start: Placement | None) -> Placement:
        """Return a start without redundant copies, to which the search adds those that pay.

        Where reading dominates these are few, and from there it finds better placements than from a
        start with copies.
        """
        problem = replace(self.problem, replica_budget=0)
        single = None if start is None else fit_to_budget(problem, start)
        return cold_start(problem) if single is None else single

    def _under_even_split(self) -> "_Planner":
        objective = replace(self.problem.objective, dispatch=DispatchModel.EVEN)
        return replace(self, problem=replace(self.problem, objective=objective))

    def _search_from(self, start: Placement, *, sharp: bool = False) -> Search:
        return Search(self.problem, start, self.window, self.evaluations, self.options, sharp=sharp)

    def _begin_search(
        self, start: Placement, *, sharp: bool = False
    ) -> Search | CountSearch | None:
        """Return the search for this problem; None if no evaluations are left for it."""
        if counts_suffice(self.problem):
            return CountSearch(self.problem, start, self.window, self.options, sharp=sharp)
        return None if self.evaluations.is_spent() else self._search_from(start, sharp=sharp)

    def _improve(self, start: Placement, price: float) -> Placement:
        """Search at the price, then for a few more copies at a lower one."""
        search = self._begin_search(start)
        if search is None:
            return start
        search.search(price)
        objective, options = self.problem.objective, self.options
        if price > 0.0 and objective.limits.max_layers is None:
            share, gain = options.active_few_share, options.active_few_stickiness
            if objective.cost.replica.proportional:
                share, gain = options.few_share, options.few_stickiness
            few = min(gain / self.problem.shape.mean_slots_per_rank, price)
            search.search_few(
                share, max(few, objective.cost_per_move / self.window.unit_cost), price
            )
        return search.placement()

    def _improve_from_nothing(self, best: Placement) -> Placement:
        """Search from the engines' start too, then with the sharp norm from the better of the two.

        No placement has to be kept, so a copy has no price and noise matters less.
        """
        time = cache(self._time)
        try:
            first = fit_to_budget(self.problem, Placement.initial(self.problem.shape))
        except InfeasiblePlan:
            first = None
        if first is not None:
            best = min((best, self._improve(first, 0.0)), key=time)
        search = self._begin_search(best, sharp=True)
        if search is None:
            return best
        search.search(0.0)
        return min((best, search.placement()), key=time)

    def _time(self, placement: Placement) -> float:
        """Return the predicted time of the weighted window, in the unit of the score."""
        return float(self._layer_times(placement).sum())

    def _layer_times(self, placement: Placement) -> NDArray[np.float64]:
        """Return the (L,) predicted times of the weighted window, in the unit of the score."""
        problem, weights = self.problem, self.outlook.weights
        times = moe_time.step_times(
            problem.load, placement, problem.objective.cost, SplitModel.of(problem)
        )
        return np.asarray(weights @ times * len(weights), np.float64)

    def _copies_by_layer(self, current: Placement, target: Placement) -> NDArray[np.float64]:
        """Return the (L,) copies to a placement; one between nodes counts as many as it costs."""
        problem = self.problem
        factor = problem.objective.cross_node_factor
        return relabel.price_of_moves(current, target, problem.topology, factor)

    def _price(self) -> float:
        """Return the gain per step, in layer times, that a copy must bring."""
        problem, options = self.problem, self.options
        if problem.current is None:
            return 0.0
        price = options.first_stickiness
        if not is_engine_start(problem.shape, problem.current):
            per_rank = problem.shape.mean_slots_per_rank
            seen = self.window.unit_tokens * len(problem.load) / per_rank / self.outlook.noise
            caution = options.caution / seen**0.5
            if reading_dominates(problem) or problem.objective.dispatch is DispatchModel.FEWEST:
                caution *= options.active_caution
            price = (options.stickiness + min(caution, options.max_caution)) / per_rank
        return max(price, problem.objective.cost_per_move / self.window.unit_cost)

    def _restart_gain(self) -> float:
        """Return the share of the window's time that a plan from nothing must save to be chosen.

        Under Waterfill, moves between ranks below the waterline gain nothing, so a search from the
        present placement often stops early.
        """
        if self.problem.objective.dispatch is DispatchModel.WATERFILL:
            return 0.0
        rates = linear_rates(self.problem.objective.cost.curves, self.problem.shape.num_ranks)
        if rates.max() > (1.0 + self.options.equal_speed_tolerance) * rates.min():
            return 0.0
        if self.outlook.moving:
            return self.options.restart_gain_moving
        return self.options.restart_gain


def _eplb_placement(problem: PlacementProblem) -> Placement | None:
    """Return EPLB's placement with the fewest moves, None if EPLB cannot plan.

    EPLB ignores limits, so None also where there are any.
    """
    if problem.objective.limits != PlanLimits():
        return None
    try:
        placement, hierarchical = place_by_eplb(problem)
    except (InvalidInput, InfeasiblePlan):
        return None
    return relabel.relabel(problem, placement, keep_nodes=hierarchical)


def _metro_placement(problem: PlacementProblem) -> Placement | None:
    """Return METRO's placement, from EPLB on activations, as `_eplb_placement`."""
    return _eplb_placement(replace(problem, load=np.minimum(problem.load, 1.0)))
