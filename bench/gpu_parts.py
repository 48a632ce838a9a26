"""Parts of the GPU report that check one mechanism each, and time it.

Each function runs on the device it is given, with small sizes if asked, for about `budget_s`
seconds, and returns lines of Markdown. It raises if a result is wrong.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from evenkeel_moe.adapters.torch.checksum import checksum, device_checksum
from evenkeel_moe.adapters.torch.groups import TRANSFER, Operation, make_communicator
from evenkeel_moe.adapters.torch.streams import OwnStream, is_over, mark_queued
from evenkeel_moe.adapters.torch.transport import TorchWeightTransport
from evenkeel_moe.agent import DeviceRecorder, Phase
from evenkeel_moe.agent.profile.expert_layer import (
    ExpertShape,
    Graphs,
    GroupedLayer,
    even_point,
    waiter,
)
from evenkeel_moe.agent.profile.replica_cost import ReplicaProfile, fit_replica_cost, grid
from evenkeel_moe.agent.profile.timing import time_points
from evenkeel_moe.agent.profile.token_curve import TokenProfile, curve_of, token_counts
from evenkeel_moe.agent.recorder import Recorder
from evenkeel_moe.dispatch import (
    BatchedSplit,
    DeviceLplbChoice,
    DeviceSplit,
    DispatchTables,
    ExactSplit,
    device_split,
)
from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.protocol.messages import Leader, Prepare

_distributed: Any = torch.distributed
TILE = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes and repetitions that a part measures."""

    small: bool
    budget_s: float

    def pick(self, full: int, small: int) -> int:
        """Return the number for this size."""
        return small if self.small else full


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


def _seconds_of(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the median seconds of a call and of the work that it starts on the device."""

    def call(_: int) -> None:
        run()

    return time_points(call, [0], budget_s=budget_s, settle=waiter(device)).seconds[0]


def checksums(device: torch.device, sizes: Sizes) -> list[str]:
    """Hash an expert on the device, and compare with the host."""
    nbytes = sizes.pick(3 * 7168 * 2048, 1 << 18)
    generator = torch.Generator().manual_seed(1)
    expert = torch.randint(0, 256, (nbytes + 3,), generator=generator, dtype=torch.uint8)
    pieces = [expert[: nbytes // 3], expert[nbytes // 3 :]]
    there = [piece.to(device) for piece in pieces]
    if device_checksum(there) != device_checksum(pieces):
        raise AssertionError("the device's checksum is not that of the host")
    seconds = _seconds_of(lambda: device_checksum(there), device, sizes.budget_s)
    return [
        (
            f"An expert of {nbytes / 1e6:.1f} MB is hashed in {_us(seconds)},"
            f" {nbytes / seconds / 1e9:.1f} GB/s. The number equals that of the host."
        )
    ]


def profile(device: torch.device, sizes: Sizes) -> list[str]:
    """Profile the grouped FFN of `evenkeel profile`, by tokens and by replicas."""
    shape = ExpertShape(7168, 2048, 9) if not sizes.small else ExpertShape(64, 32, 4, "float32")
    most = sizes.pick(16384, 512)
    run, settle = GroupedLayer(shape, device), waiter(device)

    def run_tokens(tokens: int) -> None:
        run(even_point(tokens, shape.experts))

    tokens = token_counts(TILE, sizes.pick(2048, 128), most)
    timing = time_points(run_tokens, tokens, budget_s=sizes.budget_s / 2, settle=settle)
    curve = curve_of(TokenProfile(TILE, tuple(tokens), timing))
    points = grid(shape.experts, sizes.pick(1024, 256))
    by_replicas = time_points(run, points, budget_s=sizes.budget_s / 2, settle=settle)
    cost = fit_replica_cost(ReplicaProfile(tuple(points), by_replicas), 0.0)
    shown = [count for count in tokens if count & (count - 1) == 0]
    seconds = dict(zip(tokens, timing.seconds, strict=True))
    return [
        (
            f"Width {shape.d_model}, inner width {shape.d_ffn}, {shape.experts} slots,"
            f" {shape.dtype}; {len(tokens)} token counts in {timing.rounds} rounds."
        ),
        "",
        "| tokens | time |",
        "|---|---|",
        *[f"| {count} | {_us(seconds[count])} |" for count in shown],
        "",
        (
            f"Beyond the last count a token takes {curve.slope_s_per_token * 1e9:.1f} ns. Fit by"
            f" tokens and replicas: {_us(cost.fixed_s)} fixed,"
            f" {cost.s_per_token * 1e9:.1f} ns a token, {_us(cost.s_per_replica)} a replica, at"
            f" least {_us(cost.read_s)} to read one; mean error {cost.fit_error:.1%}."
        ),
    ]


def _spread(layers: int, experts: int, ranks: int, spare: int) -> Placement:
    rng = np.random.default_rng(1)
    rows = [
        rng.permutation(
            np.concatenate([np.arange(experts), rng.choice(experts, spare, replace=False)])
        )
        for _ in range(layers)
    ]
    return Placement(np.array(rows), ranks, experts)


def _timed(run: Callable[[], object], device: torch.device, budget_s: float) -> str:
    """Return the time of a call, and of its CUDA graph on a GPU."""
    eager = _us(_seconds_of(run, device, budget_s / 2))
    if device.type != "cuda":
        return f"{eager}; no CUDA graph on a CPU"
    graphs: Graphs[None] = Graphs(device)

    def replay() -> None:
        graphs.run(lambda _: run(), None)

    return f"{eager}; as a CUDA graph {_us(_seconds_of(replay, device, budget_s / 2))}"


def lplb(device: torch.device, sizes: Sizes) -> list[str]:
    """Solve a batch of every layer on the device, and choose the replicas of one layer."""
    layers, experts = sizes.pick(58, 2), sizes.pick(256, 16)
    ranks, spare, tokens = sizes.pick(32, 4), sizes.pick(32, 4), sizes.pick(4096, 64)
    placement = _spread(layers, experts, ranks, spare)
    rng = np.random.default_rng(2)
    load = torch.from_numpy(np.round(np.exp(rng.normal(4, 1, (layers, experts)))))
    there = load.to(device)
    best = ExactSplit(placement).solve(load).peak.clone()
    solvers: dict[str, DeviceSplit] = {
        "`BatchedSplit`, all layers": BatchedSplit(placement, device),
    }
    kernel = device_split(placement, device)
    if not isinstance(kernel, BatchedSplit):
        first = Placement(placement.phy2log[:1], ranks, experts)
        solvers["`KernelSplit`, all layers in one launch"] = kernel
        solvers["`KernelSplit`, one layer"] = device_split(first, device)
    rows, off = [], 0.0
    for name, solver in solvers.items():
        batch = there[:1] if name.endswith("one layer") else there
        found = solver.solve(batch).peak.cpu()
        off = max(off, float((found / best[: len(found)] - 1).abs().max()))
        if off > 1e-6:
            raise AssertionError(f"{name}: the peak is {off:.1e} from the optimum")
        timed = _timed(partial(solver.solve, batch), device, sizes.budget_s / 4)
        rows.append(f"| {name} | {timed} |")
    if isinstance(kernel, BatchedSplit):
        rows.append("| `KernelSplit` | not run: it needs a GPU with Triton |")
    one = Placement(placement.phy2log[:1], ranks, experts)
    rule = DeviceLplbChoice(DispatchTables.of(one, Topology.single_node(ranks), 0, device))
    chosen = torch.from_numpy(rng.integers(0, experts, (tokens, 8)))
    demand = torch.zeros((ranks, experts), dtype=torch.int64)
    demand[0] = torch.bincount(chosen.reshape(-1), minlength=experts)
    on_device = chosen.to(device), demand.to(device)
    slots = rule.choose(0, *on_device).cpu()
    if not torch.equal(torch.from_numpy(one.phy2log[0].astype(np.int64))[slots], chosen):
        raise AssertionError("a token went to a slot without its expert")
    a_choice = _timed(lambda: rule.choose(0, *on_device), device, sizes.budget_s / 4)
    return [
        (
            f"{layers} layers of {experts} experts, {ranks} ranks, {spare} redundant slots. The"
            f" largest difference to the exact optimum is {off:.1e}."
        ),
        "",
        "| what | time |",
        "|---|---|",
        *rows,
        f"| `DeviceLplbChoice`, one layer of {chosen.numel()} choices | {a_choice} |",
    ]


def communicator(device: torch.device, sizes: Sizes) -> list[str]:
    """Connect one rank with itself, stage a wave, and abort."""
    rows, store = sizes.pick(1 << 22, 1 << 12), _distributed.HashStore()
    slots = [
        (torch.full((rows,), float(slot), device=device), torch.tensor(float(slot), device=device))
        for slot in range(4)
    ]
    transport = TorchWeightTransport(
        rank=0, slots_per_rank=4, staging_bytes=8 * rows + 1024, device=device,
        tensors_of=lambda layer, slot: slots[slot], sample=slots[0],
        connect=lambda serial: make_communicator(
            store, f"{TRANSFER}{serial}", 0, 1, device=device, timeout_s=60.0
        ),
    )  # fmt: skip
    began = time.perf_counter()
    transport.rebuild(0)
    connect_s = time.perf_counter() - began
    prepare = _prepare(rows * 4 + 4, checksum(slots[2]))
    transport.fence()
    began = time.perf_counter()
    outcome = transport.stage(prepare, threading.Event(), lambda done, total: None)
    stage_s = time.perf_counter() - began
    if not outcome.ok or not torch.equal(transport.staged[0, 3][0], slots[2][0]):
        raise AssertionError(f"staging failed: {outcome}")
    own = make_communicator(store, f"{TRANSFER}own", 0, 1, device=device, timeout_s=60.0)
    lines = []
    if device.type == "cuda":  # Gloo has no exchange with oneself.
        lines.append(f"Send to itself through NCCL: {_self_exchange(own, slots[1][0], sizes)}.")
    if float(own.all_gather(slots[1][1])[0]) != 1.0:
        raise AssertionError("all_gather returned another value")
    began = time.perf_counter()
    own.abort()
    transport.abort()
    abort_s = time.perf_counter() - began
    backend = "NCCL" if device.type == "cuda" else "Gloo"
    return [
        (
            f"{backend}, one rank: connected and warmed up in {connect_s * 1e3:.0f} ms; one expert"
            f" of {rows * 4 / 1e6:.1f} MB copied, checked and staged in {stage_s * 1e3:.1f} ms;"
            f" aborting two communicators returned in {abort_s * 1e3:.1f} ms."
        ),
        *lines,
    ]


def _self_exchange(own: Any, value: Tensor, sizes: Sizes) -> str:
    received = torch.zeros_like(value)

    def exchange() -> None:
        operations = [Operation(value, 0, sends=True), Operation(received, 0, sends=False)]
        for work in own.start_exchange(operations, 0):
            work.wait(timedelta(seconds=30))

    seconds = _seconds_of(exchange, value.device, sizes.budget_s / 2)
    if not torch.equal(value, received):
        raise AssertionError("other bytes arrived")
    return f"{_us(seconds)}, {value.nbytes / seconds / 1e9:.1f} GB/s"


def _prepare(nbytes: int, expected: int) -> Prepare:
    wave = Wave(0, (0,), np.array([[0, 1, 2, 2]], np.int32), ((Transfer(0, 2, 2, 3, nbytes),),))
    key = WaveKey(Generation("gpu-report"), PlanId("copy"), 0, 1)
    return Prepare(
        Leader("gpu-report", 1), key, Epoch(0), wave, checksums=(expected,), batch_deadline_s=30.0
    )


def streams(device: torch.device, sizes: Sizes) -> list[str]:
    """Read on our stream what another stream has still to write; wait for an event."""
    if device.type != "cuda":
        with OwnStream(device).after(mark_queued(device)):
            pass
        return ["A CPU has no streams: only the calls ran."]
    engine, ours = torch.cuda.Stream(device), OwnStream(device)  # type: ignore[no-untyped-call]
    side = sizes.pick(8192, 512)
    matrix = torch.randn(side, side, device=device)
    slot, new = torch.zeros(1 << 20, device=device), torch.ones(1 << 20, device=device)
    want = device_checksum([new])
    with ours.after(None):
        own = torch.cuda.current_stream(device).cuda_stream
    handed_out = {
        torch.cuda.Stream(device).cuda_stream  # type: ignore[no-untyped-call]
        for _ in range(64)
    }
    torch.cuda.synchronize(device)
    with torch.cuda.stream(engine):
        for _ in range(20):
            matrix @ matrix
        slot.copy_(new)
        copied = mark_queued(device)
    busy = not copied.query()
    with ours.after(copied):
        found = device_checksum([slot])
    for _ in range(20):
        matrix @ matrix
    event = mark_queued(device)
    late = not is_over(event, time.monotonic())
    if found != want or own in handed_out or not is_over(event, time.monotonic() + 60):
        raise AssertionError(f"checksum {found} for {want}, our stream {own} of {handed_out}")
    return [
        (
            f"Our stream is none of the {len(handed_out)} that torch hands out. A checksum on it"
            f" waited for copies that another stream had queued ({'pending' if busy else 'over'}"
            f" when it was asked for). An event in a busy stream was {'not ' if late else ''}over"
            " at a deadline that had passed, and over later."
        ),
    ]


def counts(device: torch.device, sizes: Sizes) -> list[str]:
    """Record counts of many steps, by `DeviceRecorder` and by a copy that waits."""
    layers, experts, steps = sizes.pick(58, 4), sizes.pick(256, 16), sizes.pick(500, 40)
    side = sizes.pick(4096, 64)
    matrix = torch.randn(side, side, device=device)
    counted = torch.zeros((layers, experts), dtype=torch.int64, device=device)
    kept = Recorder(2 * steps, layers, experts)

    def record(step: int, counts: Any, *, epoch: int, tokens: int, phase: Phase,
               dummy: bool = False, compute_s: float | None = None) -> None:  # fmt: skip
        kept.record(step, counts, epoch, tokens, phase, dummy, compute_s)

    recorder = DeviceRecorder(record, experts)
    taken: dict[str, float] = {}
    for way in ("waits", "recorder"):
        settle = waiter(device)
        spent = 0.0
        for step in range(steps):
            settle()  # An engine waits for each step; the host must not run ahead of the device.
            matrix @ matrix
            counted.fill_(step)
            began = time.perf_counter()
            if way == "waits":
                counted.cpu().numpy()
            else:
                recorder.record(step, counted, epoch=0, tokens=1, phase=Phase.DECODE)
            spent += time.perf_counter() - began
        taken[way] = spent / steps
    recorder.finish()
    found = kept.take(2 * steps)
    if found is None or found.counts[:, 0, 0].tolist() != list(range(steps)):
        raise AssertionError("a step was lost or has the counts of another")
    return [
        (
            f"{steps} steps of {layers} layers and {experts} experts: the engine's thread spends"
            f" {_us(taken['recorder'])} a step in `DeviceRecorder`, and {_us(taken['waits'])} if it"
            " copies the counts and waits. Every step arrived, in order."
        ),
    ]
