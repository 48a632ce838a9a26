"""Hypothesis strategies of keel's searches, and the net gain of every move by trying it."""

from hypothesis import strategies as st

from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.keel.evaluation_budget import EvaluationBudget
from evenkeel_moe.planning.policies.keel.moves import replacement_gain, swap_gain
from evenkeel_moe.planning.policies.keel.search import Search
from evenkeel_moe.planning.policies.keel.starts import fit_to_budget
from evenkeel_moe.planning.policies.keel.window import search_window
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.signals.change_detection import step_weights
from tests.strategies import cost_curves, loads, placements, replica_works, shapes, topologies

LEAST, MANY = 1e-9, 1 << 40


@st.composite
def searches(draw):
    """A search before its first move, and a price per copy.

    It starts from another placement than the current one, so that moves can also save copies.
    """
    shape = draw(shapes())
    start = draw(placements(shape))
    problem = PlacementProblem(
        # More steps than a bound is computed for at a time.
        draw(loads(shape.num_layers, shape.num_logical_experts, max_steps=40)),
        shape,
        draw(topologies(shape.num_ranks)),
        current=draw(placements(shape)),
        objective=Objective(
            cost=CostModel(
                draw(st.none() | cost_curves(shape.num_ranks)),
                draw(replica_works()),
                shared_tokens=draw(st.sampled_from([0.0, 0.3])),
            ),
            dispatch=draw(st.sampled_from((DispatchModel.EVEN, DispatchModel.NEAREST))),
            cross_node_factor=draw(st.sampled_from((1.0, 3.0))),
        ),
    )
    fitted = fit_to_budget(problem, start)
    search = Search(
        problem,
        fitted if fitted is not None else Placement.initial(shape),
        search_window(problem, step_weights(problem.load)[0]),
        EvaluationBudget(problem),
        sharp=draw(st.booleans()),
    )
    return search, draw(st.sampled_from((0.0, 0.001, 0.1)))


def is_exact(search):
    """Return True if the gradient bounds gains.

    Costs with stairs are not convex, and nearest dispatch is not convex in the shares: there the
    promises are a rule of thumb.
    """
    return search.objective.costs.tile == 0.0 and not search.objective.nearest


def _price_of(layer, moves):
    """Return the price of some moves (expert that leaves, expert that enters, rank), in copies."""
    return sum(
        (float(layer.copy_price[enter, rank]) if enter >= 0 else 0.0)
        - (float(layer.copy_price[leave, rank]) if leave >= 0 else 0.0)
        for leave, enter, rank in moves
    )


def every_swap(search, i, price):
    """Yield the net gain of every swap of layer i."""
    layer, per_rank = search.layers[i], search.problem.shape.slots_per_rank
    for a in range(len(layer.row)):
        for b in range(len(layer.row)):
            here, there, e, f = a // per_rank, b // per_rank, layer.row[a], layer.row[b]
            twice = layer.held[e, there] > 0 or (f >= 0 and layer.held[f, here] > 0)
            if e < 0 or here == there or twice or (f < 0 and search.rooms[i][there] < 1):
                continue
            gain = swap_gain(layer, search.objective, a, b)
            yield gain - price * _price_of(layer, ((e, f, here), (f, e, there)))


def every_replacement(search, i, price):
    """Yield the net gain of every replacement of layer i."""
    layer, per_rank = search.layers[i], search.problem.shape.slots_per_rank
    for slot, old in enumerate(layer.row.tolist()):
        rank = slot // per_rank
        if old < 0:
            is_open = search.spare(i) > 0 and search.rooms[i][rank] > 0
        else:
            is_open = layer.copies[old] > 1
        for expert in range(len(layer.copies)):
            if is_open and layer.held[expert, rank] == 0:
                gain = replacement_gain(layer, search.objective, slot, expert)
                yield gain - price * _price_of(layer, ((old, expert, rank),))
        if is_open and old >= 0 and search.objective.drops:
            gain = replacement_gain(layer, search.objective, slot, -1)
            yield gain - price * _price_of(layer, ((old, -1, rank),))
