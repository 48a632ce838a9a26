"""Traffic: real text with an uneven load that shifts."""

import numpy as np
import pytest
import torch

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.model import Model
from evenkeel_moe.engines.reference.traffic import TextTraffic
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.problem.metrics import balancedness_mean, rank_load
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

CPU = torch.device("cpu")
STEPS, SHIFT = 16, 8


@pytest.fixture(scope="module")
def loads():
    """The shape, and (STEPS, L, E) tokens, of the default run: prose, and code from SHIFT on."""
    config = RankConfig(run_folder="unused")
    model = Model.build(**config.model_sizes, device=CPU)
    traffic = TextTraffic(config.num_ranks, config.tokens_per_step, SHIFT)
    counts = np.zeros((STEPS, config.layers, config.experts))
    for step in range(STEPS):
        for rank in range(config.num_ranks):
            x = model.embed(traffic.tokens(step, rank))
            for layer, plain in enumerate(model.undistributed(x)):
                chosen = plain.chosen.reshape(-1)
                counts[step, layer] += np.bincount(chosen, minlength=config.experts)
    return config.shape, counts


def mean_balancedness(counts, placement):
    return balancedness_mean(rank_load(counts, placement))


def plan(shape, counts):
    return plan_eplb(
        PlacementProblem(counts, shape, Topology.single_node(shape.num_ranks))
    ).placement


def test_text_skews_the_load_a_plan_mends_it_and_the_shift_spoils_it(loads):
    shape, counts = loads
    prose, code = counts[:SHIFT], counts[SHIFT:]
    assert 0.5 < mean_balancedness(prose, Placement.initial(shape)) < 0.72
    planned = plan(shape, prose[: SHIFT // 2])
    mended = mean_balancedness(prose[SHIFT // 2 :], planned)
    assert mended > 0.9
    assert mean_balancedness(code, planned) < mended - 0.08
    assert mean_balancedness(code[SHIFT // 2 :], plan(shape, code[: SHIFT // 2])) > 0.9


def test_ranks_and_steps_read_different_text(loads):
    shape, _ = loads
    traffic = TextTraffic(4, 100, 5)
    pieces = [
        traffic.tokens(step, rank).numpy().tobytes() for step in range(3) for rank in range(4)
    ]
    assert len(set(pieces)) == 12
    assert [traffic.domain(step) for step in (0, 4, 5)] == ["prose", "prose", "code"]
    assert TextTraffic(4, 100, 0).domain(10**6) == "prose"
    assert len(traffic.tokens(10**7, 3)) == 100


def test_the_text_can_change_back_and_forth():
    traffic = TextTraffic(4, 100, 3, shift_back=True)
    assert [traffic.domain(step)[0] for step in range(10)] == list("pppcccpppc")
