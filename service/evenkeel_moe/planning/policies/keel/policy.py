"""The keel policy: least predicted MoE time, replicas and rank speeds and moves weighed at once.

Objective: sum over steps and layers of max over ranks of C_r(rank load), plus the price of every copy. Steps
are weighed by how much they say about the future (`change`), moved to where the loads of experts are expected
(`forecast`), and the maximum is searched through a p-norm (`keel_state`). The search starts from the current
placement, so that what stays costs nothing, or from EPLB's where there is none.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.policies.keel.evaluation_budget import Evaluations
from evenkeel_moe.planning.policies.keel.search import Fleet
from evenkeel_moe.planning.policies.keel.starts import cold_start, fit_to_budget, linear_rates
from evenkeel_moe.planning.problem import bounds, metrics
from evenkeel_moe.planning.problem.objective import DispatchModel
from evenkeel_moe.planning.problem.placement_problem import (
    PlacementProblem,
    Proposal,
    check_current,
)
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.planning.schedule import relabel
from evenkeel_moe.planning.signals.change_detection import Change, ChangeRules, step_weights
from evenkeel_moe.planning.signals.forecast import forecast, recentred

__all__ = ["KeelOptions", "plan_keel"]

_MOST_CAUTION = 0.03
"""Loads that are shares instead of tokens would make caution forbid everything."""
_WORTH_STARTING_AFRESH = 0.003
"""Of the window's time, what a plan from nothing must save beyond one from the engines' start, which needs fewer copies. Where
ranks differ in speed that start is as good as any other, and the better plan is taken."""
_WORTH_STARTING_AFRESH_IN_MOTION = 0.01
"""The same where loads move: what is nearest to the window then is not so for long."""
_ALIKE = 0.01
"""Share by which the slowest rank's time for a token may exceed the fastest's where ranks do not differ in speed."""
_CROWDING = 0.7
"""Power of how much more than tokens that come one by one a window's blocks differ, in the squared noise of a move: 1 if what a
move saves were as noisy as loads, 0 if it were not at all."""
_TRUST = 0.25
"""Of where an expert's tokens started in the window, the share that is expected to last."""
_KEPT_FOR_REFINING = 0.25
"""Share of the evaluations left for refining a plan for nearest dispatch."""
_WORTH_CHOOSING = 0.005
"""Of the window's time under an optimal split, what its choice must save over the even split's."""
_WORTH_REFINING = 0.003
"""Layer times that the refined plan of a layer must promise, all told: less is mostly chance."""


@dataclass(frozen=True, slots=True)
class KeelOptions:
    """Choices of keel that a problem does not state."""

    stickiness: float = 0.003
    """What one copy must save per step, as a share of the time that the mean slot takes."""
    caution: float = 0.25
    """What it must save besides, over the square root of the tokens that the mean slot saw in the window (counted as fewer
    where they come by the request): with few tokens most of what a move seems to save is chance. A `cost_per_move` above
    both together takes their place."""
    few: float = 0.028
    """Share of the slots that may change for `few_stickiness`: so many copies cost little even where chance chose them."""
    few_stickiness: float = 0.0055
    """What each of those must save, in the unit of `stickiness`. A `cost_per_move` still holds."""
    first_stickiness: float = 0.0
    """What a copy must save in the first plan after an engine's start, all told: that gain lasts."""
    foresight: float = 0.125
    """Share of the squared error of the window's mean that a forecast must have saved within the window to be believed."""
    change: ChangeRules = field(default_factory=ChangeRules)

    def __post_init__(self) -> None:
        for name in (
            "stickiness",
            "caution",
            "few",
            "few_stickiness",
            "first_stickiness",
            "foresight",
        ):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, must be in [0, 1)")


@dataclass(frozen=True, eq=False, slots=True)
class _Outlook:
    """What a window says of the steps to come, beside its load."""

    weights: NDArray[np.float64]
    """(T,) of its steps, summing to 1."""
    noise: float
    """What its tokens count for less, >= 1: the squared noise of a move over that of tokens that come one by one."""
    moves: bool
    """Whether loads are expected elsewhere than where they were."""
    forecast_error: float
    """Of the forecast, as `Forecast.error`; NaN without one."""


def plan_keel(problem: PlacementProblem, options: KeelOptions = KeelOptions()) -> Proposal:
    """Plan by keel.

    Args:
        problem: without `current` nothing has a price and every slot in the budget is filled; with it, copies are
            made only where they pay, and limits hold.
        options: how sticky, and how the window is weighed.

    Returns:
        numbers: `change_at` (first step after the newest change), `change_strength`, `forecast_error` (as
        `Forecast.error`; NaN where the window is too short for a forecast), `copies`, `price` (of a copy, in layer
        times), `gap` (score over lower bound, minus 1).

    Raises:
        InfeasiblePlan: the slots cannot hold one copy of every expert.
        ShapeMismatch: the current placement or the curves are of another deployment.
    """
    check_current(problem)
    expected, outlook, change = _look_ahead(problem, options)
    evaluations = Evaluations(problem)
    objective = problem.objective
    even = replace(expected, objective=replace(objective, dispatch=DispatchModel.EVEN))
    if objective.dispatch is DispatchModel.NEAREST and objective.limits.max_layers is None:
        # An even split knows less and so follows less noise; what nearest dispatch adds is refined from there. (A limit on
        # layers would count from there, too.)
        with evaluations.keeping(_KEPT_FOR_REFINING):
            best, price = _search(even, outlook, options, evaluations)
        fleet = Fleet(_shrunk(expected), best, outlook.weights, evaluations)
        fleet.search(price)
        fleet.undo_small(price, _WORTH_REFINING)
        best = fleet.placement()
    elif objective.dispatch is DispatchModel.OPTIMAL and objective.limits.max_layers is None:
        with evaluations.keeping(0.5):
            best, price = _search(expected, outlook, options, evaluations)
        # Searched under an even split all the same: another choice among what was found must promise more than chance.
        plain, _ = _search(even, outlook, options, evaluations)
        weights = outlook.weights
        if _time(expected, weights, best) > (1.0 - _WORTH_CHOOSING) * _time(
            expected, weights, plain
        ):
            best = plain
    else:
        best, price = _search(expected, outlook, options, evaluations)
    score = metrics.score(problem, best)
    bound = bounds.lower_bound(problem)
    numbers = {
        "change_at": float(change.first_step),
        "change_strength": change.strength,
        "forecast_error": outlook.forecast_error,
        "price": price,
        "gap": score / bound - 1.0 if bound > 0 else 0.0,
        "copies": 0.0
        if problem.current is None
        else float(relabel.count_moves(problem.current, best)),
    }
    return Proposal(best, score, evaluations.used, bound, numbers)


def _look_ahead(
    problem: PlacementProblem, options: KeelOptions
) -> tuple[PlacementProblem, _Outlook, Change]:
    """The problem with the loads to plan for, what else its window says of the steps to come, and its newest change."""
    weights, change = step_weights(problem.load, options.change)
    foreseen = forecast(problem.load)
    # Unknown where there are too few steps to tell.
    noise = change.usual**_CROWDING if change.usual > 1.0 else 1.0
    if foreseen is None:
        return problem, _Outlook(weights, noise, False, float("nan")), change
    moves = foreseen.error < 1.0 - options.foresight
    if moves:
        problem = replace(problem, load=recentred(problem.load, weights, foreseen))
    return problem, _Outlook(weights, noise, moves, foreseen.error), change


def _search(
    problem: PlacementProblem, outlook: _Outlook, options: KeelOptions, evaluations: Evaluations
) -> tuple[Placement, float]:
    """(placement, price of a copy in layer times): the better of what is found from here and from EPLB's."""
    weights = outlook.weights
    start = None if problem.current is None else fit_to_budget(problem, problem.current)
    fleet = Fleet(
        problem, start if start is not None else cold_start(problem), weights, evaluations
    )
    price = _price(problem, outlook, fleet, options)
    _improve(fleet, price, options)
    best = fleet.placement()

    def total(placement: Placement) -> float:
        return _total(problem, weights, placement, price, fleet)

    rival = _rival(problem)
    if rival is not None and total(rival) < total(best):
        second = Fleet(problem, rival, weights, evaluations)
        _improve(second, price, options)
        best = min((rival, second.placement()), key=total)
    if problem.current is None:
        return _anew(problem, weights, best, evaluations), 0.0
    if _unplanned(problem.current) and problem.objective.limits == PlanLimits():
        fresh, _ = _search(replace(problem, current=None), outlook, options, evaluations)
        fresh = relabel.relabel(problem, fresh)
        if total(fresh) < (1.0 - _worth_starting_afresh(problem, outlook)) * total(best):
            best = fresh
    return best, price


def _worth_starting_afresh(problem: PlacementProblem, outlook: _Outlook) -> float:
    """Share of the window's time that a plan from nothing must save beyond one from the engines' start."""
    speeds = linear_rates(problem.objective.costs, problem.shape.num_ranks)
    if speeds.max() > (1.0 + _ALIKE) * speeds.min():
        return 0.0
    return _WORTH_STARTING_AFRESH_IN_MOTION if outlook.moves else _WORTH_STARTING_AFRESH


def _improve(fleet: Fleet, price: float, options: KeelOptions) -> None:
    """Search at the price, then for a few copies at less."""
    problem = fleet.problem
    fleet.search(price)
    if price > 0.0 and problem.objective.limits.max_layers is None:
        least = options.few_stickiness / problem.shape.slots_per_rank
        least = max(min(least, price), fleet.price_of(problem.objective.cost_per_move))
        fleet.search_few(options.few, least, price)


def _anew(
    problem: PlacementProblem,
    weights: NDArray[np.float64],
    best: Placement,
    evaluations: Evaluations,
) -> Placement:
    """`_search` from nothing, with a placement found already: also from the engines' start, and then by the very maximum.

    There is no placement to fall behind, so the window alone decides.
    """
    try:
        first = fit_to_budget(problem, Placement.initial(problem.shape))
    except InfeasiblePlan:
        first = None
    if first is not None:
        best = _better(problem, weights, best, Fleet(problem, first, weights, evaluations))
    return _better(problem, weights, best, Fleet(problem, best, weights, evaluations, sharp=True))


def _better(
    problem: PlacementProblem, weights: NDArray[np.float64], best: Placement, fleet: Fleet
) -> Placement:
    """The better of a placement and what a fleet finds."""
    fleet.search(0.0)
    return min((best, fleet.placement()), key=lambda each: _time(problem, weights, each))


def _time(problem: PlacementProblem, weights: NDArray[np.float64], placement: Placement) -> float:
    """Predicted time of the window, in the unit of the score; its steps weighed as in the search that found the placement."""
    times = metrics.step_times(
        problem.load, placement, problem.objective.costs, SplitModel.of(problem)
    )
    return float(weights @ times.sum(axis=1)) * len(weights)


def _shrunk(problem: PlacementProblem) -> PlacementProblem:
    """The same with origins drawn towards even ones: a window has few requests, which live on few ranks."""
    if problem.source_load is None:
        return problem
    even = problem.source_load.mean(axis=0, keepdims=True)
    return replace(problem, source_load=even + _TRUST * (problem.source_load - even))


def _price(
    problem: PlacementProblem, outlook: _Outlook, fleet: Fleet, options: KeelOptions
) -> float:
    """What a copy must save per step, in layer times."""
    if problem.current is None:
        return 0.0
    price = options.first_stickiness
    if not _unplanned(problem.current):
        per_rank = problem.shape.slots_per_rank
        seen = fleet.unit_tokens * len(problem.load) / per_rank / outlook.noise
        price = (options.stickiness + min(options.caution / seen**0.5, _MOST_CAUTION)) / per_rank
    return max(price, fleet.price_of(problem.objective.cost_per_move))


def _total(
    problem: PlacementProblem,
    weights: NDArray[np.float64],
    placement: Placement,
    price: float,
    fleet: Fleet,
) -> float:
    """Predicted time of the window plus the price of the copies, both in the unit of the score."""
    score = _time(problem, weights, placement)
    if problem.current is None or price == 0.0:
        return score
    per_copy = price * fleet.unit_cost * len(problem.load)
    return score + per_copy * relabel.count_moves(problem.current, placement)


def _unplanned(placement: Placement) -> bool:
    """Whether every layer has the same map, as engines start: nobody looked at loads yet."""
    return placement.num_layers > 1 and bool((placement.phy2log == placement.phy2log[0]).all())


def _rival(problem: PlacementProblem) -> Placement | None:
    """EPLB's placement with the fewest moves; None where it cannot plan or knows nothing of the limits."""
    if problem.objective.limits != PlanLimits():
        return None
    try:
        proposal = plan_eplb(problem)
    except (InvalidInput, InfeasiblePlan):
        return None
    return relabel.relabel(
        problem, proposal.placement, keep_nodes=proposal.numbers["keep_nodes"] > 0
    )
