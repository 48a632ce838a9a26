import numpy as np
import pytest

from evenkeel.errors import InvalidInput, Reason
from evenkeel.planning.eplb import plan_eplb
from evenkeel.replay.planners import choose_planners, faded_mean, warm_up
from evenkeel.replay.walk import walk_forward


def test_baselines_come_along_and_first():
    assert list(choose_planners(["eplb"])) == ["initial", "once", "ewma", "eplb"]
    assert list(choose_planners(["eplb", "once"])) == ["initial", "ewma", "eplb", "once"]
    assert list(choose_planners(["once"], baselines=False)) == ["once"]


def test_names_nobody_has_are_refused_with_those_that_exist():
    with pytest.raises(
        InvalidInput, match="unknown policies best, worst; known: initial, once, ewma, .*eplb"
    ) as caught:
        choose_planners(["best", "eplb", "worst"])
    assert caught.value.reason is Reason.UNKNOWN_POLICY
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
        plan_eplb(setup.problem(0, 6, None)).placement.logcnt.tolist() == once.placements[-1].logcnt.tolist()
    )


def test_faded_mean_halves_a_step_each_half_life():
    history = np.random.default_rng(1).random((7, 2, 3))
    weights = [0.5 ** ((6 - step) / 2) for step in range(7)]
    want = sum(w * h for w, h in zip(weights, history, strict=True)) / sum(weights)
    np.testing.assert_allclose(faded_mean(history, 2), want)


def test_ewma_hears_steps_before_the_window_and_the_newest_most(setup):
    walk = walk_forward("ewma", choose_planners([])["ewma"], setup)
    # The load of expert 3 jumps at step 15: the plan made at 18 has seen three such steps.
    assert (walk.placements[3].logcnt[:, 3] == 2).all()


def test_warming_up_calls_every_planner_cold_and_warm(setup):
    seen = []

    def planner(replan):
        seen.append((replan.problem.load.shape[0], replan.problem.current is None))

    names = []
    warm_up({"a": planner}, setup, names.append)
    assert seen == [(2, True), (2, False)]
    assert names == ["a"]


def test_any_name_may_come_with_a_verdict():
    assert list(choose_planners(["eplb", "eplb+verdict", "ewma+verdict"], baselines=False)) == [
        "eplb",
        "eplb+verdict",
        "ewma+verdict",
    ]
    with pytest.raises(InvalidInput, match=r"unknown policies nobody\+verdict, eplb\+verdict\+verdict"):
        choose_planners(["nobody+verdict", "eplb+verdict+verdict"])
