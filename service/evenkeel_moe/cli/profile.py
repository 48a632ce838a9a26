"""`evenkeel profile`: measure the devices of this machine before an engine uses them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli.client import CliError, Exit
from evenkeel_moe.cli.options import with_option_groups
from evenkeel_moe.errors import InvalidInput

if TYPE_CHECKING:
    from torch import device

    from evenkeel_moe.agent.profiler import ExpertShape
    from evenkeel_moe.wire.link import ReplicaCost


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRange:
    """The options that say which token counts to measure, and for how long."""

    tile: Annotated[int, typer.Option(min=1, help="Tokens in one tile of the engine's kernel.")] = (
        64
    )
    dense_tokens: Annotated[
        int, typer.Option(min=1, help="Token count up to which every tile is measured.")
    ] = 2048
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens that a rank gets in one layer.")
    ] = 16384
    budget_s: Annotated[float, typer.Option(min=1, help="Seconds for one device.")] = 120.0


@with_option_groups
def profile(
    d_model: Annotated[int, typer.Option(min=1, help="Width of the model's hidden state.")],
    d_ffn: Annotated[int, typer.Option(min=1, help="Inner width of one expert.")],
    experts: Annotated[int, typer.Option(min=1, help="Slots of a rank in one layer.")],
    measured: MeasuredRange,
    folder: Annotated[
        Path,
        typer.Option(help="Folder for the curves; give it to the engine as EVENKEEL_RANK__CURVES."),
    ] = Path("curves"),
    dtype: Annotated[str, typer.Option(help="Number type, by its name in torch.")] = "bfloat16",
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, or a GPU, for example cuda:0.", show_default="every GPU, else the CPU"
        ),
    ] = None,
) -> None:
    """Measure the time of one MoE layer by its tokens and replicas on each device, and save it."""
    try:
        import torch

        from evenkeel_moe.agent import profiler
    except ModuleNotFoundError as error:
        raise CliError(
            f"a profile needs `pip install 'evenkeel-moe[rank]'`: {error}", Exit.USAGE
        ) from error
    names = [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    shape = profiler.ExpertShape(d_model, d_ffn, experts, dtype)
    counts = profiler.token_counts(measured.tile, measured.dense_tokens, measured.max_tokens)
    for name in names if device is None else [device]:
        try:
            place = torch.device(name)
            uuid = str(torch.cuda.get_device_properties(place).uuid) if place.type == "cuda" else ""
            run = profiler.moe_layer(shape, place)
        except (RuntimeError, AssertionError) as error:
            raise CliError(f"{name}: {str(error)[:200]}", Exit.USAGE) from error

        def settle(place: torch.device = place) -> None:
            if place.type == "cuda":
                torch.cuda.synchronize(place)

        found = profiler.measure(
            run, counts, measured.tile, budget_s=measured.budget_s / 2, settle=settle
        )
        del run  # Its weights are as large as those of the next layer.
        cost, words = _time_by_replicas(shape, place, measured, settle)
        about = {"d_model": d_model, "d_ffn": d_ffn, "experts": experts, "dtype": dtype}
        path = profiler.save_curve(folder, uuid, found, {**about, "device": name}, cost)
        typer.echo(
            f"{path}: {len(counts)} counts up to {counts[-1]} tokens, {found.rounds} rounds in"
            f" {found.took_s:.0f} s; {found.seconds[0] * 1e3:.3f} ms at {counts[0]} tokens,"
            f" {found.seconds[-1] * 1e3:.3f} ms at {counts[-1]}"
        )
        typer.echo(f"{path}: {words}")


def _time_by_replicas(
    shape: "ExpertShape", place: "device", measured: MeasuredRange, settle: Callable[[], None]
) -> "tuple[ReplicaCost | None, str]":
    """Return the time by tokens and replicas, None if it cannot be told, and a line about it."""
    from evenkeel_moe.agent import replica_profiler

    try:
        points = replica_profiler.grid(shape.experts, measured.max_tokens)
        layer = replica_profiler.grouped_layer(shape, place)
        found = replica_profiler.measure_replicas(
            layer, points, budget_s=measured.budget_s / 2, settle=settle
        )
        cost = replica_profiler.fit_replica_cost(found, SystemClock().unix())
    except InvalidInput as error:
        return None, f"no time by replicas: {error}"
    return cost, (
        f"{len(points)} points of tokens and replicas, {found.rounds} rounds in"
        f" {found.took_s:.0f} s; fixed {cost.fixed_s * 1e6:.1f} us,"
        f" {cost.s_per_token * 1e6:.4f} us per token, {cost.s_per_replica * 1e6:.2f} us per"
        f" replica, at least {cost.read_s * 1e6:.2f} us to read one; mean error"
        f" {cost.fit_error:.1%}"
    )
