"""The measurements of `evenkeel profile`. Needs torch, so the command imports it when it runs."""

from pathlib import Path

import torch

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.agent.profile.expert_layer import ExpertShape, GroupedLayer, even_point, waiter
from evenkeel_moe.agent.profile.files import save_curve
from evenkeel_moe.agent.profile.replica_cost import ReplicaProfile, fit_replica_cost, grid
from evenkeel_moe.agent.profile.timing import Timing, time_points
from evenkeel_moe.agent.profile.token_curve import TokenProfile, token_counts
from evenkeel_moe.cli.options import MeasuredRange
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.wire.link import ReplicaCost


def device_names() -> list[str]:
    """Return every GPU of this machine, or the CPU if there is none."""
    return [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]


def profile_device(
    name: str, folder: Path, layer: tuple[int, int, int, str], measured: MeasuredRange
) -> list[str]:
    """Measure one device, save what was found, and return lines that describe it.

    Args:
        name: as torch names devices.
        folder: for the file of the device.
        layer: width of the model, inner width of an expert, slots of a rank, number type.
        measured: the token counts, and the seconds: half of them for the time by tokens, half for
            the time by replicas.

    Raises:
        InvalidInput: there is no such device, or it does not compute such a layer.
    """
    shape = ExpertShape(*layer)
    counts = token_counts(measured.tile, measured.dense_tokens, measured.max_tokens)
    budget_s = measured.budget_s / 2
    try:
        device = torch.device(name)
        on_gpu = device.type == "cuda"
        uuid = str(torch.cuda.get_device_properties(device).uuid) if on_gpu else ""
        run = GroupedLayer(shape, device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(f"{name}: {str(error)[:200]}") from error

    def run_tokens(tokens: int) -> None:
        run(even_point(tokens, shape.experts))

    timing = time_points(run_tokens, counts, budget_s=budget_s, settle=waiter(device))
    by_tokens = TokenProfile(measured.tile, tuple(counts), timing)
    cost: ReplicaCost | None = None
    by_replicas: ReplicaProfile | None = None
    try:
        points = grid(shape.experts, measured.max_tokens)
        timed = time_points(run, points, budget_s=budget_s, settle=waiter(device))
        by_replicas = ReplicaProfile(tuple(points), timed)
        cost = fit_replica_cost(by_replicas, SystemClock().unix())
        words = _describe(cost, timed)
    except InvalidInput as error:
        words = f"no time by replicas: {error}"
    about = dict(zip(("d_model", "d_ffn", "experts", "dtype"), layer, strict=True))
    path = save_curve(folder, uuid, by_tokens, {**about, "device": name}, cost, by_replicas)
    by_counts = (
        f"{len(counts)} counts up to {counts[-1]} tokens, {timing.rounds} rounds in"
        f" {timing.took_s:.0f} s; {timing.seconds[0] * 1e3:.3f} ms at {counts[0]} tokens,"
        f" {timing.seconds[-1] * 1e3:.3f} ms at {counts[-1]}"
    )
    return [f"{path}: {by_counts}", f"{path}: {words}"]


def _describe(cost: ReplicaCost, timing: Timing) -> str:
    return (
        f"{len(timing.seconds)} points of tokens and replicas, {timing.rounds} rounds in"
        f" {timing.took_s:.0f} s; fixed {cost.fixed_s * 1e6:.1f} us,"
        f" {cost.s_per_token * 1e6:.4f} us per token, {cost.s_per_replica * 1e6:.2f} us per"
        f" replica, at least {cost.read_s * 1e6:.2f} us to read one; mean error"
        f" {cost.fit_error:.1%}"
    )
