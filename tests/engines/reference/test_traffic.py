"""Traffic: real text with an uneven load that shifts, and routing from traces."""

from typing import Any

import numpy as np
import pytest
import torch

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.model import Model, original_expert
from evenkeel_moe.engines.reference.rank import with_trace_sizes
from evenkeel_moe.engines.reference.traffic import RecordedTraffic, TextTraffic, read_trace
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.policies.eplb import plan_eplb
from evenkeel_moe.planning.problem.metrics import balancedness_mean, rank_load
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

CPU = torch.device("cpu")
STEPS, SHIFT = 16, 8


@pytest.fixture(scope="module")
def loads():
    """The shape, and (STEPS, L, E) tokens, of the default run: prose, and code from SHIFT on."""
    config = RankConfig(run_folder="unused")
    model = Model.build(
        seed=config.seed, layers=config.layers, experts=config.experts, top_k=config.top_k,
        d_model=config.d_model, d_ffn=config.d_ffn, device=CPU,
    )  # fmt: skip
    experts = [
        [
            original_expert(config.seed, layer, e, config.d_model, config.d_ffn)
            for e in range(config.experts)
        ]
        for layer in range(config.layers)
    ]
    traffic = TextTraffic(model, config.num_ranks, config.tokens_per_step, SHIFT)
    counts = np.zeros((STEPS, config.layers, config.experts))
    for step in range(STEPS):
        for rank in range(config.num_ranks):
            x = model.embed(traffic.tokens(step, rank))
            for layer in range(config.layers):
                chosen = traffic.route(step, rank, layer, x)
                counts[step, layer] += np.bincount(chosen.reshape(-1), minlength=config.experts)
                x = model.next_layer(
                    layer, x, model.undistributed(layer, x, chosen, experts[layer])
                )
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
    unused_model: Any = None
    traffic = TextTraffic(unused_model, 4, 100, 5)
    pieces = [
        traffic.tokens(step, rank).numpy().tobytes() for step in range(3) for rank in range(4)
    ]
    assert len(set(pieces)) == 12
    assert [traffic.domain(step) for step in (0, 4, 5)] == ["prose", "prose", "code"]
    assert TextTraffic(unused_model, 4, 100, 0).domain(10**6) == "prose"
    assert len(traffic.tokens(10**7, 3)) == 100


def test_the_text_can_change_back_and_forth():
    unused_model: Any = None
    traffic = TextTraffic(unused_model, 4, 100, 3, shift_back=True)
    assert [traffic.domain(step)[0] for step in range(10)] == list("pppcccpppc")


def test_recorded_ids_are_used_in_order_and_from_the_start_again(tmp_path):
    ids = np.arange(6 * 2 * 3).reshape(6, 2, 3) % 5
    path = tmp_path / "ids.npz"
    np.savez(path, ids=ids.astype(np.uint8))
    read, counts, top_k = read_trace(str(path))
    assert read is not None and counts is None and top_k == 3
    np.testing.assert_array_equal(read, ids)
    traffic = RecordedTraffic(2, 2, 3, 0, read, None)
    x = torch.zeros(2, 4)
    assert (traffic.route(0, 1, 1, x).numpy() == ids[2:4, 1]).all()
    assert (traffic.route(1, 1, 0, x).numpy() == ids[[0, 1], 0]).all()
    assert traffic.domain(3) == "trace" and traffic.tokens(0, 0).max() < 4096


def test_counts_are_drawn_without_replacement_in_their_proportion(tmp_path):
    counts = np.zeros((2, 1, 6))
    counts[0, 0] = [400, 200, 100, 50, 0, 0]
    counts[1, 0] = [0, 0, 10, 10, 10, 10]
    path = tmp_path / "counts.npz"
    np.savez(path, T=counts.astype(np.uint16), topk=np.int32(2))
    _, law, top_k = read_trace(str(path))
    traffic = RecordedTraffic(1, 4000, top_k, 1, None, law)
    first = traffic.route(0, 0, 0, torch.zeros(4000, 4)).numpy()
    assert (first[:, 0] != first[:, 1]).all()
    drawn = np.bincount(first.reshape(-1), minlength=6)
    assert (np.diff(drawn[:4]) < 0).all() and (drawn[4:] == 0).all()
    assert abs(np.bincount(first[:, 0], minlength=6)[0] / 4000 - 400 / 750) < 0.03
    again = traffic.route(0, 0, 0, torch.zeros(4000, 4)).numpy()
    assert (first == again).all()
    assert (
        np.bincount(traffic.route(3, 0, 0, torch.zeros(4000, 4)).reshape(-1), minlength=6)[:2] == 0
    ).all()


def test_a_trace_sets_the_sizes_of_the_model(tmp_path):
    path = tmp_path / "ids.npz"
    np.savez(path, ids=np.full((10, 3, 2), 21, np.uint8))
    config = with_trace_sizes(RankConfig(run_folder="unused", trace=str(path)))
    assert (config.layers, config.experts, config.top_k) == (3, 24, 2)
    assert isinstance(config.shape, ModelShape) and config.pool_slots_per_layer == 7


@pytest.mark.parametrize(
    "arrays", [{"other": np.zeros(3)}, {"ids": np.zeros((3, 2))}, {"T": np.zeros((1, 2, 3))}]
)
def test_files_without_routing_are_refused(tmp_path, arrays):
    path = tmp_path / "odd.npz"
    np.savez(path, **arrays)
    with pytest.raises(InvalidInput):
        read_trace(str(path))
