"""Tests that need a GPU: copies over NCCL, the speed of checksums, and a profile.

Measured values are printed.
"""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from evenkeel_moe.adapters.torch.checksum import device_checksum
from evenkeel_moe.adapters.torch.groups import make_communicator
from evenkeel_moe.adapters.torch.nvml_clock import NvmlClock
from evenkeel_moe.adapters.torch.streams import OwnStream, is_over, mark_queued
from evenkeel_moe.adapters.torch.transport import TorchWeightTransport
from evenkeel_moe.agent.profile.expert_layer import (
    ExpertShape,
    Graphs,
    GroupedLayer,
    GroupedProduct,
    Point,
)
from evenkeel_moe.agent.profile.timing import time_points
from evenkeel_moe.agent.profile.token_curve import TokenProfile, curve_of, token_counts
from evenkeel_moe.model.placement import Placement
from examples.qwen3moe.ep_model import Table, Tables
from tests.agent.ranks import Group, ToyWeights, prepare_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device here: GPU copies are not run"
    ),
]
DEEPSEEK_V3 = ExpertShape(d_model=7168, d_ffn=2048, experts=9)
TILE = 64


class DeviceWeights(ToyWeights):
    """The toy experts on a GPU."""

    def __init__(self, placement, rank, device):
        super().__init__(placement, rank)
        self.slots = {
            key: tuple(t.to(device) for t in tensors) for key, tensors in self.slots.items()
        }


def test_nccl_stages_what_the_wave_says_on_one_rank():
    """One GPU is one rank: NCCL connects it with itself, and the copies stay on the device."""
    device = torch.device("cuda", 0)
    old = Placement(np.array([[0, 1, 2, 0]], np.int32), 1, 3)
    new = Placement(np.array([[0, 1, 2, 2]], np.int32), 1, 3)
    weights, group = DeviceWeights(old, 0, device), Group(1)
    transport = TorchWeightTransport(
        rank=0, slots_per_rank=4, staging_bytes=1 << 20, tensors_of=weights.tensors,
        sample=weights.tensors(0, 0), device=device,
        connect=lambda serial: make_communicator(
            group.store, f"transfer-{serial}", 0, 1, device=device, timeout_s=60.0
        ),
    )  # fmt: skip
    transport.rebuild(0)
    for layer, local in weights.slots:  # what a swap writes just before
        for tensor in weights.tensors(layer, local):
            tensor.mul_(1)
    transport.fence()
    # Checksums of a group on devices are the devices' own.
    sums = tuple(
        device_checksum(weights.tensors(0, t.src_slot))
        for t in prepare_for(old, new).body.transfers
    )
    outcome = transport.stage(
        prepare_for(old, new, checksums=sums), threading.Event(), lambda done, total: None
    )
    assert outcome.ok, outcome
    staged = transport.staged[0, 3]
    assert all(torch.equal(a, b) for a, b in zip(staged, weights.tensors(0, 2), strict=True))
    transport.abort()


def threads_named(name):
    tasks = Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text().strip() == name for task in tasks)


def test_the_transfer_group_has_no_watchdog_and_other_groups_have_one():
    """Torch's watchdog would end the process when a peer fails."""
    device, group = torch.device("cuda", 0), Group(1)
    watchdogs = threads_named("pt_nccl_watchdg")
    ours = make_communicator(group.store, "transfer-0", 0, 1, device=device, timeout_s=60.0)
    assert ours.all_gather(torch.ones(1, device=device)).item() == 1
    assert threads_named("pt_nccl_watchdg") == watchdogs
    other = make_communicator(group.store, "exchange", 0, 1, device=device, timeout_s=60.0)
    other.all_gather(torch.ones(1, device=device))
    assert threads_named("pt_nccl_watchdg") == watchdogs + 1
    ours.abort()
    other.abort()


def test_our_stream_is_none_of_those_that_torch_hands_out():
    device = torch.device("cuda", 0)
    with OwnStream(device).after(None):
        ours = torch.cuda.current_stream(device).cuda_stream
    handed_out = {torch.cuda.Stream(device).cuda_stream for _ in range(64)}
    assert ours not in handed_out and ours != torch.cuda.default_stream(device).cuda_stream


def test_what_is_read_on_our_stream_is_read_after_copies_that_are_still_queued():
    """SGLang's copies are pending when the checksums of a chunk are asked for."""
    device = torch.device("cuda", 0)
    engine, ours = torch.cuda.Stream(device), OwnStream(device)
    matrix = torch.randn(8192, 8192, device=device)
    slot, new = torch.zeros(1 << 20, device=device), torch.ones(1 << 20, device=device)
    want = device_checksum([new])
    torch.cuda.synchronize()
    with torch.cuda.stream(engine):
        for _ in range(20):
            matrix @ matrix
        slot.copy_(new)
        copied = mark_queued(device)
    with ours.after(copied):
        assert device_checksum([slot]) == want


def test_an_event_in_a_busy_stream_is_not_over_at_its_deadline():
    matrix = torch.randn(8192, 8192, device="cuda")
    for _ in range(50):
        matrix @ matrix
    event = torch.cuda.Event()
    event.record()
    assert not is_over(event, time.monotonic())
    assert is_over(event, time.monotonic() + 60)


def test_checksums_run_at_the_speed_of_memory(capsys):
    expert = [torch.randint(0, 255, (44 << 20,), dtype=torch.uint8, device="cuda")]
    device_checksum(expert)
    began = time.perf_counter()
    for _ in range(20):
        device_checksum(expert)
    bytes_per_s = 20 * expert[0].numel() / (time.perf_counter() - began)
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}: device checksum {bytes_per_s / 1e9:.0f} GB/s")
    assert bytes_per_s > 0


def test_a_profile_at_the_shape_of_deepseek_v3(capsys):
    """Print the stairs, the time taken, and the error of the curve between measured points."""
    layer, settle = GroupedLayer(DEEPSEEK_V3, torch.device("cuda", 0)), torch.cuda.synchronize

    def run(tokens: int) -> None:
        layer(Point(-(-tokens // DEEPSEEK_V3.experts), DEEPSEEK_V3.experts))

    counts = token_counts(TILE, 2048, 16384)
    timing = time_points(run, counts, budget_s=60, settle=settle)
    curve = curve_of(TokenProfile(TILE, tuple(counts), timing))
    between = [count for count in range(2048 + TILE, 16384, 1024 + TILE) if count not in counts]
    asked = time_points(run, between, budget_s=30, settle=settle)
    drawn = np.interp(between, np.arange(1, len(curve.tile_seconds) + 1) * TILE, curve.tile_seconds)
    errors = np.abs(drawn / np.array(asked.seconds) - 1)
    with capsys.disabled():
        print(
            f"\n{torch.cuda.get_device_name()}: {len(counts)} counts,"
            f" {timing.rounds} rounds, {timing.took_s:.0f} s"
        )
        for tokens, seconds in zip(counts, timing.seconds, strict=True):
            print(f"  {tokens:6} tokens {seconds * 1e6:9.1f} us")
        print(f"  interpolation error: median {np.median(errors):.2%}, worst {errors.max():.2%}")
    assert (np.diff(curve.tile_seconds) >= 0).all() and curve.slope_s_per_token > 0
    assert timing.took_s < 120


def test_a_captured_graph_follows_tables_that_are_installed_in_place():
    """A graph reads the addresses that it was captured with."""
    old = Placement(np.array([[0, 1, 2, 0]], np.int32), 1, 3)
    new = Placement(np.array([[2, 1, 0, 1]], np.int32), 1, 3)
    tables = Tables(old)
    tables.layers = [Table(one.slots.cuda(), one.replicas.cuda()) for one in tables.layers]
    seen = torch.empty_like(tables.layers[0].slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen.copy_(tables.layers[0].slots)
    graph.replay()
    assert torch.equal(seen.cpu(), Tables(old).layers[0].slots)
    tables.install(tables.build([0], new.phy2log, 1))
    graph.replay()
    assert torch.equal(seen.cpu(), Tables(new).layers[0].slots)


def test_nvml_tells_the_clock_of_a_busy_device(capsys):
    """An idle device tells none; under matrix products the ratio is above 0."""
    device = torch.device("cuda", 0)
    clock = NvmlClock(str(torch.cuda.get_device_properties(device).uuid))
    rows = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    until, found = time.perf_counter() + 5, None
    while time.perf_counter() < until and found is None:
        for _ in range(20):
            rows @ rows
        found = clock.read()
        torch.cuda.synchronize()
    assert found is not None
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}: {found}")
    assert 0 < found.ratio <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_grouped_products_are_those_of_each_replicas_weights(dtype):
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(15, 256, generator=generator, device=device).to(dtype)
    weights = torch.randn(3, 128, 256, generator=generator, device=device).to(dtype).mT
    ends = [4, 4, 15]
    found = GroupedProduct(dtype, device)(
        rows, weights, torch.tensor(ends, dtype=torch.int32, device=device)
    )
    wanted = torch.cat(
        [
            rows[first:end].float() @ one.float()
            for first, end, one in zip([0, *ends], ends, weights, strict=False)
        ]
    )
    assert found.shape == (15, 128) and found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), wanted, rtol=0.02, atol=0.3)


def test_a_replayed_layer_computes_with_the_weights_whose_turn_it_is():
    """A graph is captured for each turn, and graphs that share memory do not spoil each other."""
    seen, kept = torch.zeros(4, device="cuda"), torch.arange(4.0, device="cuda")
    graphs = Graphs(torch.device("cuda", 0))
    for _ in range(3):
        for n in range(4):
            graphs.run(lambda n: seen[n].add_(kept[n] + 1), n)
    torch.cuda.synchronize()
    # The call that captures computes once more, before it.
    assert seen.tolist() == [4, 8, 12, 16]
