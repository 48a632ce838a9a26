import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lplb_kernel import highs_peak
from evenkeel_moe.dispatch import BatchedSplit, DeviceLplbChoice, ExactSplit, LplbChoice
from evenkeel_moe.dispatch.lplb import whole_quotas
from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem.metrics import rank_load
from evenkeel_moe.planning.problem.token_split import SplitModel
from tests.dispatch.placements import (
    all_tables,
    check_split,
    dispatched,
    random_demand,
    random_placement,
)

OPTIMAL = SplitModel(DispatchModel.OPTIMAL)


def random_counts(rng, placement):
    counts = rng.integers(0, 400, (placement.num_layers, placement.num_logical_experts)).astype(
        float
    )
    counts[rng.random(counts.shape) < 0.2] = 0
    counts[0, rng.integers(counts.shape[1])] = 5000
    return counts


@pytest.mark.parametrize("solver", [ExactSplit, BatchedSplit])
@pytest.mark.parametrize("seed", range(12))
def test_peak_is_the_optimum_of_the_program_and_the_shares_realise_it(solver, seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=2, experts=16, ranks=5, per_rank=7)
    counts = random_counts(rng, placement)
    answer = solver(placement).solve(torch.from_numpy(counts))
    check_split(answer, placement, counts)
    for row, tokens, peak in zip(placement.phy2log, counts, answer.peak.tolist(), strict=True):
        assert peak == pytest.approx(highs_peak(row, tokens, 5), rel=1e-7)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000))
def test_exact_split_equals_the_planners_optimal_model(seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(
        rng, layers=2, experts=9, ranks=int(rng.integers(1, 7)), per_rank=9
    )
    counts = random_counts(rng, placement)
    want = rank_load(counts[None], placement, OPTIMAL)[0].max(axis=1)
    solver = ExactSplit(placement)
    assert solver.solve(torch.from_numpy(counts)).peak.numpy() == pytest.approx(want, rel=1e-9)
    assert solver.rank_load.sum(axis=1) == pytest.approx(counts.sum(axis=1))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000))
def test_whole_quotas_reach_the_optimum_rounded_up_and_lose_no_token(seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(
        rng, layers=2, experts=9, ranks=int(rng.integers(1, 7)), per_rank=9
    )
    counts = random_counts(rng, placement)
    solver = ExactSplit(placement)
    best = solver.solve(torch.from_numpy(counts)).peak.numpy().copy()
    quotas, peak = solver.quotas(torch.from_numpy(counts))
    assert torch.equal(quotas.sum(dim=2), torch.from_numpy(counts).to(torch.int64))
    assert (quotas >= 0).all()
    assert peak.numpy() == pytest.approx(np.ceil(best - 1e-7), abs=1e-6)
    load = np.zeros((2, placement.num_ranks))
    for layer, expert, replica in np.argwhere(placement.log2phy >= 0):
        rank = placement.log2phy[layer, expert, replica] // placement.slots_per_rank
        load[layer, rank] += int(quotas[layer, expert, replica])
    assert load.max(axis=1) == pytest.approx(peak.numpy())


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_do_not_talk_realise_the_optimum(seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=2, duplicates=False)
    for layer in range(2):
        demand = random_demand(rng, 4, 12)
        got = dispatched(rng, placement, LplbChoice, layer, demand)
        counts = demand.sum(dim=0).numpy()
        peak = got.reshape(4, -1).sum(dim=1).max()
        assert int(peak) == int(np.ceil(highs_peak(placement.phy2log[layer], counts, 4) - 1e-6))


@pytest.mark.parametrize("solver", [ExactSplit, BatchedSplit])
def test_edge_cases(solver):
    # Rank 2 holds nothing, expert 3 gets nothing, layer 1 is idle altogether.
    row = [0, 1, 2, 0, 3, 1, -1, -1, -1]
    placement = Placement(np.array([row, row]), 3, 4)
    counts = torch.tensor([[10, 20, 30, 0], [0, 0, 0, 0]])
    answer = solver(placement).solve(counts)
    assert answer.peak.numpy() == pytest.approx([30.0, 0.0], rel=1e-8)
    assert answer.probabilities[1, 0].tolist() == [0.5, 0.5]
    single = Placement(np.array([[0, 1, 1, -1]]), 1, 2)
    alone = solver(single).solve(torch.tensor([[3, 8]]))
    assert alone.peak.tolist() == [11.0]
    assert alone.probabilities[0, 1].tolist() == [0.5, 0.5]


def test_copies_on_one_rank_share_evenly():
    placement = Placement(np.array([[0, 0, 1, 0, 2, -1]]), 2, 3)
    quotas, peak = ExactSplit(placement).quotas(torch.tensor([[11, 0, 0]]))
    assert peak.tolist() == [6.0]
    first, second, third = quotas[0, 0].tolist()
    assert abs(first - second) <= 1 and first + second in (5, 6) and first + second + third == 11


def test_quotas_need_whole_tokens():
    with pytest.raises(InvalidInput, match="whole tokens"):
        ExactSplit(Placement(np.array([[0, 1]]), 2, 2)).quotas(torch.tensor([[1.5, 2.0]]))


@pytest.mark.parametrize("layer", [-1, 1, 7])
def test_quotas_of_a_layer_that_does_not_exist_are_refused(layer):
    solver = ExactSplit(Placement(np.array([[0, 1]]), 2, 2))
    with pytest.raises(ShapeMismatch):
        solver.quotas(torch.tensor([[1, 2]]), layer)


def test_interior_point_is_exact_at_production_shape():
    rng = np.random.default_rng(5)
    experts, ranks, redundant = 256, 32, 32
    rows = []
    for _ in range(3):
        extra = rng.choice(experts, redundant, replace=False)
        rows.append(rng.permutation(np.concatenate([np.arange(experts), extra])))
    placement = Placement(np.array(rows), ranks, experts)
    counts = torch.from_numpy(np.round(np.exp(rng.normal(4, 1, (3, experts)))))
    exact = ExactSplit(placement).solve(counts).peak
    answer = BatchedSplit(placement).solve(counts)
    assert answer.peak.numpy() == pytest.approx(exact.numpy(), rel=1e-7)


# --- LPLB that stays on the device: every token lands, and the peak is near the optimum -----------


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000))
def test_rounded_quotas_sum_to_the_tokens_and_stay_within_one_token_of_the_share(seed):
    rng = np.random.default_rng(seed)
    experts, width = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    drawn = rng.random((experts, width)) * (rng.random((experts, width)) < 0.7)
    drawn[:, 0] += 1e-6
    shares = torch.from_numpy(drawn / drawn.sum(axis=1, keepdims=True))
    counts = torch.from_numpy(rng.integers(0, 10 ** rng.integers(1, 10), experts))
    quotas = whole_quotas(shares, counts)
    assert (quotas >= 0).all() and torch.equal(quotas.sum(dim=1), counts)
    assert ((quotas - shares * counts[:, None]).abs() <= 1 + 1e-6).all()


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_do_not_talk_reach_the_optimum_but_for_a_token_per_replica(seed):
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, layers=2)
    split = (placement.logcnt > 1)[:, None]  # (L, 1, E)
    for layer in range(2):
        demand = random_demand(rng, 4, 12)
        got = dispatched(rng, placement, DeviceLplbChoice, layer, demand)
        counts = demand.sum(dim=0)
        batch = torch.zeros(2, 12, dtype=torch.int64)
        batch[layer] = counts
        best = float(ExactSplit(placement).solve(batch).peak[layer])
        row = placement.phy2log[layer].reshape(4, -1)
        replicas = (split[layer, 0][np.maximum(row, 0)] & (row >= 0)).sum(axis=1)
        loads = got.reshape(4, -1).sum(dim=1).numpy()
        assert (loads <= best + replicas + 1e-6).all()


def test_padding_alone_stays_padding():
    placement = Placement(np.array([[0, 1]]), 2, 2)
    chooser = DeviceLplbChoice(all_tables(placement)[0])
    # Without tokens and without a shared expert there is nothing to solve.
    nothing = torch.zeros(2, 2, dtype=torch.int64)
    assert chooser.choose(0, torch.tensor([[-1]]), nothing).tolist() == [[-1]]
