"""LPLB's kernel under Triton's interpreter: the peak of HiGHS, and what the dispatch reads."""

import importlib
import os

import numpy as np
import pytest
import torch

from bench.lplb_kernel import SIZES, drawn_counts, drawn_placement, highs_peak
from evenkeel_moe.dispatch import BatchedSplit, DeviceLplbChoice, ExactSplit
from evenkeel_moe.dispatch import lplb as choices
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, ShapeMismatch
from evenkeel_moe.model.placement import Placement
from tests.dispatch.placements import check_split, dispatched, random_demand

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, so it is set before any test.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def lplb_kernel():
    """The module as Triton's interpreter runs it."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: `test_gpu` runs LPLB's kernel on it")
    pytest.importorskip("triton", reason="Triton is not installed: LPLB's kernel is not run")
    return importlib.import_module("evenkeel_moe.dispatch.lplb_kernel")


def random_problem(rng, size):
    ranks, experts, spare = size
    placement = drawn_placement(rng, ranks, experts, spare)
    return placement, drawn_counts(rng, experts)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("size", "placements"),
    list(zip(SIZES, (16, 10, 4, 8, 6, 3, 1, 2), strict=True)),
    ids=str,
)
def test_the_peak_is_that_of_highs(lplb_kernel, size, placements):
    rng = np.random.default_rng(size[0] * 1000 + size[2])
    for _ in range(placements):
        placement, counts = random_problem(rng, size)
        split = lplb_kernel.KernelSplit(placement, "cpu").solve(torch.from_numpy(counts))
        check_split(split, placement, counts)
        for row, tokens, peak in zip(placement.phy2log, counts, split.peak.tolist(), strict=True):
            best = highs_peak(row, tokens, size[0])
            assert peak == pytest.approx(best, rel=1e-6, abs=1e-6)


def test_a_batch_leaves_nothing_of_the_one_before(lplb_kernel):
    rng = np.random.default_rng(5)
    placement, counts = random_problem(rng, SIZES[0])
    solver = lplb_kernel.KernelSplit(placement, "cpu")
    first = solver.solve(torch.from_numpy(counts)).probabilities.clone()
    # Without tokens every expert is split evenly, as where no batch has come yet.
    idle = solver.solve(torch.zeros(counts.shape, dtype=torch.int64))
    even = (placement.log2phy >= 0) / placement.logcnt[:, :, None]
    assert torch.equal(idle.probabilities, torch.from_numpy(even))
    assert idle.peak.tolist() == [0.0] * len(counts)
    # Counts of any exact type are the same counts.
    for kind in (torch.int64, torch.int32, torch.float32, torch.float64):
        again = solver.solve(torch.from_numpy(counts).to(kind)).probabilities
        assert torch.allclose(again, first, atol=1e-12)


@pytest.mark.parametrize(
    "row",
    [
        [0, 1, 2, 3],  # No replica.
        [0, 1, 0, 1],  # Every expert on both ranks.
        [0, 0, 1, 1],  # All replicas on the rank of the first.
        [0, -1, 1, 0],  # An empty slot.
    ],
)
def test_placements_at_the_edge_are_solved_exactly(lplb_kernel, row):
    placement = Placement(np.array([row]), 2, max(row) + 1)
    counts = torch.tensor([[9, 4, 2, 0][: max(row) + 1]])
    split = lplb_kernel.KernelSplit(placement, "cpu").solve(counts)
    check_split(split, placement, counts.numpy())
    assert torch.allclose(split.peak, ExactSplit(placement).solve(counts).peak, rtol=1e-6)


def test_what_cannot_be_solved_is_refused(lplb_kernel):
    with pytest.raises(InfeasiblePlan):
        lplb_kernel.KernelSplit(Placement(np.array([[0, -1]]), 2, 2), "cpu")
    # 128 experts on all of 128 ranks.
    rows = np.tile(np.arange(128, dtype=np.int32), (1, 128))
    too_large = Placement(rows, 128, 128)
    assert not lplb_kernel.kernel_fits(too_large)
    with pytest.raises(InvalidInput, match="128 ranks and 128 shared experts of a layer are too"):
        lplb_kernel.KernelSplit(too_large, "cpu")
    solver = lplb_kernel.KernelSplit(Placement(np.array([[0, 1, 1, 0]]), 2, 2), "cpu")
    with pytest.raises(ShapeMismatch):
        solver.solve(torch.ones(1, 3))
    with pytest.raises(InvalidInput, match="negative"):
        solver.solve(torch.tensor([[1, -1]]))


def test_the_choice_of_replicas_reads_its_shares(lplb_kernel, monkeypatch):
    # As on a GPU, where `device_split` picks the kernel.
    monkeypatch.setattr(choices, "device_split", lplb_kernel.KernelSplit)
    rng = np.random.default_rng(3)
    placement = drawn_placement(rng, 4, 16, 8)
    demand = random_demand(rng, 4, 16)
    got = dispatched(rng, placement, DeviceLplbChoice, 0, demand)
    counts = demand.sum(dim=0)
    best = highs_peak(placement.phy2log[0], counts.numpy(), 4)
    replicas = placement.slots_per_rank
    assert int(got.reshape(4, -1).sum(dim=1).max()) <= best + replicas


def test_without_a_gpu_torch_alone_solves():
    placement = Placement(np.array([[0, 1, 1, 0]]), 2, 2)
    assert isinstance(choices.device_split(placement, torch.device("cpu")), BatchedSplit)
