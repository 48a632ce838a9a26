"""The bounds of keel's search leave out no move that is better than those they let through."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.keel.descent import descend
from evenkeel_moe.planning.policies.keel.evaluation_budget import Evaluations
from evenkeel_moe.planning.policies.keel.moves import change_gain, exchange_gain
from evenkeel_moe.planning.policies.keel.replacements import best_change
from evenkeel_moe.planning.policies.keel.search import Fleet
from evenkeel_moe.planning.policies.keel.starts import fit_to_budget
from evenkeel_moe.planning.policies.keel.state import SHARP, SMOOTH, refresh
from evenkeel_moe.planning.policies.keel.swaps import best_exchanges
from evenkeel_moe.planning.problem.objective import DispatchModel, Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.signals.change_detection import step_weights
from tests.strategies import cost_curves, loads, placements, shapes, topologies

LEAST, MANY = 1e-9, 1 << 40


@st.composite
def searches(draw):
    """A fleet about to search: from a placement other than the current one, so that copies can be saved, too."""
    shape = draw(shapes())
    start = draw(placements(shape))
    problem = PlacementProblem(
        draw(loads(shape.num_layers, shape.num_logical_experts)),
        shape,
        draw(topologies(shape.num_ranks)),
        current=draw(placements(shape)),
        objective=Objective(
            costs=draw(st.none() | cost_curves(shape.num_ranks)),
            dispatch=draw(st.sampled_from((DispatchModel.EVEN, DispatchModel.NEAREST))),
            cross_node_factor=draw(st.sampled_from((1.0, 3.0))),
        ),
    )
    fitted = fit_to_budget(problem, start)
    fleet = Fleet(
        problem,
        fitted if fitted is not None else Placement.initial(shape),
        step_weights(problem.load)[0],
        Evaluations(problem),
    )
    fleet.curves = fleet.curves._replace(doublings=draw(st.sampled_from((SMOOTH, SHARP))))
    return fleet, draw(st.sampled_from((0.0, 0.001, 0.1)))


def moved_price(layer, moves):
    """What moves of experts (leave, enter, rank) cost, in copies of the nearest price."""
    return sum(
        (layer.far[enter, rank] if enter >= 0 else 0.0)
        - (layer.far[leave, rank] if leave >= 0 else 0.0)
        for leave, enter, rank in moves
    )


def every_exchange(fleet, i, price):
    layer, per_rank = fleet.layers[i], fleet.problem.shape.slots_per_rank
    for a in range(len(layer.row)):
        for b in range(len(layer.row)):
            here, there, e, f = a // per_rank, b // per_rank, layer.row[a], layer.row[b]
            twice = layer.held[e, there] > 0 or (f >= 0 and layer.held[f, here] > 0)
            if e < 0 or here == there or twice or (f < 0 and fleet.rooms[i][there] < 1):
                continue
            gain = exchange_gain(layer, fleet.curves, fleet.split, a, b)
            yield gain - price * moved_price(layer, ((e, f, here), (f, e, there)))


def every_change(fleet, i, price):
    layer, per_rank = fleet.layers[i], fleet.problem.shape.slots_per_rank
    for slot, old in enumerate(layer.row.tolist()):
        rank = slot // per_rank
        open_ = (
            fleet._spare(i) > 0 and fleet.rooms[i][rank] > 0 if old < 0 else layer.copies[old] > 1
        )
        for expert in range(len(layer.copies)):
            if open_ and layer.held[expert, rank] == 0:
                gain = change_gain(layer, fleet.curves, fleet.split, slot, expert)
                yield gain - price * moved_price(layer, ((old, expert, rank),))


def exact(fleet):
    """Stairs are not convex, nor is nearest dispatch in the shares: there the promises are a rule of thumb."""
    return fleet.curves.tile == 0.0 and not fleet.split.nearest


@given(searches())
def test_no_exchange_gains_more_than_the_best_one_found(search):
    fleet, price = search
    for i, layer in enumerate(fleet.layers):
        refresh(layer, fleet.curves)
        gains, _, _ = best_exchanges(
            layer, fleet.curves, fleet.split, fleet.rooms[i], price, MANY, LEAST, MANY
        )
        brute = max([0.0, *every_exchange(fleet, i, price)])
        assert (np.diff(gains) <= 0).all()
        assert max(gains, default=0.0) <= brute + 1e-9
        if exact(fleet):
            assert max(gains, default=LEAST) == pytest.approx(max(brute, LEAST), rel=1e-6, abs=2e-9)


@given(searches())
def test_no_change_gains_more_than_the_best_one_found(search):
    fleet, price = search
    for i, layer in enumerate(fleet.layers):
        refresh(layer, fleet.curves)
        slot, expert, gain, _, _ = best_change(
            layer,
            fleet.curves,
            fleet.split,
            fleet.rooms[i],
            fleet._spare(i),
            price,
            MANY,
            LEAST,
            MANY,
        )
        brute = max([0.0, *every_change(fleet, i, price)])
        if slot >= 0:
            assert layer.row[slot] != expert
            assert gain <= brute + 1e-9
        # With a high p the promise of two steps at once is worked out one after the other, which is no bound.
        if exact(fleet) and fleet.curves.doublings == SMOOTH:
            assert gain == pytest.approx(max(brute, LEAST), rel=1e-6, abs=2e-9)


@given(searches())
def test_a_descent_ends_and_does_not_rise(search):
    fleet, price = search
    for i, layer in enumerate(fleet.layers):
        before, most = refresh(layer, fleet.curves), 1_000_000
        copies, _, used = descend(
            layer,
            fleet.curves,
            fleet.split,
            fleet.rooms[i],
            fleet._spare(i),
            price,
            MANY,
            LEAST,
            most,
        )
        assert used < most
        if price == 0.0 or fleet.problem.objective.cross_node_factor == 1.0:
            assert refresh(layer, fleet.curves) + price * copies <= before + LEAST
