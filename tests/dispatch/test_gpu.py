"""Dispatch on a GPU gives the same results and never stops the stream."""

import numpy as np
import pytest
import torch

from evenkeel_moe.dispatch import (
    BatchedSplit,
    DeviceLplbChoice,
    DispatchTables,
    EvenChoice,
    ExactSplit,
    FewestChoice,
    NearestChoice,
    Waterfill,
    count_choices,
    device_split,
)
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device here: GPU dispatch is not run"
    ),
]

LAYERS, EXPERTS, RANKS, REDUNDANT, TOP_K = 58, 256, 32, 32, 8


@pytest.fixture(scope="module")
def production():
    rng = np.random.default_rng(1)
    rows = [
        rng.permutation(
            np.concatenate([np.arange(EXPERTS), rng.choice(EXPERTS, REDUNDANT, replace=False)])
        )
        for _ in range(LAYERS)
    ]
    placement = Placement(np.array(rows), RANKS, EXPERTS)
    counts = torch.from_numpy(np.round(np.exp(rng.normal(4, 1, (LAYERS, EXPERTS)))))
    experts = torch.from_numpy(rng.integers(0, EXPERTS, (4096, TOP_K)))
    return placement, counts, experts


def captured(run):
    """Run once to warm up, then as a graph: capture fails on any host sync."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = run()
    graph.replay()
    torch.cuda.synchronize()
    return graph, answer


def microseconds(graph, repeats=50):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1000


@pytest.mark.parametrize("rule", ["even", "nearest"])
def test_replica_choice_is_captured_and_equals_the_cpu(production, rule):
    placement, _, experts = production
    topology = Topology.single_node(RANKS)

    def make(device):
        tables = DispatchTables.of(placement, topology, 3, device)
        return {"even": EvenChoice, "nearest": NearestChoice}[rule](tables)

    on_device = experts.cuda()
    chooser = make("cuda")
    graph, answer = captured(lambda: chooser.choose(7, on_device))
    assert torch.equal(answer.cpu(), make("cpu").choose(7, experts))
    print(f"{rule}: {microseconds(graph):.1f} us for {experts.numel()} choices")


def test_the_fewest_active_experts_have_a_table_on_the_device(production):
    placement, counts, experts = production
    demand = torch.zeros((RANKS, EXPERTS), dtype=torch.int64)
    demand[0] = count_choices(experts, EXPERTS)
    demand[1] = (counts[7] % 3).to(torch.int64)
    chosen = {}
    for device in ("cpu", "cuda"):
        tables = DispatchTables.of(placement, Topology.single_node(RANKS), 0, device)
        rule = FewestChoice(tables)
        table = rule.table(7, demand.sum(dim=0).to(device))
        assert table.device.type == device
        slots = rule.choose(7, experts.to(device), demand.to(device))
        assert torch.equal(slots, table[experts.to(device)])
        chosen[device] = slots.cpu()
    assert torch.equal(chosen["cpu"], chosen["cuda"])


def test_counting_and_waterfill_are_captured_and_equal_the_cpu(production):
    placement, _, experts = production
    per_rank = placement.slots_per_rank
    slots = EvenChoice(DispatchTables.of(placement, Topology.single_node(RANKS), 3)).choose(
        0, experts
    )
    rule = Waterfill(RANKS, per_rank, 3)

    def run(device_slots, device_experts):
        score, number = rule.static_score(device_slots)
        return rule.choose(device_slots, score, number), count_choices(device_experts, EXPERTS)

    want = run(slots, experts)
    on_device = slots.cuda(), experts.cuda()
    graph, (chosen, counted) = captured(lambda: run(*on_device))
    assert torch.equal(chosen.cpu(), want[0])
    assert torch.equal(counted.cpu(), want[1])
    print(f"waterfill: {microseconds(graph):.1f} us for {len(slots)} tokens")


def test_interior_point_is_captured_and_exact(production):
    placement, counts, _ = production
    solver = BatchedSplit(placement, "cuda")
    on_device = counts.cuda()
    graph, answer = captured(lambda: solver.solve(on_device))
    want = ExactSplit(placement).solve(counts).peak
    assert torch.allclose(answer.peak.cpu(), want, rtol=1e-6)
    print(f"LPLB: {microseconds(graph) / LAYERS:.1f} us per layer, {LAYERS} layers a batch")


def test_the_kernel_of_lplb_is_captured_and_exact(production):
    lplb_kernel = pytest.importorskip(
        "evenkeel_moe.dispatch.lplb_kernel", reason="Triton is not installed"
    )
    placement, counts, _ = production
    solver = device_split(placement, torch.device("cuda"))
    assert isinstance(solver, lplb_kernel.KernelSplit)
    on_device = counts.cuda()
    graph, answer = captured(lambda: solver.solve(on_device))
    want = ExactSplit(placement).solve(counts).peak
    assert torch.allclose(answer.peak.cpu(), want, rtol=1e-6)
    shares = answer.probabilities.sum(dim=2).cpu()
    assert torch.allclose(shares, torch.ones_like(shares))
    print(f"LPLB in one kernel: {microseconds(graph):.1f} us for {LAYERS} layers")
    one = Placement(placement.phy2log[:1], RANKS, EXPERTS)
    alone = device_split(one, torch.device("cuda"))
    graph, answer = captured(lambda: alone.solve(on_device[:1]))
    assert torch.allclose(answer.peak.cpu(), want[:1], rtol=1e-6)
    print(f"LPLB in one kernel: {microseconds(graph):.1f} us for one layer")


def test_lplb_as_a_choice_is_captured_and_lands_where_the_experts_are(production):
    placement, counts, experts = production
    demand = torch.zeros((RANKS, EXPERTS), dtype=torch.int64)
    demand[3] = count_choices(experts, EXPERTS)
    demand[1] = (counts[0] % 97).to(torch.int64)
    one = Placement(placement.phy2log[:1], RANKS, EXPERTS)
    chooser = DeviceLplbChoice(DispatchTables.of(one, Topology.single_node(RANKS), 3, "cuda"))
    on_device = experts.cuda(), demand.cuda()
    graph, answer = captured(lambda: chooser.choose(0, *on_device))
    held = torch.from_numpy(one.phy2log[0].astype(np.int64))
    assert torch.equal(held[answer.cpu()], experts)
    print(f"LPLB as a choice: {microseconds(graph):.1f} us per layer")
