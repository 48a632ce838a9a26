"""The gain of a move is by how much it lowers the objective when it is made and all is anew."""

from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostCurves, CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.layer import build_layer, renew
from evenkeel_moe.planning.policies.keel.moves import (
    PUT,
    SWAP,
    Found,
    Rules,
    SearchRoom,
    apply,
    descend,
    exact_gain,
    find_moves,
    fits,
)
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.search import Search
from evenkeel_moe.planning.policies.keel.window import look_ahead
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.token_split import SplitModel
from tests.planning.builders import a_problem

SHAPE = ModelShape(1, 8, 4, 4, 1, 100)
ROW = np.array([0, 1, 2, 3, 0, 4, 5, -1, 0, 1, 6, 7, 0, 1, 2, -1], np.int32)
"""Experts have one to four copies."""
LARGE = 1 << 40
KINDS = {
    "tokens": Objective(),
    "reading": Objective(CostModel(replica=ReplicaWork(read_tokens=20.0))),
    "tiles": Objective(CostModel(replica=ReplicaWork(8.0, 1.0, 4.0))),
    "slow rank": Objective(CostModel(CostCurves.linear(np.array([1.0, 1.0, 1.6, 1.0])))),
    "shared experts": Objective(CostModel(shared_tokens=0.5)),
    "waterfill": Objective(CostModel(shared_tokens=0.5), DispatchModel.WATERFILL),
    "fewest": Objective(CostModel(replica=ReplicaWork(9.0)), DispatchModel.FEWEST),
    "nearest": Objective(dispatch=DispatchModel.NEAREST),
    "nearest, tiles": Objective(
        CostModel(replica=ReplicaWork(8.0, 1.0, 4.0)), DispatchModel.NEAREST
    ),
}
RULES = Rules(0.01, 0.0, True, 200, 100, 0.1, 1e-6)


def window_of(objective, current=None):
    """Return a problem with loads that leave no rank idle, as it is planned for, and its window."""
    rng = np.random.default_rng(3)
    problem = a_problem(
        rng.gamma(3.0, 10.0, (20, 1, 8)),
        SHAPE,
        Topology((0, 0, 1, 1)),
        current=None if current is None else Placement(current[None], 4, 8),
        source_load=rng.gamma(1.0, 10.0, (4, 1, 8)),
        objective=objective,
    )
    return look_ahead(problem, KeelOptions())


def layer_of(objective, row=ROW, current=None):
    """Return a layer of that problem, and the terms of its objective."""
    problem, window = window_of(objective, current)
    search = Search(problem, window, KeelOptions(), 0.01)
    layer = build_layer(search.inputs_of(0), row, search.terms)
    renew(layer, search.terms)
    return layer, search.terms


def room_for(slots, copies=LARGE):
    return SearchRoom(np.full(4, LARGE), np.array([slots]), np.array([copies]))


def every_move(layer):
    """Return every move that changes something."""
    slots, found = len(layer.row), []
    for a in range(slots):
        e = layer.row[a]
        for b in range(a + 1, slots):
            f = layer.row[b]
            apart = a // 4 != b // 4 and (e >= 0 or f >= 0)
            if apart and not (e >= 0 and layer.held[e, b // 4]):
                if not (f >= 0 and layer.held[f, a // 4]):
                    found.append((SWAP, a, b))
        for expert in range(-1, 8):
            if expert == e or (expert >= 0 and layer.held[expert, a // 4]):
                continue
            if e < 0 or layer.copies[e] > 1:
                found.append((PUT, a, expert))
    return np.array(found)


def after(layer, move):
    """Return the slots after a move."""
    kind, a, b = move
    row = layer.row.copy()
    if kind == SWAP:
        row[a], row[b] = row[b], row[a]
    else:
        row[a] = b
    return row


def value_of(row, layer, terms):
    """Return the objective of a row with everything computed anew, prices paid."""
    fresh = layer._replace(row=row.copy(), **{n: getattr(layer, n).copy() for n in DERIVED})
    paid = fresh.given.prices[row[row >= 0], np.flatnonzero(row >= 0) // 4].sum()
    return renew(fresh, terms) + RULES.price * float(paid)


DERIVED = (
    "held", "copies", "share", "part", "work", "by_step", "load", "power", "total", "norm", "slope",
    "relief", "scale", "bend", "mean", "spread", "change", "touched",
)  # fmt: skip


@pytest.mark.parametrize("objective", KINDS.values(), ids=KINDS)
def test_a_move_gains_what_it_promises_and_what_it_leaves_is_as_if_computed_anew(objective):
    current = np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7], np.int32)
    layer, terms = layer_of(objective, current=current)
    before, moves = value_of(layer.row, layer, terms), every_move(layer)
    assert len(moves) > 80
    for move in moves:
        wanted = before - value_of(after(layer, move), layer, terms)
        assert exact_gain(layer, terms, RULES, move) == pytest.approx(wanted, abs=1e-9), move
    for move in moves[:: len(moves) // 20]:
        layer, terms = layer_of(objective, current=current)
        exact_gain(layer, terms, RULES, move)
        apply(layer, terms, move)
        anew, _ = layer_of(objective, row=layer.row, current=current)
        for name in ("held", "copies", "share", "part", "work", "load", "power", "total", "norm"):
            assert np.allclose(getattr(layer, name), getattr(anew, name)), (move, name)
        touched = layer.touched
        slope, relief = (np.where(touched, x, 0.0) for x in (layer.slope.T, layer.relief))
        assert np.allclose(slope, np.where(touched, anew.slope.T, 0.0))
        assert np.allclose(relief, np.where(touched, anew.relief, 0.0))


def test_the_objective_is_the_norm_of_the_time_of_ranks():
    """Computed anew from the loads that the planner scores."""
    for name in ("tokens", "slow rank", "shared experts", "waterfill", "nearest"):
        objective = KINDS[name]
        layer, terms = layer_of(objective)
        problem, window = window_of(objective)
        placement = Placement(ROW[None], 4, 8)
        split = SplitModel.of(problem)
        if name == "waterfill":
            split = SplitModel()
        cost = replace(objective.cost, shared_tokens=0.0)
        routed = moe_time.rank_work(problem.load, placement, cost, split)[:, 0]
        times = moe_time.rank_times(routed, cost) / window.unit_cost
        total = problem.load.sum(axis=(1, 2))
        level = objective.cost.shared_tokens * total / 4
        if name == "shared experts":
            source = problem.source_load.sum(axis=(1, 2))
            times += level[:, None] * 4 * source / source.sum() / window.unit_cost
        powers = (times**8).sum(axis=1)
        if name == "waterfill":
            powers += ((total / 4 + level) / window.unit_cost) ** 8
        assert renew(layer, terms) == pytest.approx(window.weights @ powers**0.125), name


@pytest.mark.parametrize("name", ["tokens", "reading", "slow rank", "nearest"])
def test_a_copy_relieves_its_rank_by_its_work_times_the_gradient(name):
    layer, _ = layer_of(KINDS[name])
    for expert, rank in np.argwhere(layer.held):
        work = layer.work[1, expert]
        if name == "nearest":
            work = layer.share[expert, rank] * layer.given.tokens[expert]
        wanted = work @ layer.slope[rank]
        assert layer.relief[1, expert, rank] == pytest.approx(wanted)


@pytest.mark.parametrize("objective", KINDS.values(), ids=KINDS)
def test_of_all_moves_those_that_promise_most_gain_most(objective):
    layer, terms = layer_of(objective)
    found = Found(np.empty(400), np.empty((400, 3), np.int64), np.empty(400))
    find_moves(layer, RULES._replace(least=-1e9), found)
    known = found.move[:, 0] >= 0
    assert known.sum() > 60
    gains = np.array([exact_gain(layer, terms, RULES, move) for move in found.move[known]])
    promises = found.promise[known]
    assert np.corrcoef(promises, gains)[0, 1] > 0.5
    assert gains[np.argsort(-promises)[:20]].max() == pytest.approx(gains.max())


@pytest.mark.parametrize("objective", KINDS.values(), ids=KINDS)
def test_a_descent_ends_where_no_move_gains(objective):
    layer, terms = layer_of(objective)
    room = room_for(2)
    before = value_of(layer.row, layer, terms)
    assert descend(layer, terms, RULES, room, 10_000) > 0
    now = value_of(layer.row, layer, terms)
    assert now < before - 0.01
    for move in every_move(layer):
        if fits(layer, room, move):
            assert now - value_of(after(layer, move), layer, terms) < RULES.least + 1e-9, move


def test_a_descent_keeps_the_room_it_was_given():
    layer, terms = layer_of(KINDS["tokens"])
    filled = (layer.row.reshape(4, 4) >= 0).sum(axis=1)
    room = SearchRoom(np.array([0, 1, 0, 0]), np.array([1]), np.array([LARGE]))
    descend(layer, terms, RULES._replace(price=0.0), room, 10_000)
    grown = (layer.row.reshape(4, 4) >= 0).sum(axis=1) - filled
    assert (grown + room.slots == [0, 1, 0, 0]).all() and (room.slots >= 0).all()
    assert room.total[0] == 1 - grown.sum() >= 0
    room = room_for(1)
    layer, terms = layer_of(KINDS["tokens"])
    descend(layer, terms, RULES._replace(price=0.0, drops=False), room, 10_000)
    assert (layer.row >= 0).sum() == (ROW >= 0).sum() + 1 and room.total[0] == 0
    # No copy may be made: only those of the current placement.
    current = np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7], np.int32)
    layer, terms = layer_of(KINDS["tokens"], row=current, current=current)
    descend(layer, terms, RULES, room_for(0, copies=0), 10_000)
    assert (np.sort(layer.row.reshape(4, 4)) == np.sort(current.reshape(4, 4))).all()


def test_a_price_of_slots_leaves_the_copies_that_save_more_than_it():
    objective, filled = KINDS["tokens"], []
    for price in (0.0, 0.02, 10.0):
        layer, terms = layer_of(objective)
        rules = RULES._replace(price=0.0, slot_price=price)
        descend(layer, terms, rules, room_for(2), 10_000)
        filled.append(int((layer.row >= 0).sum()))
    assert filled[0] > filled[1] > filled[2] == 8


def test_no_more_exact_gains_are_computed_than_allowed():
    layer, terms = layer_of(KINDS["tokens"])
    room = room_for(2)
    assert descend(layer, terms, RULES, room, 7) == 7
