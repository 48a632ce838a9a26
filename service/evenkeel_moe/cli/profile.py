"""`evenkeel profile`: measure this machine's devices for the planner, before the engine takes them."""

from pathlib import Path
from typing import Annotated

import typer

from evenkeel_moe.cli.client import CliError, Exit

__all__ = ["profile"]


def profile(
    d_model: Annotated[int, typer.Option(min=1, help="Width of the model's hidden state.")],
    d_ffn: Annotated[int, typer.Option(min=1, help="Width inside one expert.")],
    experts: Annotated[int, typer.Option(min=1, help="Slots a rank holds in one layer.")],
    folder: Annotated[
        Path,
        typer.Option(help="Where curves are kept; give it to the engine as EVENKEEL_RANK__CURVES."),
    ] = Path("curves"),
    dtype: Annotated[str, typer.Option(help="Number type, as torch calls it.")] = "bfloat16",
    tile: Annotated[
        int, typer.Option(min=1, help="Tokens of one tile of the engine's kernel.")
    ] = 64,
    dense_tokens: Annotated[
        int, typer.Option(min=1, help="Up to here every tile is measured.")
    ] = 2048,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens a rank carries in one layer.")
    ] = 16384,
    budget_s: Annotated[float, typer.Option(min=1, help="Seconds for one device.")] = 120.0,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, or a GPU as cuda:0.", show_default="every GPU, else the CPU"),
    ] = None,
) -> None:
    """Measure how long one MoE layer takes by the tokens it carries, on each device, and keep the curves."""
    try:
        import torch

        from evenkeel_moe.agent import profiler
    except ModuleNotFoundError as error:
        raise CliError(
            f"a profile needs `pip install 'evenkeel-moe[rank]'`: {error}", Exit.USAGE
        ) from error
    names = (
        [device]
        if device is not None
        else [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    )
    shape = profiler.ExpertShape(d_model, d_ffn, experts, dtype)
    counts = profiler.token_counts(tile, dense_tokens, max_tokens)
    for name in names:
        try:
            where = torch.device(name)
            uuid = str(torch.cuda.get_device_properties(where).uuid) if where.type == "cuda" else ""
            run = profiler.moe_layer(shape, where)
        except (RuntimeError, AssertionError) as error:
            raise CliError(f"{name}: {str(error)[:200]}", Exit.USAGE) from error

        def settle(where: "torch.device" = where) -> None:
            if where.type == "cuda":
                torch.cuda.synchronize(where)

        found = profiler.measure(run, counts, tile, budget_s=budget_s, settle=settle)
        about = {
            "d_model": d_model,
            "d_ffn": d_ffn,
            "experts": experts,
            "dtype": dtype,
            "device": name,
        }
        path = profiler.save_curve(folder, uuid, found, about)
        typer.echo(
            f"{path}: {len(counts)} counts up to {counts[-1]} tokens, {found.rounds} rounds in {found.took_s:.0f} s;"
            f" {found.seconds[0] * 1e3:.3f} ms at {counts[0]}, {found.seconds[-1] * 1e3:.3f} ms at {counts[-1]}"
        )
