from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.craft import CraftOptions, ReplicaRule, plan_craft
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.replay.from_options import replay_policies
from evenkeel_moe.replay.options import ReplayOptions
from evenkeel_moe.replay.planners import choose_planners, decayed_mean, warm_up
from evenkeel_moe.replay.walk import walk_forward


def test_baselines_are_added_in_front():
    assert list(choose_planners(["eplb"])) == ["initial", "once", "ewma", "eplb"]
    assert list(choose_planners(["eplb", "once"])) == ["initial", "ewma", "eplb", "once"]
    named = ["once", "eplb-global", "eplb-hierarchical+verdict", "ewma+verdict"]
    assert list(choose_planners(named, baselines=False)) == named


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(
        InvalidInput, match="unknown policies best, worst; known: initial, once, ewma, .*eplb"
    ) as caught:
        choose_planners(["best", "eplb", "worst"])
    assert caught.value.reason is Reason.UNKNOWN_POLICY
    with pytest.raises(InvalidInput, match=r"nobody\+verdict, eplb\+verdict\+verdict; known"):
        choose_planners(["nobody+verdict", "eplb+verdict+verdict"])
    with pytest.raises(InvalidInput, match="no policies to compare"):
        choose_planners([], baselines=False)
    with pytest.raises(InvalidInput, match="named twice: eplb"):
        choose_planners(["eplb", "eplb"])


def test_initial_never_moves_and_once_moves_once(setup):
    planners = choose_planners([])
    initial = walk_forward("initial", planners["initial"], setup)
    assert initial.copies.sum() == 0
    once = walk_forward("once", planners["once"], setup)
    assert once.copies[0] > 0
    assert once.copies[1:].sum() == 0
    assert (
        plan_eplb(setup.problem(0, 6, None)).placement.logcnt.tolist()
        == once.placements[-1].logcnt.tolist()
    )


def test_decayed_mean_halves_a_step_each_half_life():
    history = np.random.default_rng(1).random((7, 2, 3))
    weights = [0.5 ** ((6 - step) / 2) for step in range(7)]
    want = sum(w * h for w, h in zip(weights, history, strict=True)) / sum(weights)
    np.testing.assert_allclose(decayed_mean(history, 2), want)


def test_ewma_uses_steps_before_the_window_and_the_newest_most(setup):
    walk = walk_forward("ewma", choose_planners([])["ewma"], setup)
    # The load of expert 3 jumps at step 15: the plan made at 18 has seen three such steps.
    assert (walk.placements[3].logcnt[:, 3] == 2).all()


def test_warm_up_calls_every_planner_with_and_without_a_placement(setup):
    seen = []

    def planner(replan):
        seen.append((replan.problem.load.shape[0], replan.problem.current is None))

    names = []
    warm_up({"a": planner}, setup, names.append)
    assert seen == [(2, True), (2, False)]
    assert names == ["a"]


@pytest.mark.parametrize("pooled", [None, 10])
def test_craft_never_fills_more_memory_of_a_rank_than_is_free(setup, pooled):
    problem = setup.problem(0, 20, None)
    # 2 layers x 8 experts on 2 ranks: a rank needs 8 slots for one copy of each expert, and has 2
    # more for replicas of 10 bytes.
    problem = replace(problem, shape=replace(problem.shape, pool_slots_per_rank=pooled))
    used = []
    for free_bytes in (0, 9, 10, 20, 10**9):
        asked = ReplayOptions(free_bytes=free_bytes, bytes_per_expert=10)
        craft = replay_policies(["craft"], asked)["craft"]
        held = craft(problem).placement.phy2log.reshape(2, 2, -1) >= 0
        used.append(int(held.sum(axis=(0, 2)).max()) - 8)
        assert used[-1] <= free_bytes // 10
    assert used[:3] == [0, 0, 1]
    every = CraftOptions(rule=ReplicaRule.MEMORY)
    assert craft(problem).placement == plan_craft(problem, every).placement


def test_replicas_of_craft_need_bytes_to_be_counted():
    with pytest.raises(InvalidInput, match="5 free bytes / 0 bytes per expert"):
        replay_policies(["craft"], ReplayOptions(free_bytes=5, bytes_per_expert=0))


def test_keel_stops_where_moves_of_one_round_undo_each_other(shipped_trace):
    # Two exchanges of one round cancel each other's gain there, and so do the two that undo them.
    load = np.load(shipped_trace)["T"][348:384, 2:3].astype(np.float64)
    problem = PlacementProblem(load, ModelShape(1, 64, 8, 9, 6, 1), Topology.single_node(8))
    assert (
        plan_keel(problem).evaluations < 500_000
    )  # The limit is 2,000,000; similar windows need 90,000.
