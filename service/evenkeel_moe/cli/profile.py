"""`evenkeel profile`: measure the devices of this machine before an engine uses them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evenkeel_moe.cli.console import say
from evenkeel_moe.cli.exits import CliError, Exit
from evenkeel_moe.cli.options import with_option_groups
from evenkeel_moe.errors import InvalidInput


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
        typer.Option(
            "--out", help="Folder for the curves; give it to the engine as EVENKEEL_RANK__CURVES."
        ),
    ] = Path("curves"),
    dtype: Annotated[str, typer.Option(help="Number type, by its name in torch.")] = "bfloat16",
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, or a GPU, for example cuda:0.", show_default="every GPU, else the CPU"
        ),
    ] = None,
) -> None:
    """Measure the time of an MoE layer on this machine.

    It measures by tokens and by replicas, and writes a file for each device.
    """
    try:
        from evenkeel_moe.cli.device_profile import device_names, profile_device
    except ModuleNotFoundError as error:
        raise CliError(
            f"a profile needs `pip install 'evenkeel-moe[rank]'`: {error}", Exit.USAGE
        ) from error
    for name in device_names() if device is None else [device]:
        try:
            lines = profile_device(
                name,
                folder,
                (d_model, d_ffn, experts, dtype),
                tile_tokens=measured.tile,
                dense_tokens=measured.dense_tokens,
                max_tokens=measured.max_tokens,
                budget_s=measured.budget_s,
            )
        except InvalidInput as error:
            raise CliError(str(error), Exit.USAGE) from error
        for line in lines:
            say(line)
