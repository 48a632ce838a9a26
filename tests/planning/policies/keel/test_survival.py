"""Experts that survive the loss of a rank or a node: what is lost is what is reported."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.keel.options import KeelOptions
from evenkeel_moe.planning.policies.keel.policy import plan_keel
from evenkeel_moe.planning.policies.keel.survival import spread_experts
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.problem.survival import Survive, coverage
from evenkeel_moe.planning.schedule.relabel import count_moves, relabel_proposal

NODES = (0, 0, 0, 1, 1, 1)


def problem_of(seed, per_rank, experts=12, layers=2, ranks=6, **changes):
    rng = np.random.default_rng(seed)
    mean = rng.gamma(0.6, 60.0, (layers, experts))
    shape = ModelShape(layers, experts, ranks, per_rank, 2, 1000)
    known: dict[str, Any] = {
        "load": rng.poisson(mean, (24, layers, experts)).astype(np.float64),
        "shape": shape,
        "topology": Topology(NODES[:ranks]),
        "current": Placement.initial(shape),
    }
    return PlacementProblem(**(known | changes))


def lost_by_killing(placement, ranks):
    """Return the experts over all layers without a replica on any other rank, slot by slot."""
    per_rank = placement.slots_per_rank
    lost = 0
    for row in placement.phy2log:
        alive = {
            int(expert)
            for slot, expert in enumerate(row)
            if expert != EMPTY and slot // per_rank not in ranks
        }
        lost += placement.num_logical_experts - len(alive)
    return lost


def worst_loss(placement, domain, topology):
    kills = [{rank} for rank in range(topology.num_ranks)]
    if domain is Survive.NODE:
        nodes = topology.node_of_rank
        kills = [{r for r, of in enumerate(nodes) if of == node} for node in set(nodes)]
    return max(lost_by_killing(placement, ranks) for ranks in kills)


def plan(problem, survive):
    """Return keel's target as a cycle would run it, and its numbers."""
    proposal = plan_keel(problem, KeelOptions(survive=survive))
    target = relabel_proposal(problem, proposal)
    target.check(problem.shape)
    return target, proposal.numbers


VARIANTS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "cold": {"current": None},
    "reading": {"objective": Objective(cost=CostModel(replica=ReplicaWork(read_tokens=60.0)))},
    "nearest": {"objective": Objective(dispatch=DispatchModel.NEAREST)},
    "fewest": {"objective": Objective(dispatch=DispatchModel.FEWEST)},
    "full slots": {"objective": Objective(fill_slots=True)},
}


@pytest.mark.parametrize("survive", [Survive.RANK, Survive.NODE])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("per_rank", [2, 3, 4, 5])
def test_killing_any_rank_or_node_loses_what_the_plan_reports(per_rank, variant, survive):
    for seed in range(3):
        problem = problem_of(seed, per_rank, **VARIANTS[variant])
        target, numbers = plan(problem, survive)
        worst = worst_loss(target, survive, problem.topology)
        assert numbers["survive_lost"] == worst
        assert numbers["survive_experts"] == 24
        assert coverage(target, problem.topology, survive).most_lost == worst
        assert 0 <= numbers["survive_price"] < 1
        if per_rank >= 4:  # Twice as many slots as experts.
            assert worst == 0
        spare = 6 * per_rank - 12
        alone = coverage(target, problem.topology, survive)
        assert alone.covered == 2 * min(12, spare)


def test_288_slots_for_256_experts_cover_the_32_hottest_of_each_layer():
    problem = problem_of(1, 36, experts=256, layers=1, ranks=8, topology=Topology((0,) * 8))
    target, numbers = plan(problem, Survive.RANK)
    twice = np.flatnonzero(target.logcnt[0] == 2)
    assert sorted(target.logcnt[0].tolist()) == [1] * 224 + [2] * 32
    hottest = np.argsort(-problem.load.sum(axis=0)[0], kind="stable")[:32]
    assert set(twice.tolist()) == set(hottest.tolist())
    assert numbers["survive_lost"] == worst_loss(target, Survive.RANK, problem.topology)
    assert 224 / 8 <= numbers["survive_lost"] <= 36


def test_the_price_is_what_the_plan_without_it_saves():
    problem = problem_of(3, 3)
    target, numbers = plan(problem, Survive.RANK)
    free, without = plan(problem, Survive.NONE)
    assert "survive_price" not in without
    assert coverage(free, problem.topology, Survive.RANK).covered < 12
    assert numbers["survive_price"] > 0


@pytest.mark.parametrize(
    "limits", [PlanLimits(max_moves=3), PlanLimits(max_bytes=2000), PlanLimits(max_layers=1)]
)
@pytest.mark.parametrize("seed", range(4))
def test_limits_hold_and_later_plans_go_on(limits, seed):
    problem = problem_of(seed, 4, objective=Objective(limits=limits))
    # Copies of one expert in all spare slots: nothing else is covered.
    rows = np.tile(np.repeat(np.arange(6), 4), (2, 1)).astype(np.int32)
    rows[:, 1::4] += 6
    rows[:, 2::4] = rows[:, 3::4] = EMPTY
    current = Placement(rows, 6, 12)
    covered = 0
    for _ in range(40):
        target, numbers = plan(replace(problem, current=current), Survive.RANK)
        assert count_moves(current, target) <= (limits.max_moves or 99)
        assert count_moves(current, target) * 1000 <= (limits.max_bytes or 10**6)
        changed = (target.phy2log != current.phy2log).any(axis=1).sum()
        assert changed <= (limits.max_layers or 99)
        now = coverage(target, problem.topology, Survive.RANK).covered
        assert now >= covered
        covered, current = now, target
    assert covered == 24
    assert numbers["survive_lost"] == 0


def test_pools_are_not_exceeded():
    shape = ModelShape(2, 12, 6, 6, 2, 1000, pool_slots_per_rank=8)
    problem = problem_of(5, 6)
    problem = replace(problem, shape=shape, current=Placement.initial(shape))
    target, numbers = plan(problem, Survive.RANK)
    assert numbers["survive_lost"] == worst_loss(target, Survive.RANK, problem.topology) == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("survive", [Survive.RANK, Survive.NODE])
def test_a_repair_covers_all_that_slots_allow_from_any_placement(seed, survive):
    rng = np.random.default_rng(seed)
    per_rank = int(rng.integers(2, 7))
    problem = problem_of(seed, per_rank, current=None)
    rows = np.stack([rng.permutation(12) for _ in range(2)])
    rows = np.concatenate([rows, rng.integers(-1, 12, (2, 6 * per_rank - 12))], axis=1)
    rows = rng.permuted(rows, axis=1)
    for row in rows.reshape(-1, per_rank):
        for slot in range(per_rank):
            if row[slot] in row[:slot]:
                row[slot] = EMPTY
    placement = Placement(rows.astype(np.int32), 6, 12)
    found = coverage(spread_experts(problem, placement, survive), problem.topology, survive)
    assert found.covered == 2 * min(12, 6 * per_rank - 12)
