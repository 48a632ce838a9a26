import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InfeasiblePlan
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.keel.starts import fit_to_budget
from evenkeel_moe.planning.problem.placement_problem import SlotBudget
from tests.planning.builders import a_problem
from tests.strategies import loads, placements, shapes


def fit_slowly(problem, current):
    """Drop one copy after the other, each time the cheapest of all that may go."""
    shape, budget = problem.shape, SlotBudget.of(problem)
    rows, load = current.phy2log.copy(), problem.load.sum(axis=0)
    per_rank = shape.slots_per_rank
    for row in rows:
        for slot, expert in enumerate(row.tolist()):
            if expert >= 0 and expert in row[slot // per_rank * per_rank : slot]:
                row[slot] = EMPTY

    def drop(layers, slots, most):
        while sum(rows[layer, slot] >= 0 for layer in layers for slot in slots) > most:
            choices = []
            for layer in layers:
                for slot in slots:
                    expert = rows[layer, slot]
                    others = int((rows[layer] == expert).sum()) - 1
                    if expert >= 0 and others:
                        choices.append((load[layer, expert] / others, slot, layer))
            if not choices:
                raise InfeasiblePlan("no copy may go")
            _, slot, layer = min(choices)
            rows[layer, slot] = EMPTY

    layers, slots = range(shape.num_layers), range(shape.num_slots)
    if budget.pool_per_rank is None:
        for layer in layers:
            drop([layer], slots, budget.per_layer)
    else:
        for rank in range(shape.num_ranks):
            drop(layers, slots[rank * per_rank : (rank + 1) * per_rank], budget.pool_per_rank)
        drop(layers, slots, budget.total)
    return rows


@st.composite
def fits(draw):
    shape = draw(shapes())
    problem = a_problem(
        draw(loads(shape.num_layers, shape.num_logical_experts)),
        shape,
        replica_budget=draw(st.none() | st.integers(0, 2)),
    )
    return problem, draw(placements(shape))


@given(fits())
def test_the_copies_that_go_are_those_whose_loss_matters_least(case):
    problem, current = case
    try:
        wanted = fit_slowly(problem, current)
    except InfeasiblePlan:
        with pytest.raises(InfeasiblePlan):
            fit_to_budget(problem, current)
        return
    fitted = fit_to_budget(problem, current)
    assert fitted is not None and (fitted.phy2log == wanted).all()


def lines_to_fit(layers, pooled):
    """Return how many lines of code run when every redundant copy of a model is dropped."""
    shape = ModelShape(
        layers,
        64,
        4,
        18 if pooled else 17,
        8,
        1,
        pool_slots_per_rank=17 * layers if pooled else None,
    )
    problem = a_problem(np.random.default_rng(0).random((2, layers, 64)), shape, replica_budget=0)
    current, lines = Placement.initial(shape), 0

    def count(*_):
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        fitted = fit_to_budget(problem, current)
    finally:
        sys.settrace(before)
    assert fitted is not None and (fitted.logcnt == 1).all()
    return lines


@pytest.mark.fault("a fleet with pooled slots", "dropping copies took time by the layers squared")
@pytest.mark.parametrize("pooled", [False, True], ids=["fixed", "pooled"])
def test_dropping_copies_takes_time_in_proportion_to_the_layers(pooled):
    few, many = (lines_to_fit(layers, pooled) for layers in (4, 16))
    assert many < 1.5 * 4 * few
