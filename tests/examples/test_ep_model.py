"""The routing tables of the Qwen3-MoE example."""

import numpy as np
import torch

from evenkeel_moe.model.placement import Placement
from examples.qwen3moe.ep_model import Tables

OLD = Placement(np.array([[0, 1, 2, 0], [0, 1, 2, 2]], np.int32), 2, 3)
NEW = Placement(np.array([[1, 0, 2, 1], [2, 1, 0, 2]], np.int32), 2, 3)


def test_tables_are_switched_in_place():
    tables = Tables(OLD)
    before = [(table.slots.data_ptr(), table.replicas.data_ptr()) for table in tables.layers]
    tables.install(tables.build([0, 1], NEW.phy2log, 1))
    after = [(table.slots.data_ptr(), table.replicas.data_ptr()) for table in tables.layers]
    assert after == before
    fresh = Tables(NEW)
    for table, wanted in zip(tables.layers, fresh.layers, strict=True):
        assert torch.equal(table.slots, wanted.slots)
        assert torch.equal(table.replicas, wanted.replicas)
    assert tables.epoch == 1
