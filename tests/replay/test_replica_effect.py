from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.model.cost import CostModel, CostSource, ReplicaWork
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.replay.replica_effect import replica_effect
from evenkeel_moe.replay.walk import Setup


def flat(tokens: float, read_tokens: float = 0.0, slots_per_rank: int = 6) -> Setup:
    """8 experts with equal load on 2 ranks; each rank repeats 2 experts of the other."""
    shape = ModelShape(1, 8, 2, slots_per_rank, 2, 10)
    load = np.full((20, 1, 8), tokens)
    cost = CostModel(replica=ReplicaWork(read_tokens=read_tokens), source=CostSource.DERIVED)
    return Setup(load, shape, Topology.single_node(2), 6, 4, objective=Objective(cost=cost))


def test_replicas_cost_time_where_reading_dominates():
    effect = replica_effect(flat(tokens=3.0, read_tokens=148.0), 6, 18)
    assert effect is not None
    # Six experts are read on each rank instead of four.
    assert effect.time_change == pytest.approx(0.5)
    assert effect.tokens_per_expert == 3.0
    assert effect.words == (
        "On this trace the redundant replicas of the initial placement cost 50.0% of MoE time:"
        " reading an expert's weights takes as long as computing 148 tokens, and experts get 3"
        " tokens per step on average."
    )


def test_replicas_save_time_where_computing_dominates():
    setup = flat(tokens=100.0)
    setup.load[:, :, 0] = 500.0
    effect = replica_effect(setup, 6, 18)
    assert effect is not None
    # One rank had 800 of 1200 tokens; the hot expert and another now have a copy on each.
    assert effect.time_change < -0.1
    assert f"save {-effect.time_change:.1%} of MoE time" in effect.words
    assert "does not count the reading of weights" in effect.words


def test_replicas_that_change_nothing_are_called_so():
    effect = replica_effect(flat(tokens=100.0), 6, 18)
    assert effect is not None
    assert effect.time_change == pytest.approx(0.0)
    assert "do not change MoE time" in effect.words


def test_only_the_named_steps_count():
    setup = flat(tokens=3.0, read_tokens=148.0)
    setup.load[:6] = 1e6
    effect = replica_effect(setup, 6, 18)
    assert effect is not None
    assert effect.tokens_per_expert == 3.0


def test_without_replicas_or_load_there_is_no_effect():
    assert replica_effect(flat(3.0, 148.0, slots_per_rank=4), 6, 18) is None
    silent = replace(flat(3.0), load=np.zeros((20, 1, 8)))
    assert replica_effect(silent, 6, 18) is None
