"""The part of the GPU report that measures what an expert's tokens and weights cost.

A replica with n tokens takes `start + max(read, per_token * n)` seconds. Each coefficient is
measured, and derived from the data sheet of the device as the controller derives it. The share that
reading has in a batch is k: the tokens whose computation takes as long as reading one expert, over
the mean tokens of an expert.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu_parts import Sizes
from evenkeel_moe.agent.profile.expert_layer import ExpertShape, GroupedLayer, Point, waiter
from evenkeel_moe.agent.profile.replica_cost import ReplicaProfile, fit_replica_cost, grid
from evenkeel_moe.agent.profile.timing import Timing, time_points
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem.derived_cost import derived_cost
from evenkeel_moe.wire.link import ReplicaCost

RAW = Path(__file__).parent / "out" / "gpu_costs.json"


class ModelExperts(NamedTuple):
    """The routed experts of a model, from its published configuration."""

    d_model: int
    """Width of what an expert reads; Kimi-K3's experts work on a projection of half the width."""
    d_ffn: int
    top_k: int
    experts: int

    @property
    def ranks(self) -> int:
        """Ranks that hold eight experts each, and one redundant slot."""
        return self.experts // 8


MODELS = {
    "DeepSeek-V3": ModelExperts(7168, 2048, 8, 256),
    "Qwen3-235B-A22B": ModelExperts(4096, 1536, 8, 128),
    "Kimi-K3": ModelExperts(3584, 3072, 16, 896),
}
SLOTS = 9
TYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
BATCHES = (32, 64, 128, 256, 512)
"""Tokens of a rank in one step."""


class Found(NamedTuple):
    """What was measured and derived for the experts of one model in one number type."""

    cost: ReplicaCost
    timing: Timing
    points: list[Point]
    derived_s_per_token: float
    derived_read_s: float

    @property
    def read_s(self) -> float:
        """Seconds that a replica takes before its tokens count."""
        return self.cost.s_per_replica + self.cost.read_s

    @property
    def read_tokens(self) -> tuple[float, float]:
        """Tokens that take as long as reading one expert: measured, derived."""
        return (
            self.read_s / self.cost.s_per_token,
            self.derived_read_s / self.derived_s_per_token,
        )


def measured_cost(
    shape: ExpertShape, device: torch.device, *, max_tokens: int, budget_s: float
) -> tuple[ReplicaCost, list[Point], Timing]:
    """Return the fit of a layer on a device, the points that it was fitted to, and their times."""
    points = grid(shape.experts, max_tokens)
    run = GroupedLayer(shape, device)
    timing = time_points(run, points, budget_s=budget_s, settle=waiter(device))
    return fit_replica_cost(ReplicaProfile(tuple(points), timing), 0.0), points, timing


def _derived(model: ModelExperts, name: str, kind: str) -> tuple[float, float]:
    """Return the seconds of a token, and of reading one expert, from the table of devices."""
    nbytes = 3 * model.d_model * model.d_ffn * (2 if kind == "bf16" else 1)
    shape = ModelShape(1, model.experts, model.ranks, SLOTS, model.top_k, nbytes)
    cost = derived_cost(shape, name, kind)
    assert cost.curves is not None
    s_per_token = float(cost.curves.slope_s_per_token[0])
    return s_per_token, cost.replica.read_tokens * s_per_token


def costs(device: torch.device, sizes: Sizes) -> list[str]:
    """Measure two models in two number types; on a CPU one small layer."""
    on_gpu = device.type == "cuda"
    # A CPU is not in the table of devices: what is derived for it is that of another device.
    name = torch.cuda.get_device_name(device) if on_gpu else "h200"
    kinds = TYPES if on_gpu else {"bf16": "bfloat16"}
    models = dict(list(MODELS.items())[: sizes.pick(2, 1)])
    found: dict[tuple[str, str], Found] = {}
    for model_name, model in models.items():
        for kind, dtype in kinds.items():
            width = (model.d_model, model.d_ffn) if not sizes.small else (64, 32)
            fit = measured_cost(
                ExpertShape(*width, SLOTS, dtype),
                device,
                max_tokens=sizes.pick(8192, 256),
                budget_s=sizes.budget_s / (len(models) * len(kinds)),
            )
            cost, points, timing = fit
            found[model_name, kind] = Found(cost, timing, points, *_derived(model, name, kind))
    if not sizes.small:
        _save(found)
    return [*_coefficients(found), "", *_shares(found), "", *_times(found)]


def _coefficients(found: dict[tuple[str, str], Found]) -> list[str]:
    lines = [
        (
            f"{SLOTS} slots a rank. Reading is what a replica takes before its tokens count."
            " Derived: from the table of devices, as the controller does where no rank was"
            " profiled."
        ),
        "",
        (
            "| experts of | type | fixed | a token | derived | reading one expert | derived |"
            " worth tokens | derived | mean error |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, kind), one in found.items():
        worth, derived = one.read_tokens
        lines.append(
            f"| {model} | {kind} | {one.cost.fixed_s * 1e6:.1f} us"
            f" | {one.cost.s_per_token * 1e9:.1f} ns | {one.derived_s_per_token * 1e9:.1f} ns"
            f" | {one.read_s * 1e6:.1f} us | {one.derived_read_s * 1e6:.1f} us"
            f" | {worth:.0f} | {derived:.0f} | {one.cost.fit_error:.1%} |"
        )
    return lines


def _shares(found: dict[tuple[str, str], Found]) -> list[str]:
    batches = " | ".join(f"{batch} tokens a rank" for batch in BATCHES)
    lines = [
        (
            "k is the tokens that reading one expert is worth, over the mean tokens of an expert."
            " Each rank has eight experts, so an expert has"
            " `tokens of a rank * top_k / 8` tokens in the mean. In brackets: derived."
        ),
        "",
        f"| experts of | type | {batches} |",
        f"|---|---|{'---|' * len(BATCHES)}",
    ]
    for (name, kind), one in found.items():
        model = MODELS[name]
        each = [batch * model.ranks * model.top_k / model.experts for batch in BATCHES]
        worth, derived = one.read_tokens
        shown = " | ".join(f"{worth / mean:.2f} ({derived / mean:.2f})" for mean in each)
        lines.append(f"| {name} | {kind} | {shown} |")
    return lines


def _times(found: dict[tuple[str, str], Found]) -> list[str]:
    names = " | ".join(f"{model}, {kind}" for model, kind in found)
    points = next(iter(found.values())).points
    full = [point for point in points if point.active == SLOTS]
    lines = [
        f"The time of a layer whose {SLOTS} replicas have the same number of tokens:",
        "",
        f"| tokens of each | {names} |",
        f"|---|{'---|' * len(found)}",
    ]
    for point in full:
        seconds = [one.timing.seconds[one.points.index(point)] for one in found.values()]
        shown = " | ".join(f"{value * 1e6:,.1f} us" for value in seconds)
        lines.append(f"| {point.tokens} | {shown} |")
    return lines


def _save(found: dict[tuple[str, str], Found]) -> None:
    """Write every measured time, to fit it in another way."""
    rows = {
        f"{model} {kind}": [
            [point.tokens, point.active, seconds]
            for point, seconds in zip(one.points, one.timing.seconds, strict=True)
        ]
        for (model, kind), one in found.items()
    }
    RAW.parent.mkdir(exist_ok=True)
    RAW.write_text(json.dumps(rows, indent=1), "utf-8")
