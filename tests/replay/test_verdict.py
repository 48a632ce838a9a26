from dataclasses import replace

import numpy as np

from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import Proposal
from evenkeel_moe.replay.planners import with_verdict
from evenkeel_moe.replay.walk import Replan, Setup, walk_forward


def _setup(load):
    return Setup(load, ModelShape(2, 8, 2, 5, 2, 10), Topology.single_node(2), 24, 8)


def _noise(seed=0, steps=80):
    return np.random.default_rng(seed).poisson(40, (steps, 2, 8)).astype(np.float64)


def _skewed():
    """Return noise in which experts 0 and 1 are hot."""
    load = _noise()
    load[:, :, :2] += 300
    return load


def _eplb(replan):
    return plan_eplb(replan.problem)


def test_lasting_skew_causes_one_plan_and_noise_causes_none():
    load = _skewed()
    open_ = walk_forward("eplb", _eplb, _setup(load))
    gated = walk_forward("eplb+verdict", with_verdict(_eplb), _setup(load))
    assert gated.copies[0] > 0
    assert gated.copies[1:].sum() == 0
    assert open_.copies[1:].sum() > 0
    assert gated.times.sum() < 1.02 * open_.times.sum()


def test_a_plan_that_helps_only_on_older_steps_is_not_adopted():
    """Replicas of experts 0 and 1, which were hot, would put 2 and 6, now hot, on one rank."""
    rows = np.tile(np.array([0, 1, 2, 6, 4, 1, 0, 3, 5, 7], np.int32), (2, 1))

    def planner(replan):
        return Proposal(Placement(rows, 2, 8), 0.0)

    old, both = _skewed(), _noise()
    both[:16, :, :2] += 300
    both[16:, :, [2, 6]] += 300
    assert walk_forward("a", with_verdict(planner), _setup(old)).copies[0] > 0
    assert walk_forward("b", with_verdict(planner), _setup(both)).copies.sum() == 0


def test_a_short_window_of_noise_adopts_as_few_plans_as_in_a_controller():
    """Windows of 16 steps hold out 4; the planner swaps two experts that are alike."""
    shape = ModelShape(1, 8, 4, 2, 2, 10)
    rows = np.array([[0, 2, 1, 3, 4, 6, 5, 7]], np.int32)
    adopted = 0
    for seed in range(300):
        load = np.random.default_rng(seed).poisson(40, (24, 1, 8)).astype(np.float64)
        setup = Setup(load, shape, Topology.single_node(4), 16, 8)
        replan = Replan(0, 16, setup.problem(0, 16, Placement.initial(shape)), setup)
        adopted += with_verdict(lambda _: Proposal(Placement(rows, 4, 8), 0.0))(replan) is not None
    assert adopted <= 0.06 * 300


def test_the_newest_steps_are_used_for_scoring_and_not_for_planning():
    seen = []

    def planner(replan):
        seen.append((len(replan.problem.load), replan.step, len(replan.history)))
        return None

    walk = walk_forward("none", with_verdict(planner), _setup(_noise()))
    # The first window of 24 has nothing before it; later plans see 24 steps, as without a verdict.
    first, *later = [step - 6 for step in walk.steps.tolist()]
    assert seen == [(18, first, first), *((24, step, step) for step in later)]


def test_source_ranks_and_copy_price_are_those_of_the_steps_planned_on():
    source = np.random.default_rng(1).poisson(20, (80, 2, 2, 8)).astype(np.float64)
    setup = replace(_setup(source.sum(axis=1)), source=source, copy_price=0.01)
    asked = []

    def planner(replan):
        asked.append(replan)
        return None

    walk_forward("none", with_verdict(planner), setup)
    for replan in asked:
        want = setup.problem(replan.step - len(replan.problem.load), replan.step, None)
        np.testing.assert_array_equal(replan.problem.load, want.load)
        np.testing.assert_array_equal(replan.problem.source_load, want.source_load)
        np.testing.assert_array_equal(replan.problem.source_load.sum(axis=0), want.load.sum(axis=0))
        assert replan.problem.objective.cost_per_move == want.objective.cost_per_move


def test_a_plan_is_scored_with_the_source_ranks_of_the_held_out_steps():
    """A second copy of the hot expert helps only while its tokens start on both ranks."""
    load = np.full((80, 2, 8), 20.0)
    load[:, :, 3] = 400.0
    rows = np.tile(np.array([0, 1, 2, 3, 6, 3, 4, 5, 7, 6], np.int32), (2, 1))
    one = np.stack([load, np.zeros_like(load)], axis=1)
    both = np.stack([load, load], axis=1) / 2

    def adopted(before, after):
        source = np.concatenate([before[:18], after[18:]])
        setup = replace(
            _setup(load), source=source, objective=Objective(dispatch=DispatchModel.NEAREST)
        )
        replan = Replan(0, 24, setup.problem(0, 24, Placement.initial(setup.shape)), setup)
        return with_verdict(lambda _: Proposal(Placement(rows, 2, 8), 0.0))(replan) is not None

    assert adopted(both, both)
    assert adopted(one, both)
    assert not adopted(one, one)
    assert not adopted(both, one)


def test_the_scored_placement_is_the_one_adopted():
    """With renamed ranks the placement is the same, so there is nothing to gain."""
    load = _skewed()

    def renamed(replan):
        proposal = plan_eplb(replan.problem)
        rows = proposal.placement.phy2log.reshape(2, 2, 5)[:, ::-1].reshape(2, 10)
        return Proposal(replace(proposal.placement, phy2log=rows), 0.0)

    gated = walk_forward("renamed", with_verdict(renamed), _setup(load))
    assert gated.copies[0] > 0
    assert gated.copies[1:].sum() == 0
    assert gated.copies_raw[1:].sum() == 0


def test_copies_that_take_too_long_to_pay_off_are_not_made():
    load = _skewed()
    cheap = walk_forward("eplb", with_verdict(_eplb), _setup(load))
    dear = walk_forward("eplb", with_verdict(_eplb), replace(_setup(load), copy_price=50.0))
    assert cheap.copies.sum() > 0
    assert dear.copies.sum() == 0


def test_copies_between_nodes_pay_off_later_than_those_within():
    load = _skewed()
    dear = Objective(cross_node_factor=1000.0)
    one = replace(_setup(load), copy_price=0.05, objective=dear)
    two = replace(one, topology=Topology((0, 1)))
    assert walk_forward("one node", with_verdict(_eplb), one).copies.sum() > 0
    assert walk_forward("two nodes", with_verdict(_eplb), two).copies.sum() == 0
