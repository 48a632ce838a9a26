"""Pooled buffers and routing tables."""

import numpy as np
import pytest
import torch

from evenkeel_moe.engines.reference.checks import break_something, inspect_rank
from evenkeel_moe.engines.reference.config import Fault
from evenkeel_moe.engines.reference.model import original_expert
from evenkeel_moe.engines.reference.slots import PooledWeights, Router
from evenkeel_moe.errors import InfeasiblePlan
from evenkeel_moe.model.placement import EMPTY, Placement

CPU = torch.device("cpu")
PLACEMENT = Placement(np.array([[0, 1, EMPTY, 2, 3, 0], [3, 2, 1, 0, EMPTY, 1]], np.int32), 2, 4)
ORIGINALS = [[original_expert(5, layer, e, 8, 16) for e in range(4)] for layer in range(2)]


def loaded(rank=0, buffers=5):
    weights = PooledWeights(2, 3, buffers, 8, 16, CPU)
    weights.load(PLACEMENT, rank, 5)
    return weights


def test_filled_slots_hold_the_experts_of_the_map():
    weights = loaded()
    assert weights.free_buffers == 0
    for a, b in zip(weights.tensors(1, 2), ORIGINALS[1][1], strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InfeasiblePlan):
        weights.tensors(0, 2)


def test_a_pool_too_small_is_refused():
    with pytest.raises(InfeasiblePlan, match="buffers"):
        loaded(buffers=4)


def test_buffers_are_reserved_all_or_none_and_freed_ones_serve_later():
    weights = loaded(buffers=6)
    assert not weights.reserve([(0, 2), (1, 3)])
    assert weights.free_buffers == 1
    assert weights.reserve([(0, 2)])
    reserved = weights.tensors(0, 2)[0].data_ptr()
    in_use = {
        weights.tensors(layer, s)[0].data_ptr()
        for layer, s in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    }
    assert reserved not in in_use
    weights.release([(0, 0)])
    assert weights.free_buffers == 1


def test_replicas_share_tokens_evenly_and_every_token_finds_its_expert():
    router = Router(PLACEMENT, 0, CPU)
    n = 4000
    chosen = torch.zeros(n, 1, dtype=torch.int64)
    slots = router.destinations(0, chosen, torch.arange(n))
    assert torch.bincount(slots.reshape(-1), minlength=6).tolist() == [2000, 0, 0, 0, 0, 2000]
    everyone = torch.arange(4).repeat(50, 1)
    slots = router.destinations(1, everyone, torch.arange(50))
    assert (PLACEMENT.phy2log[1][slots.numpy()] == everyone.numpy()).all()


def test_installing_changes_the_named_layers_and_the_epoch_at_once():
    router = Router(PLACEMENT, 4, CPU)
    row = np.array([[1, 0, EMPTY, 2, 3, EMPTY]], np.int32)
    built = router.build((0,), row, 5)
    assert router.epoch == 4 and (router.phy2log == PLACEMENT.phy2log).all()
    router.install(built)
    assert router.epoch == 5
    assert (router.phy2log[0] == row[0]).all() and (router.phy2log[1] == PLACEMENT.phy2log[1]).all()
    assert router.destinations(0, torch.tensor([[0]]), torch.tensor([7])).tolist() == [[1]]


@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_is_named_by_the_inspection_or_changes_the_epoch(fault):
    weights, router = loaded(), Router(PLACEMENT, 3, CPU)
    assert inspect_rank(0, router, weights, ORIGINALS) == (5, [], [])
    counts = np.array([[1, 9, 0], [2, 3, 4]])
    said = break_something(fault, 0, router, weights, counts)
    _, wrong_slots, problems = inspect_rank(0, router, weights, ORIGINALS)
    if fault is Fault.BYTE:
        assert "expert 1" in said and wrong_slots == [{"layer": 0, "local_slot": 1, "expert": 1}]
        assert "weights are not those of expert 1" in problems[0]
    elif fault is Fault.MAP:
        assert (
            wrong_slots == []
            and "routes layer 0 expert 1 to slot 0, which holds expert 0" in problems[0]
        )
    else:
        assert router.epoch == 4 and problems == []
