"""Placements for engines to start with, planned on a recording and judged on later steps."""

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats import PlacementFormat
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.verdict import Call
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.replay.offline import engine_start, plan_offline, replica_mass
from evenkeel_moe.replay.walk import Setup

SHAPE = ModelShape(3, 8, 2, 5, 2, 0)


def make_setup(load, shape=SHAPE, **changes):
    objective = Objective(fill_slots=True)
    return Setup(load, shape, Topology((0, 0)), 1, 1, objective=objective, **changes)


def skewed(steps, hot=(2, 3), seed=3):
    """Return a load whose hot experts lie on the first rank of the start, without replicas."""
    load = np.random.default_rng(seed).poisson(30, (steps, 3, 8)).astype(np.float64)
    load[:, :, list(hot)] += 200
    return load


def start():
    return engine_start(PlacementFormat.SGLANG, SHAPE)


def test_a_plan_that_pays_says_so_with_the_numbers_of_unseen_steps():
    plan = plan_offline("keel", make_setup(skewed(120)), start())
    assert (plan.planned_on, plan.verdict.steps) == (100, 20)
    assert plan.verdict.call is Call.RECOMMEND
    assert plan.balancedness_after > plan.balancedness_before + 0.1
    assert plan.words.startswith("It pays: on 20 steps that the plan had not seen, the plan saves")
    held_out = skewed(120)[100:]
    for placement, told in (
        (start(), plan.balancedness_before),
        (plan.placement, plan.balancedness_after),
    ):
        rank_load = metrics.rank_load(held_out, placement)
        assert told == pytest.approx(metrics.balancedness_mean(rank_load))


def test_the_plan_does_not_see_the_steps_that_judge_it():
    load = skewed(120)
    here = plan_offline("keel", make_setup(load), start())
    other = load.copy()
    other[100:] = 1.0
    for layer, row in enumerate(here.placement.phy2log):
        single = np.flatnonzero(here.placement.logcnt[layer][row] == 1)
        # Later traffic goes to experts that the plan has on one rank.
        other[100:, layer, row[single[single < 5]]] = 300.0
    there = plan_offline("keel", make_setup(other), start())
    assert here.placement == there.placement
    assert there.verdict.gain < here.verdict.gain


def test_a_plan_for_traffic_that_went_away_does_not_pay():
    load = skewed(120)
    plan = plan_offline("keel", make_setup(load), start()).placement
    rows = plan.phy2log.copy()
    load[100:] = 0.0
    for layer, row in enumerate(rows):
        single = np.flatnonzero(plan.logcnt[layer][row] == 1)
        here, there = single[single < 5], single[single >= 5]
        # Later traffic goes to two experts of one rank; the placement compared with has them apart.
        load[100:, layer, row[here[:2]]] = 300.0
        row[[here[0], there[0]]] = row[[there[0], here[0]]]
    judged = plan_offline("keel", make_setup(load), Placement(rows, 2, 8))
    assert judged.placement == plan
    assert judged.verdict.call is Call.NOT_NOW
    seen = "It does not pay: on 20 steps that the plan had not seen, the plan costs 100.0%"
    assert judged.words.startswith(seen)


@pytest.mark.parametrize(("steps", "words"), [(1, "there are 0 steps"), (8, "on 2 steps")])
def test_few_steps_are_no_evidence(steps, words):
    plan = plan_offline("eplb", make_setup(skewed(steps)), start())
    assert plan.verdict.call is Call.INSUFFICIENT_EVIDENCE
    assert plan.words.startswith("It cannot be told whether it pays")
    assert words in plan.words and "Record more steps." in plan.words


def test_one_row_is_planned_for_all_layers():
    shape = ModelShape(3, 8, 2, 4, 2, 0)
    begins = engine_start(PlacementFormat.VLLM_RANKS, shape)
    plan = plan_offline("keel", make_setup(skewed(60), shape), begins, one_row=True)
    assert (plan.placement.phy2log == plan.placement.phy2log[0]).all()
    assert plan.verdict.call is Call.RECOMMEND


def test_what_cannot_be_planned_is_refused_with_the_numbers():
    setup = make_setup(skewed(20))
    with pytest.raises(InvalidInput, match="20 of 20 steps are held out: none is left"):
        plan_offline("keel", setup, start(), held_out=20)
    with pytest.raises(InvalidInput, match="leave .verdict out"):
        plan_offline("keel+verdict", setup, start())
    small = Placement(np.tile(np.arange(8, dtype=np.int32), (3, 1)), 2, 8)
    with pytest.raises(ShapeMismatch, match=r"\(3, 8, 2, 8\), the fleet has \(3, 10, 2, 8\)"):
        plan_offline("keel", setup, small)


@pytest.mark.parametrize(
    ("format_", "row"),
    [
        (PlacementFormat.NEUTRAL, [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]),
        (PlacementFormat.SGLANG, [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]),
        (PlacementFormat.TRTLLM, [0, 1, 2, 3, 4, 4, 5, 6, 7, 0]),
        (PlacementFormat.ASCEND, [0, 1, 2, 3, 4, 4, 5, 6, 7, 0]),
    ],
)
def test_the_start_of_each_engine(format_, row):
    assert engine_start(format_, SHAPE).phy2log.tolist() == [row] * 3


def test_the_shares_of_replicas_balance_the_ranks():
    load = np.zeros((2, 2, 4))
    load[:, 0] = [60, 20, 10, 10]
    row = np.array([0, 1, 2, 0, 3, 1], np.int32)
    placement = Placement(np.tile(row, (2, 1)), 2, 4)
    mass = replica_mass(load, placement)
    assert mass.sum(axis=1) == pytest.approx([1.0, 1.0])
    assert mass[0].reshape(2, 3).sum(axis=1) == pytest.approx([0.5, 0.5])
    for expert, share in enumerate([0.6, 0.2, 0.1, 0.1]):
        assert mass[0, row == expert].sum() == pytest.approx(share)
    assert mass[1].reshape(2, 3).sum(axis=1) == pytest.approx([0.5, 0.5]), "a layer without load"
