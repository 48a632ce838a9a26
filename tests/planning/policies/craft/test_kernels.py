import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.policies.craft.kernels import replay_layer
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.token_split import slot_shares
from tests.strategies import loads, placements, shapes


def check_replay(load, placement):
    """Compare the replay of one layer with the metrics."""
    share = slot_shares(placement).astype(np.float32)
    measured = replay_layer(load[:, 0], placement.phy2log, share, placement.num_ranks)
    expected = metrics.balancedness_by_layer(metrics.rank_load(load, placement))
    assert measured[0] == pytest.approx(expected[0] if load.any() else 1.0, rel=1e-5)


@given(shapes(pooled=False, max_layers=1), st.data())
def test_replay_is_the_mean_balancedness_of_the_metrics(shape, data):
    load = data.draw(loads(1, shape.num_logical_experts, max_steps=70))
    check_replay(load, data.draw(placements(shape)))


def test_replay_crosses_blocks_of_steps():
    load = np.random.default_rng(0).integers(0, 50, (150, 1, 6)).astype(float)
    load[70] = 0.0
    check_replay(load, Placement.initial(ModelShape(1, 6, 3, 3, 1, 100)))
