from pathlib import Path

import numpy as np
import pytest

from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.replay.walk import Setup

SHIPPED = Path(__file__).parents[2] / "examples" / "traces" / "decode_abrupt.npz"


@pytest.fixture
def shipped_trace():
    return SHIPPED


@pytest.fixture
def setup():
    """Return 30 steps of 2 layers x 8 experts on 2 ranks x 5 slots, with 6 replans."""
    load = np.random.default_rng(5).integers(0, 50, (30, 2, 8)).astype(np.float64)
    load[15:, :, 3] += 200
    return Setup(load, ModelShape(2, 8, 2, 5, 2, 10), Topology.single_node(2), 6, 4)
