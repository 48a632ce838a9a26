import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput
from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.policy import fit_to_budget, plan_keel
from evenkeel_moe.planning.policies.keel.window import look_ahead
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import SlotBudget
from evenkeel_moe.planning.schedule.relabel import moves_by_layer, relabel
from tests.planning.builders import a_problem
from tests.strategies import loads, placements, shapes

SHAPE = ModelShape(1, 8, 4, 2, 2, 100)
READING = Objective(cost=CostModel(replica=ReplicaWork(read_tokens=20.0)))
STILL = KeelOptions(foresight=0.999)
"""Without a forecast, which would move the loads too."""
STEPS, LAYERS, EXPERTS, RANKS = 10, 2, 12, 4


def _planned_tokens(volumes, objective=READING, **options):
    """Return (T,) tokens of the planned steps over those of the window."""
    load = np.outer(volumes, np.arange(1.0, 9.0)).reshape(-1, 1, 8)
    problem = a_problem(load, SHAPE, objective=objective)
    expected, _ = look_ahead(problem, replace(STILL, **options))
    return expected.load.sum(axis=(1, 2)) / load.sum(axis=(1, 2))


def test_a_plan_is_for_more_and_for_fewer_tokens_where_their_number_moves():
    ratio = _planned_tokens(np.repeat([10.0, 12.0, 8.0, 10.0], 10))
    spread = np.std([10.0, 12.0, 8.0, 10.0], ddof=1) / 10.0
    assert np.allclose(ratio[::2], 1.0 + 4.0 * spread)
    assert np.allclose(ratio[1::2] * ratio[::2], 1.0)
    assert (_planned_tokens(np.repeat([10.0, 12.0, 8.0, 10.0], 10), volume_spread=0.0) == 1.0).all()


def test_a_number_of_tokens_that_differs_only_from_step_to_step_changes_no_plan():
    assert (_planned_tokens(np.tile([8.0, 12.0], 20)) == 1.0).all()


def test_tokens_are_planned_as_they_are_where_their_number_does_not_matter():
    moved = np.repeat([10.0, 12.0, 8.0, 10.0], 10)
    assert (_planned_tokens(moved, objective=Objective()) == 1.0).all()


def _problem():
    rng = np.random.default_rng(0)
    load = rng.integers(0, 50, (STEPS, LAYERS, EXPERTS)).astype(np.float64)
    shape = ModelShape(LAYERS, EXPERTS, RANKS, 4, 2, 1)
    return a_problem(load, shape)


def test_a_window_of_common_size_keeps_its_steps():
    problem, window = look_ahead(_problem(), STILL)
    assert (window.blocks == problem.load).all()
    assert (window.block_weights == window.weights).all()
    mean_rank_load = problem.load.sum() / (STEPS * LAYERS * RANKS)
    assert window.unit_tokens == pytest.approx(mean_rank_load)
    assert window.unit_cost == pytest.approx(mean_rank_load)


def test_steps_of_a_large_layer_are_merged_and_no_load_is_lost():
    options = replace(STILL, merged_size=EXPERTS * RANKS * STEPS // 4)
    problem, window = look_ahead(_problem(), options)
    weights = window.weights
    assert window.blocks.shape == (3, LAYERS, EXPERTS)  # 4, 4 and 2 steps
    assert window.block_weights == pytest.approx(
        [weights[:4].sum(), weights[4:8].sum(), weights[8:].sum()]
    )
    assert np.tensordot(window.block_weights, window.blocks, axes=1) == pytest.approx(
        np.tensordot(weights, problem.load, axes=1)
    )


def test_a_part_of_what_origins_differ_by_is_expected_to_last_under_nearest_dispatch():
    source = np.random.default_rng(1).gamma(1.0, 5.0, (RANKS, LAYERS, EXPERTS))
    problem = replace(_problem(), source_load=source)
    kept, _ = look_ahead(problem, STILL)
    assert kept.source_load is source
    near = replace(problem, objective=Objective(dispatch=DispatchModel.NEAREST))
    shrunk, _ = look_ahead(near, STILL)
    even = source.mean(axis=0)
    assert shrunk.source_load - even == pytest.approx(0.25 * (source - even))


# --- limits ---------------------------------------------------------------------------------------


LIMITED = ModelShape(4, 16, 4, 6, 2, 1000)
POOLED = ModelShape(4, 16, 4, 6, 2, 1000, pool_slots_per_rank=20)


def problem_of(seed, shape=LIMITED, read=0.0, **objective):
    """A skewed load, and a present placement that has nothing to do with it."""
    rng = np.random.default_rng(seed)
    mean = rng.gamma(0.5, size=(4, 16))
    load = rng.poisson(400 * mean / mean.sum(axis=1, keepdims=True), (32, 4, 16)).astype(float)
    rows = Placement.initial(shape).phy2log.copy()
    for row in rows:
        row[row >= 0] = rng.permutation(16)[row[row >= 0]]
    return a_problem(
        load,
        shape,
        current=Placement(rows, 4, 16),
        objective=Objective(cost=CostModel(replica=ReplicaWork(read_tokens=read)), **objective),
    )


def planned(problem):
    """The placement that a cycle would judge."""
    placement = relabel(problem, plan_keel(problem).placement)
    placement.check(problem.shape, fill_slots=problem.objective.fill_slots)
    return placement


@pytest.mark.parametrize("limits", [PlanLimits(max_moves=3), PlanLimits(max_bytes=2500)])
@pytest.mark.parametrize("dispatch", DispatchModel)
@pytest.mark.parametrize("read", [10.0, 60.0])
def test_slots_that_must_be_full_are_filled_within_the_limits(read, dispatch, limits):
    most = 3 if limits.max_moves is not None else 2
    for seed in range(3):
        problem = problem_of(seed, read=read, dispatch=dispatch, limits=limits, fill_slots=True)
        assert moves_by_layer(problem.current, planned(problem)).sum() <= most


@pytest.mark.parametrize("dispatch", DispatchModel)
@pytest.mark.parametrize("shape", [LIMITED, POOLED], ids=["fixed", "pooled"])
@pytest.mark.parametrize("read", [0.0, 60.0])
def test_no_more_layers_change_than_may(read, shape, dispatch):
    for seed in range(3):
        problem = problem_of(
            seed, shape, read=read, dispatch=dispatch, limits=PlanLimits(max_layers=1)
        )
        changed = (problem.current.phy2log != planned(problem).phy2log).any(axis=1)
        assert changed.sum() <= 1


def test_in_a_pool_slots_move_from_layers_that_need_no_replica_to_one_that_does():
    rng = np.random.default_rng(0)
    mean = np.full((4, 16), 33.0)
    mean[:, 0] = 0.2
    mean[3] = 12.0
    mean[3, 10] = 300.0
    load = rng.poisson(mean, (32, 4, 16)).astype(float)
    # Every layer has one replica, of the coldest expert; the pool has no slot left.
    rows = np.full((4, 4, 6), -1, np.int32)
    rows[:, :, :4] = np.arange(16).reshape(4, 4)
    for layer in range(4):
        rows[layer, (layer + 1) % 4, 4] = 0
        rows[layer, 0, 4] = 15 if layer == 3 else -1
    shape = ModelShape(4, 16, 4, 6, 2, 1000, pool_slots_per_rank=17)
    problem = a_problem(load, shape, current=Placement(rows.reshape(4, -1), 4, 16))
    held = (planned(problem).phy2log >= 0).sum(axis=1)
    assert held[3] > 17 and held.sum() <= 68


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stickiness", "caution", "origin_trust", "move_share"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_shares_outside_0_to_1_are_refused(name, value):
    with pytest.raises(InvalidInput, match=f"{name} is {value}, must be in"):
        KeelOptions(**{name: value})


# --- starts ---------------------------------------------------------------------------------------


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
